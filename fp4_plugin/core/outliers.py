"""Outlier clamping and compensation, "OCC" (arXiv 2501.17116, equation 9).

    Y_c = clamp(Y, lo, hi)          dY = Y - Y_c          output = Q(Y_c) W_q + dY W

lo and hi are the (1 - alpha) and alpha quantiles as order statistics without interpolation, of a
row (one token) or of the whole tensor: with i = floor(alpha * n), hi = sorted[i] and
lo = sorted[n - 1 - i]. Nothing is clamped where n <= 1 / (1 - alpha): that is the rule.

Row scope keeps a token's result independent of every other token. dY is sparse: at most
2 (n - 1 - i) entries a row, kept at float32 with their column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp4_plugin.core import ops
from fp4_plugin.errors import ConfigError

__all__ = [
    "OUTLIER_SCOPES",
    "Residual",
    "SparseRows",
    "clamp_outliers",
    "residual_beyond",
    "split_outliers",
    "threshold_index",
]

OUTLIER_SCOPES = ("row", "tensor")


@dataclass(frozen=True)
class SparseRows:
    """Sparse float32 (T, K) matrix by rows.

    columns: int16 (int32 for K > 32,768), values: float32; (T, c) with `offsets` None where every
    row has the same width, else flat with offsets (T + 1) int32. Columns ascend within a row;
    slots that are not needed hold column 0 and value 0.
    """

    columns: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor | None

    def matmul_t(self, weight: torch.Tensor) -> torch.Tensor:
        """self @ weight^T: weight (N, K), any float -> (T, N) float32."""
        return ops.residual_gemm(self.columns, self.values, self.offsets, weight)

    def weight_gradient(self, grad_output: torch.Tensor, num_columns: int) -> torch.Tensor:
        """grad_output^T @ self: grad_output (T, N), any float -> (N, K = num_columns) float32."""
        return ops.residual_wgrad(self.columns, self.values, self.offsets, grad_output, num_columns)


@dataclass(frozen=True)
class Residual(SparseRows):
    """What clamping cut off a tensor of `shape`, seen as (T, K).

    low, high: float32 thresholds, (T, 1) for row scope, (1, 1) for tensor scope.
    """

    low: torch.Tensor
    high: torch.Tensor
    shape: torch.Size

    @property
    def lo(self) -> torch.Tensor:
        return self._shaped(self.low)

    @property
    def hi(self) -> torch.Tensor:
        return self._shaped(self.high)

    @property
    def num_entries(self) -> int:
        """How many elements were clamped."""
        return int(torch.count_nonzero(self.values))

    def to_dense(self) -> torch.Tensor:
        """float32 of `shape`, zero where nothing was clamped."""
        num_rows = math.prod(self.shape[:-1])
        dense = self.values.new_zeros(num_rows, self.shape[-1])
        rows = torch.arange(num_rows, device=self.values.device)
        width = self.values.shape[-1] if self.offsets is None else self.offsets.diff()
        rows = rows.repeat_interleave(width)
        flat = (rows * self.shape[-1] + self.columns.reshape(-1)).to(torch.int64)
        return dense.view(-1).index_add_(0, flat, self.values.reshape(-1)).view(self.shape)

    def _shaped(self, threshold: torch.Tensor) -> torch.Tensor:
        if threshold.numel() == 1:
            return threshold.view((1,) * len(self.shape))
        return threshold.view(*self.shape[:-1], 1)


def threshold_index(alpha: float, n: int) -> int:
    """i of sorted[i] = hi among n elements; the product is taken in float64."""
    return min(math.floor(alpha * n), n - 1)


def split_outliers(x: torch.Tensor, alpha: float, scope: str = "row") -> Residual:
    """Thresholds and residual of x: (..., K), any float, without making the clamped tensor.

    Raises ConfigError unless .5 < alpha <= 1 and scope is "row" or "tensor".
    """
    if not 0.5 < alpha <= 1:
        raise ConfigError(f"alpha {alpha!r} must be above 0.5 and at most 1 (off), e.g. 0.99")
    if scope not in OUTLIER_SCOPES:
        raise ConfigError(f"unknown outlier scope {scope!r}: allowed are {list(OUTLIER_SCOPES)}")
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if x.numel() == 0:
        return _no_residual(rows, x.shape)
    if scope == "tensor":
        return _split_tensor(rows, alpha, x.shape)
    index = threshold_index(alpha, rows.shape[1])
    low, high, columns, values = ops.split_outliers(rows, index)
    return Residual(columns, values, None, low, high, x.shape)


def _no_residual(rows: torch.Tensor, shape: torch.Size) -> Residual:
    threshold = rows.new_zeros((rows.shape[0], 1), dtype=torch.float32)
    columns = rows.new_empty((rows.shape[0], 0), dtype=torch.int16)
    values = rows.new_empty((rows.shape[0], 0), dtype=torch.float32)
    return Residual(columns, values, None, threshold, threshold, shape)


def _split_tensor(rows: torch.Tensor, alpha: float, shape: torch.Size) -> Residual:
    """One pair of thresholds for the tensor; rows differ in how many entries they have."""
    flat = rows.reshape(-1).to(torch.float32)
    n = flat.numel()
    index = threshold_index(alpha, n)
    high = flat.kthvalue(index + 1).values.view(1, 1)
    low = flat.kthvalue(n - index).values.view(1, 1)
    return residual_beyond(rows, low, high, shape)


def residual_beyond(
    rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor, shape: torch.Size
) -> Residual:
    """What lies beyond given thresholds. rows: (T, K); low, high: float32 (T, 1) or (1, 1)."""
    wide = rows.to(torch.float32)
    values = wide - torch.minimum(torch.maximum(wide, low), high)
    # A row that is not finite dequantises to NaN; the others keep their compensation.
    beyond = (values != 0) & wide.isfinite().all(dim=1, keepdim=True)
    at_rows, at_columns = beyond.nonzero(as_tuple=True)
    counts = beyond.sum(dim=1, dtype=torch.int32)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    column_dtype = torch.int16 if rows.shape[1] <= 32768 else torch.int32
    return Residual(
        at_columns.to(column_dtype), values[at_rows, at_columns], offsets, low, high, shape
    )


def clamp_outliers(
    x: torch.Tensor, alpha: float, scope: str = "row"
) -> tuple[torch.Tensor, Residual]:
    """x: (..., K), any float -> (clamped, residual).

    `clamped` has the shape and dtype of x; `clamped + residual.to_dense()` is x: bit for bit
    where x is bf16 and spans at most 15 binades, to one float32 spacing otherwise. A row that is
    not finite is returned as it is. Raises ConfigError unless .5 < alpha <= 1 and scope is "row"
    or "tensor".
    """
    residual = split_outliers(x, alpha, scope)
    wide = x.to(torch.float32)
    clamped = torch.minimum(torch.maximum(wide, residual.lo), residual.hi)
    finite = wide.isfinite().all(dim=-1, keepdim=True)
    return torch.where(finite, clamped, wide).to(x.dtype), residual
