"""The few collectives of `torch.distributed` that messages travel by, and who takes part.

Everything is uint8: gloo and older NCCL refuse float8 tensors. Over gloo messages go from rank to
rank, all receives posted before the first send: its own all-to-all fills a link in one direction at
a time and takes twice as long.

A collective that fails, because a rank died or the link was cut, ends in a CommunicationError once
the timeout of the process group has passed (`new_group` does not inherit that of
`init_process_group`: give it one). On NCCL it is torch's watchdog that notices, and ends the
process.

Ranks that reduce tensors of different sizes never get a sum. New sizes are compared first. Among
sizes that were seen before, a header that differs is a CommunicationError, and a message longer
than what waits for it makes gloo abort the process.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.errors import CommunicationError

__all__ = [
    "Members",
    "all_gather",
    "all_reduce_exactly",
    "all_to_all",
    "finish_work",
    "members_of",
    "require_same_layout",
    "timeout_of",
]

# Tells our messages from those that others send between the same ranks.
_TAG = 0xF8

# Group -> asynchronous works that nobody has waited for yet, oldest first. gloo cancels a receive
# that nobody refers to, and its message would be taken by the next one.
_unfinished: weakref.WeakKeyDictionary[Any, dict[_Works, None]] = weakref.WeakKeyDictionary()
_MOST_UNFINISHED = 256

# Group -> what its ranks have agreed on: codecs and sizes.
_agreed: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Members:
    """The ranks of a process group, seen from this one."""

    group: Any
    size: int
    rank: int

    def index_of(self, rank: int) -> int:
        """Where `rank` of the whole job stands in the group; CommunicationError if it does not."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(self.group)
        if rank not in ranks:
            raise CommunicationError(f"rank {rank} is not in the group of ranks {ranks}")
        return ranks.index(rank)

    def describe(self) -> str:
        import torch.distributed as dist

        return f"rank {dist.get_rank()} (of ranks {dist.get_process_group_ranks(self.group)})"


def members_of(group: Any = None) -> Members:
    """The members of `group`, None for all ranks.

    Raises CommunicationError without a process group, and if this rank is not in `group`.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise CommunicationError(
            "no process group: call torch.distributed.init_process_group (or "
            "deepspeed.init_distributed) before reducing gradients"
        )
    if group is None:
        group = dist.group.WORLD
    try:
        rank = -1 if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(group)
    except ValueError as error:
        raise CommunicationError(f"a process group that was destroyed: {error}") from error
    if rank < 0:
        raise CommunicationError(
            f"rank {dist.get_rank()} is not in the group it was asked to reduce over; call this "
            "on the members of the group only"
        )
    return Members(group, dist.get_world_size(group), rank)


def _guarded(call: Callable[..., Any], what: str, members: Members, *args: Any, **kw: Any) -> Any:
    """`call(*args, **kw)`; a failure says which collective failed, where, and what to look at."""
    try:
        return call(*args, **kw)
    except RuntimeError as error:
        raise CommunicationError(
            f"FP8 {what} failed on {members.describe()}: {error}. A rank has died or stopped, a "
            "link is down, or ranks reduce tensors of different sizes; look at the first rank "
            "that failed"
        ) from error


def finish_work(work: Any, what: str, members: Members) -> None:
    """Wait for what an asynchronous call returned; None stands for a call that is over."""
    if work is not None:
        _unfinished.get(members.group, {}).pop(work, None)
        _guarded(work.wait, what, members)


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
    members: Members,
    async_op: bool,
) -> Any:
    """`sent_splits[r]` bytes to rank r; what comes is in rank order. Returns the work if async."""
    import torch.distributed as dist

    if _goes_in_pairs(members):
        return _pairwise(
            received.split(list(received_splits)),
            sent.split(list(sent_splits)),
            "all-to-all",
            members,
            async_op,
        )
    return _guarded(
        dist.all_to_all_single,
        "all-to-all",
        members,
        received,
        sent,
        list(received_splits),
        list(sent_splits),
        group=members.group,
        async_op=async_op,
    )


def all_gather(gathered: torch.Tensor, members: Members, async_op: bool) -> Any:
    """In place: slot r of `gathered` comes from rank r. Returns the work if async."""
    import torch.distributed as dist

    slots = gathered.view(members.size, -1).unbind()
    if _goes_in_pairs(members):
        mine = [slots[members.rank]] * members.size
        return _pairwise(slots, mine, "all-gather", members, async_op)
    # torch 2.13 renamed it and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    own = slots[members.rank]
    return _guarded(
        gather, "all-gather", members, gathered, own, group=members.group, async_op=async_op
    )


def _goes_in_pairs(members: Members) -> bool:
    import torch.distributed as dist

    return dist.get_backend(members.group) == "gloo"


class _Works:
    """Several works as one.

    timeout: of the group, None for what its backend was made with. Sends and receives of gloo do
    not ask the group for a limit that it was given later (`_set_pg_timeout`); they take one here.
    """

    def __init__(self, works: Sequence[Any], timeout: Any) -> None:
        self._works = works
        self._arguments = () if timeout is None else (timeout,)

    def wait(self) -> None:
        for work in self._works:
            work.wait(*self._arguments)
        self._works = ()  # a second wait would be for a message that never comes


def _remember(works: _Works, members: Members, what: str) -> None:
    """Keep `works` until somebody has waited for it, or so many have come after it."""
    unfinished = _unfinished.setdefault(members.group, {})
    unfinished[works] = None
    if len(unfinished) > _MOST_UNFINISHED:
        finish_work(next(iter(unfinished)), what, members)


def timeout_of(group: Any, device: torch.device) -> Any:
    """The limit of the collectives of `group`, a timedelta; None where its backend hides it."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


