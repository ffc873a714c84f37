"""The ways to make one reduction that are measured against each other.

`bf16` and `fp32` are `torch.distributed`; `e4m3/1024` and the like are ours. `e4m3/1024 codec` is
the arithmetic of ours alone, with nothing sent: what remains when the network is infinitely fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp4_plugin.bench.comm.settings import OPERATIONS
from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.comm.reducer import GradientReducer
from fp4_plugin.comm.traffic import Traffic
from fp4_plugin.comm.transport import Members

__all__ = ["BASELINE", "Contender", "codec_only", "compressed", "plain", "ring_bytes"]

BASELINE = "bf16"


@dataclass(frozen=True)
class Contender:
    """`reduce` takes this rank's gradients, of `dtype`, and returns its share of the sum.

    It may change what it is given. traffic: what it sent, if it counts.
    """

    label: str
    dtype: torch.dtype
    reduce: Callable[[torch.Tensor], torch.Tensor]
    traffic: Traffic | None = None


def plain(operation: str, dtype: torch.dtype, members: Members) -> Contender:
    """What `torch.distributed` does in the place of `operation`."""
    import torch.distributed as dist

    # torch 2.13 renamed it and warns about the old name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_reduce(buffer: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(buffer, group=members.group)
        return _own_share(buffer, members)

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(_own_share(buffer, members))
        scatter(output, buffer, group=members.group)
        return output

    label = {torch.bfloat16: BASELINE, torch.float32: "fp32"}[dtype]
    calls = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter}
    return Contender(label, dtype, calls[OPERATIONS[operation]])


def compressed(operation: str, codec: BlockCodec, members: Members) -> Contender:
    """Ours, on BF16 gradients; counts bytes and samples nothing, as the public functions."""
    reducer = GradientReducer(codec)
    reducer.traffic.sampling = False

    def all_reduce(buffer: torch.Tensor) -> torch.Tensor:
        reducer.all_reduce(buffer, members.group)
        return _own_share(buffer, members)

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(_own_share(buffer, members))
        reducer.reduce_scatter(output, buffer, members.group)
        return output

    def reduce_to_owners(buffer: torch.Tensor) -> torch.Tensor:
        owners = [(len(buffer) // members.size, [rank]) for rank in range(members.size)]
        reducer.reduce_to_owners(buffer, owners, members.group)
        return _own_share(buffer, members)

    calls = {
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "reduce_to_owners": reduce_to_owners,
    }
    return Contender(_label(codec), torch.bfloat16, calls[operation], reducer.traffic)


def codec_only(operation: str, codec: BlockCodec, members: Members) -> Contender:
    """What `compressed` encodes, adds up and decodes, on this rank alone."""

    def run(buffer: torch.Tensor) -> torch.Tensor:
        shares, own = buffer.view(members.size, -1), _own_share(buffer, members)
        numel = len(own)
        messages = [torch.empty(codec.num_bytes(numel), dtype=torch.uint8) for _ in shares]
        others = [rank for rank in range(members.size) if rank != members.rank]
        for rank in others:
            codec.encode(shares[rank], messages[rank])
        # They stand for what the others send about this rank's share.
        terms = [own, *(messages[rank] for rank in others)]
        codec.sum(terms, numel, lambda start, part: own[start:][: len(part)].copy_(part))
        if operation == "all_reduce":
            codec.encode(own, messages[members.rank])
            for share, message in zip(shares, messages, strict=True):
                share.copy_(codec.decode(message, numel))
        return own

    return Contender(f"{_label(codec)} codec", torch.bfloat16, run)


def ring_bytes(operation: str, numel: int, num_ranks: int, dtype: torch.dtype) -> int:
    """What each rank of a ring sends for the counterpart of `operation` in `dtype`."""
    trips = {"all_reduce": 2, "reduce_scatter": 1}[OPERATIONS[operation]]
    return round(trips * numel * (num_ranks - 1) / num_ranks * dtype.itemsize)


def _own_share(buffer: torch.Tensor, members: Members) -> torch.Tensor:
    return buffer.view(members.size, -1)[members.rank]


def _label(codec: BlockCodec) -> str:
    return f"{codec.format.name}/{codec.block_size}"
