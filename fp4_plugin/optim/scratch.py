"""Memory that lives for one piece of a tensor, and is used again for the next."""

from __future__ import annotations

import math

import torch

__all__ = ["CompilerWorkspace", "Scratch", "max_blocks"]

# Smaller, and the interpreter's time for some sixty operations per piece shows; larger, and the
# float32 copies of a piece leave a CPU's cache and take more of the 64 MB that a step may.
_MAX_BLOCKS = 1024


def max_blocks() -> int:
    """Blocks in the largest piece."""
    return _MAX_BLOCKS


class Scratch:
    """Temporary tensors by name: the same memory each time, as large as the largest so far."""

    is_fused = False

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        # A piece has some ten of them, and making a view takes as long as a small operation.
        self._views: dict[
            tuple[str, torch.dtype, torch.device], dict[tuple[int, ...], torch.Tensor]
        ] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor; what it holds is anything."""
        key = (name, dtype, device)
        views = self._views.setdefault(key, {})
        view = views.get(shape)
        if view is None:
            numel = math.prod(shape)
            memory = self._memory.get(key)
            if memory is None or memory.numel() < numel:
                memory = self._memory[key] = torch.empty(numel, dtype=dtype, device=device)
                views.clear()
            view = views[shape] = memory[:numel].view(shape)
        return view

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of `x`; what it holds is anything."""
        return self.take(name, x.shape, dtype, x.device)


class CompilerWorkspace:
    """Temporary tensors of a compiled function, which mostly turn into registers."""

    is_fused = True

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(x, dtype=dtype)
