"""N ranks as threads of this process: `torch.distributed` replaced by copies between them.

    results = run_threads(4, lambda group: ..., timeout_s=10)    # one result per rank

Everything above the collectives is the package's own code. A rank that fails breaks the barrier,
so that the others end too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

__all__ = ["run_threads"]


class _Group:
    """What the package sees of a process group; one object per rank."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank, self.size, self.shared = rank, size, shared


class _Shared:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.posted: dict[int, Any] = {}

    def exchange(self, group: _Group, what: Any, copy: Callable[[dict[int, Any]], None]) -> None:
        self.posted[group.rank] = what
        self.barrier.wait()
        copy(self.posted)
        self.barrier.wait()


class _Done:
    def wait(self) -> bool:
        return True


def run_threads(size: int, function: Callable[[Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """`function(group)` on every rank; the first failure is raised here."""
    shared = _Shared(size, timeout_s)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(_Group(rank, size, shared))
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    with _replaced():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [results[rank] for rank in range(size)]


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    replacements = {
        "is_initialized": lambda: True,
        "get_rank": lambda group: group.rank,
        "get_backend": lambda group: "threads",
        "get_world_size": lambda group: group.size,
        "get_process_group_ranks": lambda group: list(range(group.size)),
        "all_to_all_single": _all_to_all,
        gather: _all_gather_into,
        "all_gather": _all_gather,
        "all_reduce": _all_reduce,
    }
    with contextlib.ExitStack() as stack:
        for name, function in replacements.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        yield


def _all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_splits: list[int],
    sent_splits: list[int],
    group: _Group,
    async_op: bool = False,
) -> _Done | None:
    def copy(posted: dict[int, Any]) -> None:
        pieces = [posted[r][0].split(posted[r][1])[group.rank] for r in range(group.size)]
        assert [len(piece) for piece in pieces] == received_splits
        received.copy_(torch.cat(pieces))

    assert sum(sent_splits) == len(sent) and sum(received_splits) == len(received)
    group.shared.exchange(group, (sent, sent_splits), copy)
    return _Done() if async_op else None


def _all_gather_into(
    gathered: torch.Tensor, mine: torch.Tensor, group: _Group, async_op: bool = False
) -> _Done | None:
    parts = gathered.view(group.size, -1)

    def copy(posted: dict[int, Any]) -> None:
        for rank in range(group.size):
            if rank != group.rank:
                parts[rank].copy_(posted[rank])

    # As torch does: the own slot is written as well, from the same memory here.
    assert mine.data_ptr() == parts[group.rank].data_ptr()
    group.shared.exchange(group, mine.clone(), copy)
    return _Done() if async_op else None


def _all_gather(found: list[torch.Tensor], mine: torch.Tensor, group: _Group) -> None:
    def copy(posted: dict[int, Any]) -> None:
        for rank, one in enumerate(found):
            one.copy_(posted[rank])

    group.shared.exchange(group, mine, copy)


def _all_reduce(value: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    def copy(posted: dict[int, Any]) -> None:
        all_values = torch.stack([posted[rank] for rank in range(group.size)])
        value.copy_(all_values.amax(0) if op == dist.ReduceOp.MAX else all_values.sum(0))

    group.shared.exchange(group, value.clone(), copy)
