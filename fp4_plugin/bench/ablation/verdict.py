"""When two arms may be called different: paired by seed, and against the noise floor.

For arms a and b the differences d_s = loss_a(s) - loss_b(s) are taken seed by seed, because initial
weights and data order move the loss far more than an arm does. The noise floor is the largest
|d_s| of BF16 from perturbed weights against BF16: what chance alone does. a and b can be told apart
if no d_s has the other sign and |mean d| exceeds the floor. The rule is two-sided on purpose: a
loss that is lower for no good reason is as suspicious as one that is higher.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fp4_plugin.errors import MismatchError

__all__ = ["MIN_SEEDS", "Difference", "Losses", "Verdict", "judge", "noise_floor", "paired"]

MIN_SEEDS = 3

Losses = Mapping[int, float | None]  # held-out loss by seed, None for a run that diverged
Verdict = Literal["higher", "lower", "cannot be told apart", "diverged"]


@dataclass(frozen=True)
class Difference:
    """Held-out losses of one arm minus those of another, seed by seed, in nats."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def bounds(self, floor: float) -> tuple[float, float]:
        """The gap as this study can bound it: the range over seeds, widened by the noise floor."""
        return self.low - floor, self.high + floor


def paired(arm: Losses, other: Losses) -> Difference | None:
    """arm minus other by seed; None if a run of either diverged.

    Raises MismatchError if the two were not run on the same seeds.
    """
    if arm.keys() != other.keys():
        raise MismatchError(
            f"arms with seeds {sorted(arm)} and {sorted(other)} cannot be paired: run both on the "
            "same seeds"
        )
    values = [
        mine - theirs
        for mine, theirs in ((arm[seed], other[seed]) for seed in sorted(arm))
        if mine is not None and theirs is not None
    ]
    return Difference(tuple(values)) if len(values) == len(arm) else None


def noise_floor(perturbed: Losses, baseline: Losses) -> float | None:
    """The largest paired |difference| that a perturbation of the weights makes, in nats."""
    difference = paired(perturbed, baseline)
    return None if difference is None else max(abs(value) for value in difference.values)


def judge(difference: Difference | None, floor: float | None) -> Verdict:
    """What may be said about an arm against another; fewer than MIN_SEEDS seeds say nothing."""
    if difference is None:
        return "diverged"
    excludes_zero = difference.low > 0 or difference.high < 0
    has_evidence = floor is not None and len(difference.values) >= MIN_SEEDS
    if not (has_evidence and excludes_zero and abs(difference.mean) > (floor or 0.0)):
        return "cannot be told apart"
    return "higher" if difference.mean > 0 else "lower"
