"""Where a step's temporary tensors come from."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Workspace"]


class Workspace(Protocol):
    """Reused memory in eager mode, the compiler's otherwise.

    is_fused: the operations become one loop, so that they cost by their number, not by their bytes.
    """

    is_fused: bool

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of `x`; what it holds is anything."""
        ...
