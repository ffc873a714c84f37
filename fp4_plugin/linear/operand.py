"""What a GEMM reads: a stored matrix of codes or values, with its scales apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4_plugin.core import ops
from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.core.outliers import Residual, split_outliers
from fp4_plugin.core.scaling import clamped_amax, row_amax, scales_from_amax
from fp4_plugin.linear.shards import Shards
from fp4_plugin.linear.spec import LinearSpec, OperandSpec, OutlierSpec

__all__ = [
    "Operand",
    "QuantizedInput",
    "as_rows",
    "gemm",
    "quantize_input",
    "quantize_operand",
    "scale_",
    "scaled",
    "scaled_weight",
]


@dataclass(frozen=True)
class Operand:
    """A stored (R, C) matrix.

    data: uint8 codes (4-bit ones packed to (R, ceil(C/2))), or values where format is None.
    scale_inv: float32 (R, 1) or (1, 1); None for values.
    """

    data: torch.Tensor
    format: MiniFloat | None
    scale_inv: torch.Tensor | None
    num_columns: int


@dataclass(frozen=True)
class QuantizedInput:
    """An activation (T, K) as a layer's GEMMs read it.

    rows: quantised along K, for fprop (and for wgrad unless it reads `transposed`).
    transposed: (K, T), quantised along T; only where wgrad is fp4.
    residual: what clamping cut off, if it is to be added back.
    """

    rows: Operand
    transposed: Operand | None
    residual: Residual | None


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., K) -> (T, K); -1 would be ambiguous for K = 0 or no tokens."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def quantize_operand(
    x: torch.Tensor,
    spec: OperandSpec,
    low: torch.Tensor | None = None,
    high: torch.Tensor | None = None,
    *,
    axes: str = "",
    shards: Shards | None = None,
) -> Operand:
    """x: (R, C), any float, clamped to the thresholds low, high of its rows first if given.

    low, high: float32 (R, 1), elements of the rows; or (1, 1). axes: names of R and C, which tell
    whether scales are those of `shards`, e.g. "nk" for a weight.
    """
    if spec.format is None:
        return Operand(x, None, None, x.shape[1])
    codes, scale_inv = ops.quantize_rows(
        x,
        spec.format,
        rounding=spec.rounding,
        scale=spec.scale,
        amax=_amax(x, spec, low, high, axes, shards),
        low=low,
        high=high,
    )
    return Operand(codes, spec.format, scale_inv, x.shape[1])


def _amax(
    x: torch.Tensor,
    spec: OperandSpec,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    axes: str,
    shards: Shards | None,
) -> torch.Tensor | None:
    """amax of the groups of `spec` after clamping, or None to have it taken row by row."""
    if shards is None or not shards.cuts(axes, spec.granularity):
        return _local_amax(x, spec, low, high)
    amax = clamped_amax(x, low, high)
    if spec.granularity == "tensor":
        amax = amax.amax(dim=0, keepdim=True) if x.numel() else amax.new_zeros((1, 1))
    return shards.largest(amax)


def _local_amax(
    x: torch.Tensor, spec: OperandSpec, low: torch.Tensor | None, high: torch.Tensor | None
) -> torch.Tensor | None:
    of_rows = None
    if low is not None and high is not None and low.shape[0] == x.shape[0]:
        # Thresholds of rows are elements of them, so they are the extremes after clamping.
        of_rows = torch.maximum(high, -low)
    if spec.granularity == "row":
        return of_rows
    if x.numel() == 0:
        return torch.zeros((1, 1), device=x.device)
    of_rows = clamped_amax(x, low, high) if of_rows is None else of_rows
    return of_rows.amax(dim=0, keepdim=True)


def quantize_input(
    x: torch.Tensor, spec: LinearSpec, shards: Shards | None = None
) -> QuantizedInput:
    """x: (T, K), any float; everything that the three GEMMs of a layer need of it."""
    outliers = spec.outliers
    split = _split(x, outliers, shards) if outliers else None
    low, high = (split.low, split.high) if split else (None, None)
    rows = quantize_operand(x, spec.input, low, high, axes="tk", shards=shards)
    transposed = None
    if spec.keeps_transposed_input:
        clamped = _clamped(x, low, high).t().contiguous()
        transposed = quantize_operand(clamped, spec.input, axes="kt", shards=shards)
    keep = outliers is not None and outliers.compensation is not None
    return QuantizedInput(rows, transposed, split if keep else None)


def _split(x: torch.Tensor, outliers: OutlierSpec, shards: Shards | None) -> Residual:
    if shards is None or shards.axis != "k" or x.numel() == 0:
        return split_outliers(x, outliers.alpha, outliers.scope)
    return shards.split_outliers(x, outliers.alpha, outliers.scope)


def _clamped(x: torch.Tensor, low: torch.Tensor | None, high: torch.Tensor | None) -> torch.Tensor:
    """clamp(x, low, high) in float32; NaN throughout a row of x that is not finite."""
    if low is None or high is None:
        return x
    clamped = torch.minimum(torch.maximum(x.to(torch.float32), low), high)
    return torch.where(row_amax(x).isfinite(), clamped, torch.nan)


def scaled_weight(
    weight: torch.Tensor, spec: OperandSpec, shards: Shards | None = None
) -> torch.Tensor:
    """clamp(f32(W * inv), -max, max): (N, K) float32, the argument of the estimator's slope."""
    assert spec.format is not None
    amax = _amax(weight, spec, None, None, "nk", shards)
    amax = row_amax(weight) if amax is None else amax
    scales = scales_from_amax(amax, spec.format, spec.scale)
    return (weight.to(torch.float32) * scales.inv).clamp_(-spec.format.max, spec.format.max)


def gemm(a: Operand, b: Operand, layout: str) -> torch.Tensor:
    """float32 product of the codes or values, without scales; layout as in core/ops.py."""
    columns = (a.num_columns, b.num_columns)
    return ops.gemm(a.data, a.format, b.data, b.format, layout, columns)


def scaled(x: torch.Tensor, scale_inv: torch.Tensor | None) -> torch.Tensor:
    """x * scale_inv as float32, or x as it is if there is no scale."""
    return x if scale_inv is None else x * scale_inv


def scale_(product: torch.Tensor, *factors: torch.Tensor | None) -> torch.Tensor:
    """Multiply a GEMM's float32 product in place by each factor that is not None, in order."""
    for factor in factors:
        if factor is not None:
            product.mul_(factor)
    return product
