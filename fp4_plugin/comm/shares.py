"""Who owns which part of a buffer, and views of these parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp4_plugin.comm.traffic import Segment
from fp4_plugin.errors import CommunicationError

__all__ = [
    "Ranges",
    "Segment",
    "Shares",
    "copy_scaled",
    "even_shares",
    "joined",
    "num_elements",
    "owned_ranges",
    "require_fitting",
    "require_reducible",
    "segments_within",
    "store",
    "views",
]

# Half-open ranges of a flat buffer.
Ranges = Sequence[tuple[int, int]]
# Per destination rank, the pieces that are sent there one after the other.
Shares = Sequence[Sequence[torch.Tensor]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Even shares start at multiples of this many elements, for aligned loads.
_ALIGNMENT = 16


def require_reducible(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one dimension, not copied; CommunicationError if it cannot be reduced."""
    if tensor.dtype not in _DTYPES:
        raise CommunicationError(
            f"cannot reduce {tensor.dtype} in FP8: allowed are {[str(d) for d in _DTYPES]}; "
            "use torch.distributed for integers, and cast float64 first"
        )
    if tensor.layout != torch.strided:
        raise CommunicationError(
            f"cannot reduce a sparse tensor ({tensor.layout}) in FP8; pass .to_dense()"
        )
    if not tensor.is_contiguous():
        raise CommunicationError(
            f"cannot reduce a tensor of shape {tuple(tensor.shape)} that is not contiguous: sums "
            "are written in place; pass .contiguous() and copy the result back"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise CommunicationError(
            "cannot reduce a tensor made in inference mode outside of it: torch forbids writing to "
            "it; pass a .clone()"
        )
    return tensor.detach().view(-1)


def require_fitting(outputs: Sequence[torch.Tensor], shares: Shares, size: int, rank: int) -> None:
    """CommunicationError unless there is a share per rank and `outputs` hold that of `rank`."""
    if len(shares) != size:
        raise CommunicationError(
            f"there are {len(shares)} shares for the {size} ranks of the group"
        )
    own = [len(one) for one in shares[rank]]
    if sum(own) != sum(len(one) for one in outputs):
        raise CommunicationError(
            f"outputs of {[len(one) for one in outputs]} elements do not fit this rank's "
            f"share of {own}"
        )


def even_shares(numel: int, size: int) -> list[list[tuple[int, int]]]:
    """One range per rank, as even as alignment allows; the last ones may be short or empty."""
    share = -(-numel // size)
    share = -(-share // _ALIGNMENT) * _ALIGNMENT
    return [[(min(r * share, numel), min((r + 1) * share, numel))] for r in range(size)]


def owned_ranges(
    owners: Sequence[tuple[int, Sequence[int]]], size: int
) -> list[list[tuple[int, int]]]:
    """Ranges per rank of runs of (elements, owning ranks); neighbouring ranges are merged."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    start = 0
    for numel, ranks in owners:
        for rank in ranks:
            own = ranges[rank]
            if own and own[-1][1] == start:
                own[-1] = (own[-1][0], start + numel)
            else:
                own.append((start, start + numel))
        start += numel
    return ranges


def num_elements(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def views(flat: torch.Tensor, ranges: Sequence[Ranges]) -> list[list[torch.Tensor]]:
    """The parts of `flat` in each list of ranges."""
    return [[flat[start:stop] for start, stop in one] for one in ranges]


def store(pieces: Sequence[torch.Tensor], start: int, values: torch.Tensor) -> None:
    """Copy `values` to `pieces`, seen as one sequence of elements, from its element `start`."""
    stop = start + len(values)
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        low, high = max(begin, start), min(end, stop)
        if low < high:
            piece[low - begin : high - begin].copy_(values[low - start : high - start])
        begin = end


def joined(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The pieces as one tensor; a single one is not copied."""
    if not pieces:
        return torch.empty(0, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces))


def copy_scaled(
    sources: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
) -> None:
    """Copy `sources` times `scale` to `outputs`, both seen as one sequence of elements."""
    start = 0
    for source in sources:
        store(outputs, start, source if scale == 1 else source * scale)
        start += len(source)


def segments_within(segments: Sequence[Segment], ranges: Ranges) -> list[Segment]:
    """What of the `segments` of a flat buffer lies in `ranges`, in their order."""
    found = []
    for low, high in ranges:
        start = 0
        for segment in segments:
            first, last = max(start, low), min(start + segment.numel, high)
            if first < last:
                offset = segment.offset + first - start
                found.append(Segment(segment.name, offset, last - first))
            start += segment.numel
    return found
