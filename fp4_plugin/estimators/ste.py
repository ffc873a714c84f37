"""Straight-through estimator: rounding is taken for the identity (Bengio et al., 2013)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.estimators.base import ESTIMATORS

__all__ = ["STE"]


@dataclass(frozen=True)
class STE:
    """Slope 1 everywhere."""

    def slope(self, x_scaled: torch.Tensor, fmt: MiniFloat) -> torch.Tensor | None:
        return None


ESTIMATORS.register("ste", STE)
