"""Scales: which elements share one, and how it follows from their amax.

    inv = f32(max / amax)        y = f32(x * inv)        scale_inv = f32(amax / max)

Going down is a multiplication by `inv`, never a division by the scale: the two differ at exact
ties. amax below 2^-102 counts as 1, so no inverse is infinite and all codes are +-0. A group that
holds a NaN or an Inf has scale_inv = NaN and `inv` = 0: it dequantises to NaN everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.errors import ConfigError

__all__ = ["SCALE_MODES", "Granularity", "Scales", "clamped_amax", "row_amax", "scales_from_amax"]

SCALE_MODES = ("absmax", "pow2")

_SMALLEST_AMAX = 2.0**-102


@dataclass(frozen=True)
class Granularity:
    """Which elements share a scale.

    tensor       all of them
    row          each row along the last dim, the contraction axis K
    block(n)     n neighbours along the last dim
    tile(r,c)    r rows by c columns of a matrix
    """

    kind: str
    rows: int = 1
    columns: int = 0

    @classmethod
    def parse(cls, text: str | Granularity) -> Granularity:
        """Raises ConfigError for anything but tensor, row, block(n), tile(r,c)."""
        if isinstance(text, Granularity):
            return text
        if text in ("tensor", "row"):
            return cls(text)
        match = re.fullmatch(r"block\(?(\d+)\)?|tile\((\d+),\s*(\d+)\)", text)
        if match is None or not all(int(n) for n in match.groups() if n is not None):
            raise ConfigError(
                f"unknown granularity {text!r}: allowed are 'tensor', 'row', 'block(n)' and "
                "'tile(rows,columns)' with sizes of at least 1"
            )
        block, rows, columns = match.groups()
        return cls("block", 1, int(block)) if block else cls("tile", int(rows), int(columns))

    def __str__(self) -> str:
        sizes = {"block": f"({self.columns})", "tile": f"({self.rows},{self.columns})"}
        return self.kind + sizes.get(self.kind, "")


@dataclass(frozen=True)
class Scales:
    """inv multiplies going down, scale_inv coming back; float32, shaped like the amax."""

    inv: torch.Tensor
    scale_inv: torch.Tensor


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| over the last dim, (..., 1) float32; NaN if the row holds one, 0 for no elements."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    smallest, largest = _extremes(x)
    return torch.maximum(largest, -smallest)


def _extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest element over the last dim, (..., 1) float32."""
    # Two reductions: on the CPU they are vectorised, torch.aminmax is not (10x slower).
    smallest, largest = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    return smallest.to(torch.float32), largest.to(torch.float32)


def clamped_amax(
    x: torch.Tensor, low: torch.Tensor | None, high: torch.Tensor | None
) -> torch.Tensor:
    """`row_amax` of clamp(x, low, high), but NaN or Inf where x itself is not finite.

    Finiteness is that of x before clamping: a clamped Inf must not vanish into a threshold.
    """
    if low is None or high is None or x.shape[-1] == 0:
        return row_amax(x)
    smallest, largest = _extremes(x)
    amax = torch.maximum(largest, -smallest)
    smallest, largest = (torch.minimum(torch.maximum(e, low), high) for e in (smallest, largest))
    return torch.where(amax.isfinite(), torch.maximum(largest, -smallest), amax)


def scales_from_amax(amax: torch.Tensor, fmt: MiniFloat, mode: str = "absmax") -> Scales:
    """amax: any shape, float32, NaN or Inf where the group holds a non-finite element.

    mode "absmax" uses the whole grid; "pow2" rounds max/amax down to a power of two, so scaling
    itself rounds nothing. Raises ConfigError for another mode.
    """
    if mode not in SCALE_MODES:
        raise ConfigError(f"unknown scale {mode!r}: allowed are {list(SCALE_MODES)}")
    finite = amax.isfinite()
    amax = torch.where(finite & (amax >= _SMALLEST_AMAX), amax, torch.ones_like(amax))
    # Tensors on both sides: torch computes `number / tensor` as `reciprocal * number`, which
    # rounds twice and is not f32(max / amax).
    largest = torch.full_like(amax, fmt.max)
    inv = largest / amax
    scale_inv = amax / largest
    if mode == "pow2":
        inv = (inv.view(torch.int32) & 0x7F800000).view(torch.float32)
        scale_inv = torch.ones_like(inv) / inv
    return Scales(inv * finite, torch.where(finite, scale_inv, torch.full_like(amax, torch.nan)))
