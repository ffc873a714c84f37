"""Memory that lives for one piece of a tensor, and is used again for the next."""

from __future__ import annotations

import torch

__all__ = ["CompilerWorkspace", "Scratch", "max_blocks"]

# The float32 copies of a piece should stay in a CPU's cache and take little of the
# 64 MB that a step may; a GPU needs larger pieces to be busy.
_BLOCKS_ON_CPU = 512
_BLOCKS_ELSEWHERE = 1024


def max_blocks(device: torch.device) -> int:
    """Blocks in the largest piece."""
    return _BLOCKS_ON_CPU if device.type == "cpu" else _BLOCKS_ELSEWHERE


class Scratch:
    """Temporary tensors by name: the same memory each time, as large as the largest so far."""

    is_fused = False

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor; what it holds is anything."""
        key = (name, dtype, device)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < numel:
            memory = self._memory[key] = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of `x`; what it holds is anything."""
        return self.take(name, x.numel(), dtype, x.device).view(x.shape)


class CompilerWorkspace:
    """Temporary tensors of a compiled function, which mostly turn into registers."""

    is_fused = True

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(x, dtype=dtype)
