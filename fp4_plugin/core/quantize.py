"""Quantise, dequantise, and both in a row.

    y = clamp(x * inv, -max, max)      code = round(y)      x ~ value(code) * scale_inv

with `inv` and `scale_inv` of the group's amax (core/scaling.py; equation 1 of arXiv 2501.17116,
one scale per row along the contraction axis in the paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4_plugin.core import ops
from fp4_plugin.core.codes import decode, decode_packed
from fp4_plugin.core.formats import FORMATS, MiniFloat
from fp4_plugin.core.packing import pack, unpack
from fp4_plugin.core.rounding import PhiloxKey
from fp4_plugin.core.scaling import Granularity, row_amax
from fp4_plugin.errors import ConfigError

__all__ = ["QuantizedTensor", "dequantize", "fake_quantize", "quantize"]


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of a tensor of `shape`.

    codes: uint8, (..., K), or (..., ceil(K/2)) if `packed`. scale_inv: float32, broadcastable to
    `shape` for tensor (all ones) and row (last dim 1); for block(n) (..., ceil(K/n)); for
    tile(r,c) (ceil(R/r), ceil(K/c)).
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    format: MiniFloat
    granularity: Granularity
    shape: torch.Size
    packed: bool = False

    def unpacked(self) -> torch.Tensor:
        """uint8 codes of `shape`, one per element."""
        return unpack(self.codes, self.shape[-1]) if self.packed else self.codes

    def values(self) -> torch.Tensor:
        """float32 grid values of `shape`, without the scale."""
        if self.packed:
            return decode_packed(self.codes, self.shape[-1], self.format)
        return decode(self.codes, self.format)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`shape`, dtype: value(code) * scale_inv in float32, then one cast; NaN groups are NaN."""
        groups = _to_groups(self.values(), self.granularity)
        scale_inv = self.scale_inv.reshape((*groups.shape[:-1], 1))
        return _from_groups(groups * scale_inv, self.granularity, self.shape).to(dtype)


def quantize(
    x: torch.Tensor,
    format: str | MiniFloat = "e2m1",
    granularity: str | Granularity = "row",
    rounding: str = "nearest",
    key: PhiloxKey | None = None,
    *,
    scale: str = "absmax",
    packed: bool = False,
) -> QuantizedTensor:
    """Quantise x: (..., K), any float dtype; widened to float32 first.

    Raises ConfigError for an unknown format, granularity, rounding or scale, for `packed` with a
    format of more than 4 bits, and for a dtype that is not floating point.
    """
    fmt = FORMATS[format] if isinstance(format, str) else format
    granularity = Granularity.parse(granularity)
    if not x.is_floating_point() or x.dim() == 0:
        raise ConfigError(
            f"cannot quantize a {x.dim()}-dimensional tensor of {x.dtype}: pass a floating-point "
            "tensor with at least one dimension"
        )
    if packed and not fmt.is_packed:
        raise ConfigError(f"packed=True needs a 4-bit format, {fmt.name} has {fmt.bits} bits")
    groups = _to_groups(x, granularity)
    rows = groups.reshape(groups.shape[:-1].numel(), groups.shape[-1])
    amax = row_amax(rows) if granularity.kind == "tensor" else None
    codes, scale_inv = ops.quantize_rows(
        rows, fmt, rounding=rounding, scale=scale, amax=amax, key=key
    )
    if fmt.is_packed:
        codes = unpack(codes, rows.shape[-1])
    codes = _from_groups(codes.view(groups.shape), granularity, x.shape)
    scale_inv = scale_inv.view(_scale_shape(x.shape, groups.shape, granularity))
    return QuantizedTensor(
        pack(codes) if packed else codes, scale_inv, fmt, granularity, x.shape, packed
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`q.dequantize(dtype)` as a function."""
    return q.dequantize(dtype)


def fake_quantize(
    x: torch.Tensor,
    format: str | MiniFloat = "e2m1",
    granularity: str | Granularity = "row",
    rounding: str = "nearest",
    key: PhiloxKey | None = None,
    *,
    scale: str = "absmax",
) -> torch.Tensor:
    """Quantise then dequantise: a tensor of x's shape and dtype whose values are on the grid."""
    return quantize(x, format, granularity, rounding, key, scale=scale).dequantize(x.dtype)


def _to_groups(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """View or copy of x whose last dim runs over the elements that share a scale."""
    if granularity.kind == "row":
        return x
    if granularity.kind == "tensor":
        return x.reshape(1, -1)
    rows, columns = granularity.rows, granularity.columns
    if granularity.kind == "tile" and x.dim() != 2:
        raise ConfigError(f"granularity {granularity} needs a matrix, got shape {tuple(x.shape)}")
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % columns))
    if granularity.kind == "block":
        return x.unflatten(-1, (x.shape[-1] // columns, columns))
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % rows))
    tiles = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return tiles.permute(0, 2, 1, 3).reshape(tiles.shape[0], tiles.shape[2], rows * columns)


def _from_groups(groups: torch.Tensor, granularity: Granularity, shape: torch.Size) -> torch.Tensor:
    """Inverse of `_to_groups`, without the padding."""
    if granularity.kind in ("row", "tensor"):
        return groups.reshape(shape)
    if granularity.kind == "block":
        return groups.flatten(-2)[..., : shape[-1]]
    rows, columns = granularity.rows, granularity.columns
    tiles = groups.unflatten(-1, (rows, columns)).permute(0, 2, 1, 3)
    whole = tiles.reshape(tiles.shape[0] * rows, tiles.shape[2] * columns)
    return whole[: shape[0], : shape[1]]


def _scale_shape(
    shape: torch.Size, group_shape: torch.Size, granularity: Granularity
) -> tuple[int, ...]:
    if granularity.kind == "tensor":
        return (1,) * len(shape)
    return (*shape[:-1], 1) if granularity.kind == "row" else tuple(group_shape[:-1])
