"""What may be said about two times that both vary: does compression pay?

Times are compared round by round: the ratio of a round is ours over BF16's in the same round. A
claim needs three ratios or more, and all but the outermost tenth on either side must lie on one
side of 1; a win inside the spread is no win.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Spread", "Verdict", "break_even_bits_per_s", "judge", "ratios"]

MIN_VALUES = 3

Verdict = Literal["pays", "does not pay", "cannot be told"]


@dataclass(frozen=True)
class Spread:
    """The median of `num` values, and their range without the outermost tenth on either side."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        dropped = len(ordered) // 10
        kept = ordered[dropped : len(ordered) - dropped]
        return cls(statistics.median(ordered), kept[0], kept[-1], len(ordered))


def ratios(ours: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Ours over the baseline's, round by round."""
    return Spread.of([mine / theirs for mine, theirs in zip(ours, baseline, strict=True)])


def judge(time_ratio: Spread) -> Verdict:
    if time_ratio.num < MIN_VALUES:
        return "cannot be told"
    if time_ratio.high < 1:
        return "pays"
    return "does not pay" if time_ratio.low > 1 else "cannot be told"


def break_even_bits_per_s(bytes_saved: int, codec_seconds: float) -> float | None:
    """The bandwidth below which sending fewer bytes saves more time than the codec takes.

    An estimate: as if BF16 computed nothing, and as if a link were always busy. None if no bytes
    are saved, so that no link is slow enough.
    """
    return 8 * bytes_saved / codec_seconds if bytes_saved > 0 else None
