"""The operations that device kernels may replace, each defined once: schema, fake, default.

    quantize_rows(x, format, rounding, scale, amax, low, high, key) -> (codes, scale_inv)
    gemm(a, a_format, b, b_format, layout, a_columns, b_columns) -> float32
    split_outliers(x, index) -> (low, high, columns, values)
    residual_gemm(columns, values, offsets, weight) -> float32
    residual_wgrad(columns, values, offsets, grad_output, num_columns) -> float32

The default implementations below run on every device. A kernel for one device is registered with
`torch.library.impl("fp4_plugin::<name>", "cuda", ...)` and PyTorch dispatches to it; nobody
passes a backend around. Formats travel by name because schemas know no Python objects. Call the
operations through the typed functions at the end of this file.
"""

from __future__ import annotations

import torch

from fp4_plugin.core.codes import encode
from fp4_plugin.core.formats import FORMATS, MiniFloat
from fp4_plugin.core.gemm import default_gemm
from fp4_plugin.core.packing import pack
from fp4_plugin.core.rounding import PhiloxKey, round_to_grid
from fp4_plugin.core.scaling import clamped_amax, scales_from_amax
from fp4_plugin.core.tracing import announce

__all__ = [
    "gemm",
    "library",
    "quantize_rows",
    "residual_gemm",
    "residual_wgrad",
    "split_outliers",
]

library = torch.library.Library("fp4_plugin", "DEF")

# Rows are quantised in chunks of about this many elements: on a CPU the temporaries stay in the
# cache, elsewhere a chunk is large enough to hide the launch of its kernels.
_CHUNK_ELEMENTS_CPU, _CHUNK_ELEMENTS = 1 << 16, 1 << 25