def _pairwise(
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
    what: str,
    members: Members,
    async_op: bool,
) -> _Works | None:
    """`sent[r]` to rank r and `received[r]` from it, for all ranks at once."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(members.group)
    others = [index for index in range(members.size) if index != members.rank]
    if received[members.rank].data_ptr() != sent[members.rank].data_ptr():
        received[members.rank].copy_(sent[members.rank])

    def post() -> _Works:
        receives = [
            dist.irecv(received[one], ranks[one], members.group, tag=_TAG)
            for one in others
            if len(received[one])
        ]
        sends = [
            dist.isend(sent[one], ranks[one], members.group, tag=_TAG)
            for one in others
            if len(sent[one])
        ]
        return _Works([*receives, *sends], timeout_of(members.group, sent[members.rank].device))

    works = _guarded(post, what, members)
    if async_op:
        _remember(works, members, what)
        return works
    finish_work(works, what, members)
    return None


def all_reduce_exactly(value: torch.Tensor, members: Members, op: str = "SUM") -> None:
    """The sum or the largest ("MAX") `value` of the group, in place and in its own dtype."""
    import torch.distributed as dist

    operation = getattr(dist.ReduceOp, op)
    _guarded(dist.all_reduce, "all-reduce", members, value, operation, group=members.group)


def require_same_layout(
    codec: BlockCodec, sizes: Sequence[int], members: Members, device: torch.device
) -> None:
    """Raise CommunicationError on every rank unless all write with `codec`, shares of `sizes`.

    A collective at the first use of a codec with these sizes in a group, free afterwards.
    """
    import torch.distributed as dist

    # Two totals may be equal and the shares differ.
    layout = [*codec.identity(), sum(sizes), zlib.crc32(repr(list(sizes)).encode())]
    agreed = _agreed.setdefault(members.group, set())
    if tuple(layout) in agreed:
        return
    mine = torch.tensor(layout, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(members.size)]
    _guarded(dist.all_gather, "handshake", members, found, mine, group=members.group)
    layouts = [one.tolist() for one in found]
    if any(one != layout for one in layouts):
        ranks = dist.get_process_group_ranks(members.group)
        lines = [
            f"rank {rank}: {BlockCodec.describe_identity(identity)}, {numel} elements, shares "
            f"{shares:08x}"
            for rank, (*identity, numel, shares) in zip(ranks, layouts, strict=True)
        ]
        raise CommunicationError(
            "the ranks of a group reduce gradients differently; all need the same settings and "
            "tensors of the same sizes\n  " + "\n  ".join(lines[:16])
        )
    agreed.add(tuple(layout))
