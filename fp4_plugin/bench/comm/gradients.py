"""Gradients to reduce, and how far a reduction is from their exact sum.

Values are Student's t with 3 degrees of freedom (far heavier tails than a normal), multiplied by a
magnitude that changes every 4096 elements and spans two decades, as the layers of a model do. Every
rank draws its own. They are rounded to bfloat16 before anybody sees them, so BF16 loses nothing on
the way in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["ERROR_BLOCK", "Deviation", "deviation", "heavy_tailed"]

ERROR_BLOCK = 1024
_LAYER = 4096
_DEGREES_OF_FREEDOM = 3
_DECADES = 2.0


def heavy_tailed(numel: int, seed: int, rank: int) -> torch.Tensor:
    """The gradients of one rank, (numel,) bfloat16."""
    values = torch.empty(numel, dtype=torch.bfloat16)
    layers = torch.Generator().manual_seed(seed)  # magnitudes belong to layers, not to ranks
    draws = torch.Generator().manual_seed(seed + 1_000_003 * (rank + 1))
    for start in range(0, numel, _LAYER):
        part = values[start : start + _LAYER]
        magnitude = 10 ** -float(torch.rand((), generator=layers) * _DECADES)
        normal = torch.randn(1 + _DEGREES_OF_FREEDOM, len(part), generator=draws)
        chi = normal[1:].norm(dim=0) / math.sqrt(_DEGREES_OF_FREEDOM)
        part.copy_(normal[0] / chi * magnitude)
    return values


@dataclass(frozen=True)
class Deviation:
    """Squares of signal and noise, and the worst |error| / |sum| of a block of 1024 elements."""

    signal: float
    noise: float
    worst_block: float

    @property
    def snr_db(self) -> float | None:
        """None for a sum without any error."""
        return 10 * math.log10(self.signal / self.noise) if self.noise else None


def deviation(reference: torch.Tensor, value: torch.Tensor) -> Deviation:
    """How far `value` (n,), any float, is from `reference` (n,) float64."""
    error = value.double() - reference
    signal, noise = (_block_squares(one) for one in (reference, error))
    worst = (noise / signal.clamp_min(torch.finfo(torch.float64).tiny)).max().sqrt()
    return Deviation(float(signal.sum()), float(noise.sum()), float(worst))


def _block_squares(values: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(values, (0, -len(values) % ERROR_BLOCK))
    return padded.view(-1, ERROR_BLOCK).square().sum(dim=1)
