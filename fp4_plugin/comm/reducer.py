"""Sums over ranks with FP8 on the wire and float32 in the sum.

    exchange   every rank encodes what others own and sends it there (all-to-all)
    sum        the owner decodes what came and adds it to its own, in float32, in rank order
    return     all-reduce and reduce only: the owner encodes its sum and sends it back

FP8 numbers are never added: a ring that sums in FP8 has 1 dB of signal left at 512 ranks, this
keeps 28 and more. Sums are the same bits on all ranks and in all runs: one owner makes each of
them, in the order of the ranks. Its own share is not sent, hence not rounded.

Everything is enqueued on the current stream. Nothing on the way waits for the device, except that
ranks compare codec and sizes when they see them for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.comm.error_feedback import ErrorFeedback
from fp4_plugin.comm.factor import AutomaticFactor
from fp4_plugin.comm.pending import Pending, finished_or_pending
from fp4_plugin.comm.shares import (
    Ranges,
    Segment,
    Shares,
    copy_scaled,
    even_shares,
    joined,
    num_elements,
    owned_ranges,
    require_fitting,
    require_reducible,
    segments_within,
    store,
    views,
)
from fp4_plugin.comm.traffic import Traffic
from fp4_plugin.comm.transport import (
    Members,
    all_gather,
    all_to_all,
    finish_work,
    members_of,
    require_same_layout,
)
from fp4_plugin.comm.workspace import Workspace
from fp4_plugin.errors import CommunicationError

__all__ = ["GradientReducer", "Pending"]

# What a buffer holds, in order; per destination rank for shares. Asked only where it is needed.
Describe = Callable[[], Sequence[Segment]]
DescribeShares = Callable[[], Sequence[Sequence[Segment]]]


@dataclass
class _Exchange:
    """The all-to-all of one reduction: from every other rank a message about this rank's share.

    own: this rank's own values of it, 1-D. buffers: to give back when the sum is made.
    """

    members: Members
    own: torch.Tensor
    slot: int
    received: torch.Tensor
    buffers: Sequence[torch.Tensor]
    sent_bytes: int
    work: Any


class GradientReducer:
    """Reduces gradients over process groups, and counts what that took.

    codec: how blocks are written. factor, feedback: optional modes, see their classes; feedback
    acts where `describe` says which parameters a tensor holds. `traffic` counts calls, bytes and
    losses.

    The methods take contiguous float32, bfloat16 or float16 tensors, of equal sizes on all ranks,
    and add up; nobody divides. An empty tensor, or a group of one rank, is left as it is and
    nothing is sent. They raise CommunicationError for other tensors, for a group this rank is not
    in, for ranks with different codecs or sizes, and when a collective fails or times out.

    Ranks have to wait for asynchronous reductions in the same order.
    """

    def __init__(
        self,
        codec: BlockCodec | None = None,
        *,
        factor: AutomaticFactor | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.codec = codec or BlockCodec()
        self.factor = factor
        self.feedback = feedback
        self.traffic = Traffic()
        self._workspace = Workspace()

    @torch.no_grad()
    def all_reduce(
        self,
        tensor: torch.Tensor,
        group: Any = None,
        *,
        async_op: bool = False,
        describe: Describe | None = None,
    ) -> Pending | None:
        """Sum `tensor` over the group, in place: the same bits on every rank."""
        members, flat = members_of(group), require_reducible(tensor)
        if _is_idle(len(flat), members):
            return finished_or_pending(async_op)
        ranges = even_shares(len(flat), members.size)
        exchange = self._exchange_flat(flat, ranges, members, describe)
        slot = self.codec.slot_bytes(num_elements(ranges[0]))
        gathered = self._workspace.take(members.size * slot, flat.device)
        slots = gathered.view(members.size, slot)
        self._encode_sum(exchange, slots[members.rank])
        work = all_gather(slots.view(-1), members, async_op)
        sent_bytes = exchange.sent_bytes + slot * (members.size - 1)
        self._count("all_reduce", len(flat), sent_bytes, members, trips=2)

        def finish() -> None:
            finish_work(work, "all-gather", members)
            for message, pieces in zip(slots.unbind(), views(flat, ranges), strict=True):
                self._decode(message, pieces)
            self._workspace.give_back(gathered)

        return finished_or_pending(async_op, finish)

    @torch.no_grad()
    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        group: Any = None,
        *,
        async_op: bool = False,
        describe: Describe | None = None,
    ) -> Pending | None:
        """Sum `tensor` over the group into the one of rank `dst` (of the whole job), in place.

        `dst` gets the bits that `all_reduce` would give; on other ranks `tensor` stays as it is.
        Raises CommunicationError if `dst` is not in the group.
        """
        members, flat = members_of(group), require_reducible(tensor)
        root = members.index_of(dst)
        if _is_idle(len(flat), members):
            return finished_or_pending(async_op)
        ranges = even_shares(len(flat), members.size)
        exchange = self._exchange_flat(flat, ranges, members, describe)
        slots = [self.codec.slot_bytes(num_elements(one)) for one in ranges]
        is_root = members.rank == root
        mine = self._workspace.take(slots[members.rank], flat.device)
        self._encode_sum(exchange, mine)
        returned = self._workspace.take(sum(slots) if is_root else 0, flat.device)
        sent_splits = [slots[members.rank] if r == root else 0 for r in range(members.size)]
        received_splits = slots if is_root else [0] * members.size
        work = all_to_all(returned, mine, received_splits, sent_splits, members, async_op)
        sent_bytes = exchange.sent_bytes + (0 if is_root else slots[members.rank])
        self._count("reduce", len(flat), sent_bytes, members)

        def finish() -> None:
            finish_work(work, "all-to-all", members)
            if is_root:
                messages = returned.split(slots)
                for message, pieces in zip(messages, views(flat, ranges), strict=True):
                    self._decode(message, pieces)
            self._workspace.give_back(mine)
            self._workspace.give_back(returned)

        return finished_or_pending(async_op, finish)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        group: Any = None,
        *,
        async_op: bool = False,
        describe: Describe | None = None,
    ) -> Pending | None:
        """Sum part r of `input` over the group into the `output` of rank r.

        input: as many equal parts as ranks, one after the other; `output` has the shape of a part
        in any of the three dtypes, and may be this rank's part of `input` itself.
        """
        members, flat = members_of(group), require_reducible(input)
        share = output.numel()
        if len(flat) != share * members.size:
            raise CommunicationError(
                f"reduce_scatter over {members.size} ranks: input has {len(flat)} elements, which "
                f"is not {members.size} times the {share} of output"
            )
        ranges = [[(rank * share, (rank + 1) * share)] for rank in range(members.size)]
        describe_shares = None if describe is None else _within(describe, ranges)
        return self.reduce_scatter_v(
            [output], views(flat, ranges), group, async_op=async_op, describe=describe_shares
        )

    @torch.no_grad()
    def reduce_scatter_v(
        self,
        outputs: Sequence[torch.Tensor],
        shares: Shares,
        group: Any = None,
        *,
        scale: float = 1.0,
        async_op: bool = False,
        describe: DescribeShares | None = None,
    ) -> Pending | None:
        """`reduce_scatter` of shares that are ragged and scattered, as MPI's v-collectives are.

        shares: for every rank the tensors it owns; sizes may differ from rank to rank of the
        group, but not between two senders. `outputs` are of the sizes of this rank's own share.
        scale: multiplies the float32 sums, for a mean that a narrow dtype need not hold the sum of.
        """
        members = members_of(group)
        flat_shares = [[require_reducible(one) for one in share] for share in shares]
        flat_outputs = [require_reducible(one) for one in outputs]
        require_fitting(flat_outputs, flat_shares, members.size, members.rank)
        numel = sum(len(one) for share in flat_shares for one in share)
        if members.size == 1:
            copy_scaled(flat_shares[0], flat_outputs, scale)
        if _is_idle(numel, members):
            return finished_or_pending(async_op)
        exchange = self._exchange(flat_shares, members, describe, async_op)
        self._count("reduce_scatter", numel, exchange.sent_bytes, members)
        return finished_or_pending(
            async_op, lambda: self._finish_scatter(exchange, flat_outputs, scale)
        )

    @torch.no_grad()
    def reduce_to_owners(
        self,
        tensor: torch.Tensor,
        owners: Sequence[tuple[int, Sequence[int]]],
        group: Any = None,
        *,
        describe: Describe | None = None,
    ) -> None:
        """Sum each run of `tensor` over the group, in place, on the ranks that own it alone.

        owners: (elements, ranks of the group) of one run after the other; they cover `tensor`. On
        ranks that do not own a run its elements stay as they are. Compared with an all-reduce,
        half the bytes travel, and nothing is rounded twice.
        """
        members, flat = members_of(group), require_reducible(tensor)
        owned = sum(numel for numel, _ in owners)
        if owned != len(flat):
            raise CommunicationError(
                f"the owned runs have {owned} elements, the tensor {len(flat)}"
            )
        if _is_idle(len(flat), members):
            return
        ranges = owned_ranges(owners, members.size)
        if not any(ranges):
            return
        exchange = self._exchange_flat(flat, ranges, members, describe)
        # What DeepSpeed, for one, does in its place is an all-reduce.
        self._count("reduce_to_owners", len(flat), exchange.sent_bytes, members, trips=2)
        self._finish_scatter(exchange, views(flat, ranges)[members.rank])

    def _exchange_flat(
        self,
        flat: torch.Tensor,
        ranges: Sequence[Ranges],
        members: Members,
        describe: Describe | None,
    ) -> _Exchange:
        """The exchange of parts of one buffer."""
        segments = None if describe is None else _within(describe, ranges)
        return self._exchange(views(flat, ranges), members, segments)

    def _exchange(
        self,
        shares: Shares,
        members: Members,
        describe: DescribeShares | None,
        async_op: bool = False,
    ) -> _Exchange:
        device = next(one.device for share in shares for one in share)
        sizes = [sum(len(one) for one in share) for share in shares]
        require_same_layout(self.codec, sizes, members, device)
        describe = None if describe is None else cache(describe)
        shares = self._corrected(shares, describe, members.rank)
        amax = None if self.factor is None else self.factor.shared_amax(shares, members)
        splits = [self.codec.slot_bytes(size) for size in sizes]
        slot, splits[members.rank] = splits[members.rank], 0
        sent = self._workspace.take(sum(splits), device)
        for owner, message in enumerate(sent.split(splits)):
            if owner != members.rank:
                self._encode(shares[owner], message, amax, _nth(describe, owner))
        own = joined(shares[members.rank], device)
        self.traffic.watch_own(own, self.codec.block_size, _nth(describe, members.rank))
        received_splits = [slot if rank != members.rank else 0 for rank in range(members.size)]
        received = self._workspace.take(sum(received_splits), device)
        work = all_to_all(received, sent, received_splits, splits, members, async_op)
        buffers = [received]
        if async_op:
            buffers.append(sent)
        else:
            self._workspace.give_back(sent)
        return _Exchange(members, own, slot, received, buffers, sum(splits), work)

    def _corrected(self, shares: Shares, describe: DescribeShares | None, rank: int) -> Shares:
        """The shares with what they lost last time, where feedback is on; that of `rank` stays."""
        if self.feedback is None or describe is None:
            return shares
        device = next(one.device for share in shares for one in share)
        self.feedback.hold(describe()[rank], device)
        return [
            share if owner == rank else [self.feedback.corrected(joined(share, device), segments)]
            for owner, (share, segments) in enumerate(zip(shares, describe(), strict=True))
        ]

    def _encode(
        self,
        pieces: Sequence[torch.Tensor],
        message: torch.Tensor,
        amax: torch.Tensor | None,
        describe: Describe,
    ) -> None:
        """Write one message, and remember what it lost if there is error feedback."""
        values = joined(pieces, message.device)
        if len(values) == 0:
            return
        message = message[: self.codec.num_bytes(len(values))]
        parts = self.codec.encode(values, message, amax)
        self.traffic.sample(values, parts, amax)
        self.traffic.watch(values, parts.scale_inv.isnan(), self.codec.block_size, describe)
        if self.factor is not None:
            self.factor.observe(values, amax)
        if self.feedback is not None:
            self.feedback.keep(values - self.codec.decode(message, len(values)), describe())

    def _encode_sum(self, exchange: _Exchange, message: torch.Tensor) -> None:
        """Sum this rank's share and write it into `message`; the exchange's buffers are free."""
        numel = len(exchange.own)
        if numel:
            parts = self.codec.begin(message[: self.codec.num_bytes(numel)], numel)
            self.codec.sum(
                self._terms(exchange),
                numel,
                lambda start, values: self.codec.encode_into(parts, start, values),
            )
        self._give_back(exchange)

    def _finish_scatter(
        self, exchange: _Exchange, outputs: Sequence[torch.Tensor], scale: float = 1.0
    ) -> None:
        finish_work(exchange.work, "all-to-all", exchange.members)
        self.codec.sum(
            self._terms(exchange),
            len(exchange.own),
            lambda start, values: store(outputs, start, values.mul_(scale)),
        )
        self._give_back(exchange)

    def _terms(self, exchange: _Exchange) -> list[torch.Tensor]:
        """What adds up to this rank's share, in rank order."""
        size, others = self.codec.num_bytes(len(exchange.own)), exchange.members.size - 1
        messages = exchange.received.view(others, exchange.slot).unbind()
        terms = [message[:size] for message in messages]
        rank = exchange.members.rank
        return [*terms[:rank], exchange.own, *terms[rank:]]

    def _decode(self, message: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        numel = sum(len(piece) for piece in pieces)
        message = message[: self.codec.num_bytes(numel)]
        self.codec.sum([message], numel, lambda start, values: store(pieces, start, values))

    def _give_back(self, exchange: _Exchange) -> None:
        for buffer in exchange.buffers:
            self._workspace.give_back(buffer)

    def _count(
        self, op: str, numel: int, sent_bytes: int, members: Members, trips: int = 1
    ) -> None:
        """`trips`: how often a ring of BF16 would pass the tensor (2 for an all-reduce)."""
        bf16_elements = trips * numel * (members.size - 1) / members.size
        self.traffic.count_call(op, numel, sent_bytes, bf16_elements)


def _is_idle(numel: int, members: Members) -> bool:
    return numel == 0 or members.size == 1


def _within(describe: Describe, ranges: Sequence[Ranges]) -> DescribeShares:
    return lambda: [segments_within(describe(), one) for one in ranges]


def _nth(describe: DescribeShares | None, index: int) -> Describe:
    return lambda: () if describe is None else describe()[index]
