"""What a reducer sent, in numbers: bytes against BF16, what was clipped, lost or not finite.

Byte counts are exact and made on the host. Fractions are sampled: they cost a pass over the data,
so they are counted only while `sampling` is on. What is counted on a device stays there until
somebody asks, so that gradients never wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4_plugin.comm.codec import MessageParts

__all__ = ["NonFinite", "Segment", "Traffic"]

_BF16_BYTES = 2
_MAGNITUDE_BITS = 0x7F
# Events kept for the manifest, and messages until `settle`; the counts go on.
_MOST_EVENTS = 32
_MOST_PENDING = 4096


@dataclass(frozen=True)
class Segment:
    """A run of a flat buffer that belongs to one parameter: `numel` elements from `offset`."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class NonFinite:
    """Blocks of this rank's own gradients that held a NaN or an Inf, in one message."""

    parameters: tuple[str, ...]
    blocks: int


@dataclass(frozen=True)
class _Pending:
    """What is known of a message until its scales have been looked at.

    bad: positions of the elements that are not finite, or None where only the blocks are known.
    """

    is_nan: torch.Tensor
    block_size: int
    segments: tuple[Segment, ...]
    bad: torch.Tensor | None


class Traffic:
    """Counters of one reducer. Reading the fractions and events waits for the device."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.exact_calls: Counter[str] = Counter()
        self.exact_elements = 0
        self.elements = 0
        self.wire_bytes = 0
        self.bf16_bytes = 0
        self.non_finite_blocks = 0
        self.sampling = True
        self._sampled_elements = 0
        self._counts: torch.Tensor | None = None  # saturated, underflowed
        self._pending: list[_Pending] = []
        self._unnamed: torch.Tensor | None = None  # blocks that fell out of the list above
        self._events: list[NonFinite] = []

    def count_call(self, op: str, elements: int, wire_bytes: int, bf16_elements: float) -> None:
        """One collective: bytes this rank sent to others, and elements BF16 would have sent."""
        self.calls[op] += 1
        self.elements += elements
        self.wire_bytes += wire_bytes
        self.bf16_bytes += round(bf16_elements * _BF16_BYTES)

    def count_exact(self, why: str, elements: int) -> None:
        """One reduction that was not made in FP8."""
        self.exact_calls[why] += 1
        self.exact_elements += elements

    def sample(
        self, values: torch.Tensor, parts: MessageParts, amax: torch.Tensor | None = None
    ) -> None:
        """Count what saturated (only a given `amax` lets anything) and what became zero."""
        if not self.sampling:
            return
        kept = torch.count_nonzero(parts.codes & _MAGNITUDE_BITS)
        lost = torch.count_nonzero(values) - kept
        clipped = torch.zeros_like(lost) if amax is None else (values.abs() > amax.view(1)).sum()
        counts = torch.stack((clipped, lost))
        self._counts = counts if self._counts is None else self._counts + counts
        self._sampled_elements += values.numel()

    def watch(
        self,
        values: torch.Tensor,
        is_nan: torch.Tensor,
        block_size: int,
        segments: Callable[[], Sequence[Segment]],
    ) -> None:
        """Remember the blocks of `values` (1-D) that are not finite; `is_nan` has a flag for each.

        segments: called for what `values` holds, now or never: buffers will have changed later. On
        a CPU values without such blocks are forgotten at once, and parameters that share a block
        are told apart.
        """
        bad = None
        if _is_readable(is_nan):
            if not is_nan.any():
                return
            bad = (~values.isfinite()).nonzero().flatten()
            if len(bad) == 0:
                return  # the scale is shared, and it is another rank that is to blame
        self._pending.append(_Pending(is_nan, block_size, tuple(segments()), bad))
        if len(self._pending) > _MOST_PENDING:
            # Nobody asks. The number is kept, on the device; where and in what is not.
            oldest = self._pending.pop(0).is_nan.sum()
            self._unnamed = oldest if self._unnamed is None else self._unnamed + oldest

    def watch_own(
        self, values: torch.Tensor, block_size: int, segments: Callable[[], Sequence[Segment]]
    ) -> None:
        """`watch` for values (1-D) that stay on this rank and are therefore never encoded."""
        if values.numel() == 0:
            return
        # A sum is finite if all its terms are, or (rarely, then looked at closely) overflows.
        if _is_readable(values) and values.sum(dtype=torch.float32).isfinite():
            return
        whole = len(values) // block_size * block_size
        finite = values[:whole].view(-1, block_size).isfinite().all(dim=1)
        rest = values[whole:].isfinite().all().view(1)
        is_nan = ~torch.cat((finite, rest))[: -(-len(values) // block_size)]
        self.watch(values, is_nan, block_size, segments)

    def settle(self) -> list[NonFinite]:
        """The non-finite messages since the last call; to be asked once per step."""
        pending, self._pending = self._pending, []
        found = [event for one in pending if (event := _event_of(one)) is not None]
        self.non_finite_blocks += sum(event.blocks for event in found)
        if self._unnamed is not None:
            self.non_finite_blocks += int(self._unnamed)
            self._unnamed = None
        self._events = [*self._events, *found][-_MOST_EVENTS:]
        return found

    def forget(self) -> None:
        """Drop what `watch` has collected, where it is known to be fine."""
        self._pending.clear()
        self._unnamed = None

    def fractions(self) -> dict[str, float | None]:
        """Saturated and underflowed shares of the sampled elements; None before any sample."""
        if self._counts is None or self._sampled_elements == 0:
            return {"saturated": None, "underflowed": None}
        saturated, underflowed = self._counts.tolist()
        return {
            "saturated": saturated / self._sampled_elements,
            "underflowed": underflowed / self._sampled_elements,
        }

    def report(self) -> dict[str, Any]:
        """JSON-ready; bytes are those of this rank. Also counts what is yet to be settled."""
        events = [event for one in self._pending if (event := _event_of(one)) is not None]
        unnamed = 0 if self._unnamed is None else int(self._unnamed)
        return {
            "calls": dict(self.calls),
            "exact_calls": dict(self.exact_calls),
            "exact_elements": self.exact_elements,
            "elements": self.elements,
            "wire_bytes": self.wire_bytes,
            "bf16_wire_bytes": self.bf16_bytes,
            "wire_ratio": self.wire_bytes / self.bf16_bytes if self.bf16_bytes else None,
            **{f"{name}_fraction": value for name, value in self.fractions().items()},
            "non_finite_blocks": self.non_finite_blocks
            + sum(event.blocks for event in events)
            + unnamed,
            "non_finite": [
                {"parameters": list(event.parameters), "blocks": event.blocks}
                for event in [*self._events, *events][-_MOST_EVENTS:]
            ],
        }


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether looking at values is free: elsewhere it waits for the device."""
    return tensor.device.type == "cpu"


def _event_of(pending: _Pending) -> NonFinite | None:
    blocks = pending.is_nan.nonzero().flatten()
    if len(blocks) == 0:
        return None
    size = 1 if pending.bad is not None else pending.block_size
    found = blocks if pending.bad is None else pending.bad
    names: dict[str, None] = {}
    start = 0
    for segment in pending.segments:
        first, last = start // size, (start + segment.numel - 1) // size
        if segment.numel and ((found >= first) & (found <= last)).any():
            names[segment.name] = None
        start += segment.numel
    return NonFinite(tuple(names), len(blocks))