def _quantize_rows(
    x: torch.Tensor,
    format: str,
    rounding: str,
    scale: str,
    amax: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    high: torch.Tensor | None = None,
    key: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (R, K) any float -> codes (R, K) uint8, or (R, ceil(K/2)) if the format is 4-bit.

    `low`, `high`: (R, 1) or (1, 1) float32 thresholds that x is clamped to first. `amax`: (R, 1)
    or (1, 1) float32 of the groups that share a scale, NaN or Inf for a group that holds one;
    None means one scale per row. scale_inv has the shape of amax. `key`: the four words of a
    PhiloxKey for stochastic rounding. A non-finite group has codes 0 and scale_inv NaN.
    """
    fmt = FORMATS[format]
    if x.dtype == torch.float64:
        x = x.to(torch.float32)
    amax = clamped_amax(x, low, high) if amax is None else amax
    scales = scales_from_amax(amax, fmt, scale)
    width = (x.shape[1] + 1) // 2 if fmt.is_packed else x.shape[1]
    codes = x.new_empty((x.shape[0], width), dtype=torch.uint8)
    whole = rounding == "stochastic"  # its random numbers are indexed by the whole tensor
    chunk_elements = _CHUNK_ELEMENTS_CPU if x.device.type == "cpu" else _CHUNK_ELEMENTS
    rows = x.shape[0] if whole else max(1, chunk_elements // max(1, x.shape[1]))
    for start in range(0, x.shape[0], max(1, rows)):
        part = slice(start, start + rows)
        # A narrow x is widened by the float32 operand of the first operation on it.
        y = x[part]
        if low is not None and high is not None:
            y = torch.minimum(torch.maximum(y, _part(low, part)), _part(high, part))
        y = (y * _part(scales.inv, part)).clamp_(-fmt.max, fmt.max)
        if rounding != "nearest":
            y = round_to_grid(y, fmt, rounding, PhiloxKey(*key) if key else None)
        chunk = encode(y, fmt)
        codes[part] = pack(chunk) if fmt.is_packed else chunk
    non_finite = scales.scale_inv.isnan()
    # Asking costs less than filling on the CPU, and a synchronisation elsewhere.
    if codes.device.type != "cpu" or non_finite.any():
        codes.masked_fill_(non_finite, 0)
    announce("quantize torch")
    return codes, scales.scale_inv


def _part(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[part]


def _quantize_rows_fake(
    x: torch.Tensor,
    format: str,
    rounding: str,
    scale: str,
    amax: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    high: torch.Tensor | None = None,
    key: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = (x.shape[1] + 1) // 2 if FORMATS[format].is_packed else x.shape[1]
    shape = (x.shape[0], 1) if amax is None else amax.shape
    codes = x.new_empty((x.shape[0], width), dtype=torch.uint8)
    return codes, x.new_empty(shape, dtype=torch.float32)


def _gemm(
    a: torch.Tensor,
    a_format: str,
    b: torch.Tensor,
    b_format: str,
    layout: str,
    a_columns: int,
    b_columns: int,
) -> torch.Tensor:
    """Product of two stored operands without scales, summed in float32 (exact for 4-bit codes).

    An operand is a matrix of codes of `*_format` (4-bit ones packed), or high-precision values
    where the format is "". `*_columns` is its number of columns before packing. `layout`: "nt",
    "nn" or "tn": whether a and b enter as stored or transposed.
    """
    a_fmt = FORMATS[a_format] if a_format else None
    b_fmt = FORMATS[b_format] if b_format else None
    return default_gemm(a, a_fmt, b, b_fmt, layout, a_columns, b_columns)


def _gemm_fake(
    a: torch.Tensor,
    a_format: str,
    b: torch.Tensor,
    b_format: str,
    layout: str,
    a_columns: int,
    b_columns: int,
) -> torch.Tensor:
    rows = a.shape[0] if layout[0] == "n" else a_columns
    columns = b_columns if layout[1] == "n" else b.shape[0]
    return a.new_empty((rows, columns), dtype=torch.float32)


def _split_outliers(
    x: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-row thresholds and what lies beyond them.

    x: (R, K) any float; high = sorted[index], low = sorted[K - 1 - index] of each row. Returns
    low, high (R, 1) float32; columns (R, c) int16 (int32 for K > 32,767) ascending, and values
    (R, c) float32 = x - clamp(x), with c = 2 (K - 1 - index). Slots that are not needed hold
    column 0, value 0 and come first. A row that is not finite has thresholds NaN and no entries.
    """
    num_beyond = x.shape[1] - 1 - index
    x = x.to(torch.float32)
    largest, largest_at = x.topk(num_beyond + 1, dim=1)
    smallest, smallest_at = x.topk(num_beyond + 1, dim=1, largest=False)
    high, low = largest[:, -1:], smallest[:, -1:]
    values = torch.cat((largest[:, :-1] - high, smallest[:, :-1] - low), dim=1)
    columns = torch.cat((largest_at[:, :-1], smallest_at[:, :-1]), dim=1)
    # Inf - finite = Inf and NaN stays NaN, so one look at the extremes is enough.
    finite = largest[:, :1].isfinite() & smallest[:, :1].isfinite()
    used = (values != 0) & finite
    values = torch.where(used, values, 0.0)
    columns, order = torch.where(used, columns, 0).sort(dim=1, stable=True)
    low, high = (torch.where(finite, threshold, torch.nan) for threshold in (low, high))
    column_dtype = torch.int16 if x.shape[1] <= 32768 else torch.int32
    return low, high, columns.to(column_dtype), values.gather(1, order)


def _split_outliers_fake(
    x: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    threshold = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    shape = (x.shape[0], 2 * (x.shape[1] - 1 - index))
    column_dtype = torch.int16 if x.shape[1] <= 32768 else torch.int32
    columns = x.new_empty(shape, dtype=column_dtype)
    return threshold, torch.empty_like(threshold), columns, x.new_empty(shape, dtype=torch.float32)


def _residual_gemm(
    columns: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    """(T, N) float32 = dX @ weight^T for a sparse dX (T, K); weight: (N, K), any float.

    columns, values: (T, c), or flat with `offsets` (T + 1) where rows differ in width. A row's
    entries are summed in ascending k, however many rows there are: results are batch-invariant.
    """
    table = weight.to(torch.float32).t().contiguous()
    announce("residual torch.embedding_bag")
    return _sum_rows(table, columns, values, offsets)


def _sum_rows(
    table: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None
) -> torch.Tensor:
    """Row i of the result = sum of weights[i, j] * table[index[i, j]] in the order of j."""
    if offsets is None:
        num_rows, width = index.shape
        offsets = torch.arange(num_rows, device=index.device, dtype=torch.int32) * width
    else:
        offsets = offsets[:-1]
    if index.numel() == 0:
        return table.new_zeros((offsets.shape[0], table.shape[1]))
    return torch.nn.functional.embedding_bag(
        index.reshape(-1).to(torch.int32),
        table,
        offsets.to(torch.int32),
        mode="sum",
        per_sample_weights=weights.reshape(-1),
    )


def _residual_gemm_fake(
    columns: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    num_rows = columns.shape[0] if offsets is None else offsets.shape[0] - 1
    return weight.new_empty((num_rows, weight.shape[0]), dtype=torch.float32)


def _residual_wgrad(
    columns: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    grad_output: torch.Tensor,
    num_columns: int,
) -> torch.Tensor:
    """(N, K) float32 = grad_output^T @ dX; grad_output: (T, N), any float, not quantised.

    Entries are sorted by column, then token, and summed in that order: no atomics, equal bits in
    every run.
    """
    if offsets is None:
        rows = torch.arange(columns.shape[0], device=columns.device, dtype=torch.int32)
        rows = rows.repeat_interleave(columns.shape[1])
    else:
        rows = torch.repeat_interleave(offsets.diff()).to(torch.int32)
    ordered, order = columns.reshape(-1).to(torch.int32).sort(stable=True)
    bounds = torch.arange(num_columns + 1, device=columns.device, dtype=torch.int32)
    column_offsets = torch.searchsorted(ordered, bounds)
    table = grad_output.to(torch.float32)
    announce("residual torch.embedding_bag")
    transposed = _sum_rows(table, rows[order], values.reshape(-1)[order], column_offsets)
    return transposed.t()


def _residual_wgrad_fake(
    columns: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    grad_output: torch.Tensor,
    num_columns: int,
) -> torch.Tensor:
    shape = (num_columns, grad_output.shape[1])
    return grad_output.new_empty(shape, dtype=torch.float32).t()


for _name, _default, _fake in (
    ("quantize_rows", _quantize_rows, _quantize_rows_fake),
    ("gemm", _gemm, _gemm_fake),
    ("split_outliers", _split_outliers, _split_outliers_fake),
    ("residual_gemm", _residual_gemm, _residual_gemm_fake),
    ("residual_wgrad", _residual_wgrad, _residual_wgrad_fake),
):
    _schema = torch.library.infer_schema(_default, mutates_args=())
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(_name, _default, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4_plugin::{_name}", _fake, lib=library)


def quantize_rows(
    x: torch.Tensor,
    fmt: MiniFloat,
    *,
    rounding: str = "nearest",
    scale: str = "absmax",
    amax: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    high: torch.Tensor | None = None,
    key: PhiloxKey | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale_inv) of x: (R, K); see `_quantize_rows` for shapes and edge cases."""
    words = None if key is None else [key.seed, key.step, key.micro_step, key.tensor_id]
    codes, scale_inv = torch.ops.fp4_plugin.quantize_rows(
        x, fmt.name, rounding, scale, amax, low, high, words
    )
    return codes, scale_inv


def gemm(
    a: torch.Tensor,
    a_format: MiniFloat | None,
    b: torch.Tensor,
    b_format: MiniFloat | None,
    layout: str,
    columns: tuple[int, int],
) -> torch.Tensor:
    """float32 product without scales; `columns` are those of a and b; see `_gemm`."""
    a_name, b_name = (fmt.name if fmt else "" for fmt in (a_format, b_format))
    product: torch.Tensor = torch.ops.fp4_plugin.gemm(a, a_name, b, b_name, layout, *columns)
    return product


def split_outliers(
    x: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(low, high, columns, values) of x: (R, K); see `_split_outliers`."""
    low, high, columns, values = torch.ops.fp4_plugin.split_outliers(x, index)
    return low, high, columns, values


def residual_gemm(
    columns: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    """(T, N) float32; see `_residual_gemm`."""
    product: torch.Tensor = torch.ops.fp4_plugin.residual_gemm(columns, values, offsets, weight)
    return product


def residual_wgrad(
    columns: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    grad_output: torch.Tensor,
    num_columns: int,
) -> torch.Tensor:
    """(N, K) float32; see `_residual_wgrad`."""
    product: torch.Tensor = torch.ops.fp4_plugin.residual_wgrad(
        columns, values, offsets, grad_output, num_columns
    )
    return product
