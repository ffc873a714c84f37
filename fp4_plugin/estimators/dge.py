"""Differentiable gradient estimator (arXiv 2501.17116, equations 7 and 8).

On an interval [lo, lo + d] between neighbouring grid points, with t = 2 (x - lo) / d - 1, the
staircase of rounding is replaced by f(x) = lo + d/2 (1 + sign(t) |t|^(1/k)), whose slope is

    f'(x) = min((1/k) |t|^(1/k - 1), max_slope)

steep in the middle of an interval, where rounding jumps, and 1/k at its ends. f' is even in x and
0 beyond +-max; a weight scaled by its own absmax is never beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.errors import ConfigError
from fp4_plugin.estimators.base import ESTIMATORS

__all__ = ["DGE"]

_FLOAT32_EXPONENT_MASK = 0x7F800000


@dataclass(frozen=True)
class DGE:
    """k: steepness, > 1 (5 in the paper); max_slope: the cap, > 0 (3 in the paper).

    With the cap the mean slope over an interval falls below 1 (0.5935 for k = 5, cap 3);
    `renormalize` divides by that mean. Raises ConfigError for values outside these ranges.
    """

    k: float = 5.0
    max_slope: float = 3.0
    renormalize: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k > 1):
            raise ConfigError(f"DGE k = {self.k!r} must be a finite number above 1, e.g. 5")
        if not (math.isfinite(self.max_slope) and self.max_slope > 0):
            raise ConfigError(f"DGE max_slope = {self.max_slope!r} must be finite and above 0")

    @property
    def mean_slope(self) -> float:
        """Mean of the capped slope over an interval; exactly 1 without the cap."""
        knee: float = (self.max_slope * self.k) ** (self.k / (1 - self.k))
        if knee >= 1:
            return self.max_slope
        return float(self.max_slope * knee + 1 - knee ** (1 / self.k))

    def slope(self, x_scaled: torch.Tensor, fmt: MiniFloat) -> torch.Tensor:
        """x_scaled: any shape, any float (computed in float32) -> slope, same shape, float32."""
        magnitude = x_scaled.to(torch.float32).abs()
        binade = (magnitude.view(torch.int32) & _FLOAT32_EXPONENT_MASK).view(torch.float32)
        spacing = binade.clamp_(min=fmt.min_normal).mul_(2.0**-fmt.mantissa_bits)
        # All exact in float32: spacing is a power of two and the rest are differences.
        index = magnitude / spacing
        t = index.sub_(index.floor()).mul_(2).sub_(1).abs_()
        slope = t.pow_(1 / self.k - 1).mul_(1 / self.k).clamp_(max=self.max_slope)
        if self.renormalize:
            slope /= self.mean_slope
        return slope.masked_fill_(magnitude > fmt.max, 0.0)


ESTIMATORS.register("dge", DGE)
