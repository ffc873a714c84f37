"""One reduction by all contenders in turn, on one rank among the others.

A round calls every contender once; the next round starts with the next one, so that none always
follows the same other. Ranks meet before each measurement, and its time is that of the slowest
rank. Small tensors are reduced several times per measurement, on top of each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fp4_plugin.bench.comm.contenders import Contender, codec_only, compressed, plain, ring_bytes
from fp4_plugin.bench.comm.gradients import Deviation, deviation, heavy_tailed
from fp4_plugin.bench.comm.settings import CommOptions
from fp4_plugin.comm.transport import Members

__all__ = ["WARMUP_ROUNDS", "Measured", "measure"]

WARMUP_ROUNDS = 2
_TIMED_ELEMENTS = 1 << 18
# The sum grows by the number of ranks with each; BF16 holds this many for 64 ranks.
_MAX_CALLS = 16


@dataclass(frozen=True)
class Measured:
    """One contender at one reduction: seconds per round, bytes per call and rank, error.

    The error is None for the codec alone, which reduces nothing; so are its bytes.
    """

    operation: str
    num_ranks: int
    elements: int
    label: str
    seconds: tuple[float, ...]
    wire_bytes: int | None
    deviation: Deviation | None

    def record(self) -> dict[str, Any]:
        """JSON-ready; `from_record` reads it back to an equal object."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Measured:
        error = record["deviation"]
        values = {
            "seconds": tuple(record["seconds"]),
            "deviation": None if error is None else Deviation(**error),
        }
        return cls(**{**record, **values})


def measure(
    operation: str,
    size: int,
    options: CommOptions,
    members: Members,
    after_round: Callable[[], object],
) -> list[Measured]:
    """All contenders at `operation` on `size` elements, rounded up to a multiple of the ranks."""
    numel = -(-size // members.size) * members.size
    source = heavy_tailed(numel, options.seed, members.rank)
    contenders = _contenders(operation, options, members)
    reduced = [one for one in contenders if not one.label.endswith(" codec")]
    errors = _errors(source, reduced, members)
    seconds = _seconds(source, contenders, options.rounds, members, after_round)
    return [
        Measured(
            operation,
            members.size,
            numel,
            one.label,
            tuple(seconds[index].tolist()),
            _wire_bytes(one, operation, numel, members) if one in reduced else None,
            errors.get(one.label),
        )
        for index, one in enumerate(contenders)
    ]


def _contenders(operation: str, options: CommOptions, members: Members) -> list[Contender]:
    ours = [
        make(operation, codec, members)
        for codec in options.codecs()
        for make in (compressed, codec_only)
    ]
    return [*(plain(operation, dtype, members) for dtype in (torch.bfloat16, torch.float32)), *ours]


def _errors(
    source: torch.Tensor, contenders: Sequence[Contender], members: Members
) -> dict[str, Deviation]:
    """One call of each against the sum in float64; over all ranks."""
    import torch.distributed as dist

    exact = source.double()
    dist.all_reduce(exact, group=members.group)
    reference = exact.view(members.size, -1)[members.rank].clone()
    del exact
    found = {}
    for one in contenders:
        own = deviation(reference, one.reduce(source.to(one.dtype, copy=True)))
        sums = torch.tensor([own.signal, own.noise], dtype=torch.float64)
        worst = torch.tensor(own.worst_block, dtype=torch.float64)
        dist.all_reduce(sums, group=members.group)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=members.group)
        found[one.label] = Deviation(float(sums[0]), float(sums[1]), float(worst))
    return found


def _seconds(
    source: torch.Tensor,
    contenders: Sequence[Contender],
    rounds: int,
    members: Members,
    after_round: Callable[[], object],
) -> torch.Tensor:
    """(contenders, rounds) float64: the slowest rank's seconds per call."""
    import torch.distributed as dist

    num_calls = min(max(1, _TIMED_ELEMENTS // len(source)), _MAX_CALLS)
    buffers = {one.dtype: source.to(one.dtype, copy=True) for one in contenders}
    seconds = torch.zeros(len(contenders), rounds + WARMUP_ROUNDS, dtype=torch.float64)
    for number in range(rounds + WARMUP_ROUNDS):
        for offset in range(len(contenders)):
            index = (number + offset) % len(contenders)
            one = contenders[index]
            buffer = buffers[one.dtype].copy_(source)
            dist.barrier(group=members.group)
            start = time.perf_counter()
            for _ in range(num_calls):
                one.reduce(buffer)
            seconds[index, number] = (time.perf_counter() - start) / num_calls
        after_round()
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=members.group)
    return seconds[:, WARMUP_ROUNDS:]


def _wire_bytes(one: Contender, operation: str, numel: int, members: Members) -> int:
    """Per call, of the rank that sends most: counted for ours, a ring's for the others."""
    import torch.distributed as dist

    if one.traffic is None:
        return ring_bytes(operation, numel, members.size, one.dtype)
    num_calls = sum(one.traffic.calls.values())
    sent = torch.tensor(one.traffic.wire_bytes // num_calls)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=members.group)
    return int(sent)
