"""The estimator protocol and its registry."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.registry import Registry

__all__ = ["ESTIMATORS", "Estimator"]


@runtime_checkable
class Estimator(Protocol):
    """A frozen dataclass whose fields are its parameters."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def slope(self, x_scaled: torch.Tensor, fmt: MiniFloat) -> torch.Tensor | None:
        """d value / d x at each element, or None for 1 everywhere.

        x_scaled: any shape, float32, scaled and clamped to +-fmt.max. Returns the same shape.
        """
        ...


ESTIMATORS: Registry[type[Estimator]] = Registry("gradient estimator")
