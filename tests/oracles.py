"""Slow references the package is tested against; nothing here imports `fp4_plugin`.

Number formats come from ml_dtypes where it has them and from lists typed by hand where it does not.
Casts are brute force over those lists, scales are numpy float32 one operation at a time, thresholds
come from a sort, the linear layer is float64 matrix algebra.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "GRIDS",
    "ML_DTYPES",
    "LinearReference",
    "Quantized",
    "clamp_rows",
    "dequantize",
    "dge_slope",
    "every_finite_bf16",
    "float32_of_hex",
    "half_up_value",
    "linear_reference",
    "load_vectors",
    "nearest_even_code",
    "pack_nibbles",
    "philox4x32",
    "quantize_groups",
    "quantize_rows",
    "relative_frobenius",
    "signed_values",
    "sqnr_db",
    "thresholds",
]

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}

# Below this a group's amax counts as 1, so that max / amax stays finite in float32.
TINY_AMAX = 2.0**-102


def load_vectors(name: str) -> Any:
    """The cases of one file in tests/vectors (right answers made by other oracles than these)."""
    path = Path(__file__).parent / "vectors" / f"{name}.json"
    return json.loads(path.read_text(encoding="ascii"))["cases"]


def float32_of_hex(values: list[Any]) -> np.ndarray:
    """Nested lists of hexadecimal floats as float32."""
    if isinstance(values[0], list):
        return np.stack([float32_of_hex(row) for row in values])
    return np.array([float.fromhex(value) for value in values], dtype=np.float32)


def _decoded(dtype: type, num_codes: int) -> np.ndarray:
    values = np.arange(num_codes, dtype=np.uint8).view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


# The non-negative values of each format, ascending; the index is the code without its sign.
GRIDS = {
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "e1m2": np.array([0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
    "e3m0": np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16]),
    "e4m3": _decoded(ml_dtypes.float8_e4m3fn, 128),
    "e5m2": _decoded(ml_dtypes.float8_e5m2, 128),
    "e8m0": _decoded(ml_dtypes.float8_e8m0fnu, 256),
}


def sign_bit(grid: np.ndarray) -> int:
    """8 for a 4-bit format, 128 for an 8-bit one (reserved codes above the grid included)."""
    return 1 << int(np.ceil(np.log2(len(grid))))


def signed_values(grid: np.ndarray) -> np.ndarray:
    """Every value of a signed format, both zeros included: index = code where none is reserved."""
    return np.concatenate([grid, -grid])


def every_finite_bf16() -> np.ndarray:
    """All 65,280 finite bf16 values as float32, -0 included."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


def nearest_even_code(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Code (with sign) of the nearest grid value, ties to the even code, saturating at the ends."""
    x = np.asarray(x, dtype=np.float64)
    # Both are exact in float64, so a tie is seen as a tie.
    midpoints = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(midpoints, np.abs(x), side="left")
    above = np.searchsorted(midpoints, np.abs(x), side="right")
    magnitude = np.where(below % 2 == 0, below, above)
    return np.where(np.signbit(x), magnitude + sign_bit(grid), magnitude).astype(np.uint8)


def half_up_value(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Nearest grid value, ties toward +infinity (the rounding of the `msamp` recipe)."""
    x = np.clip(np.asarray(x, dtype=np.float64), -grid[-1], grid[-1])
    values = np.unique(signed_values(grid))
    midpoints = (values[:-1] + values[1:]) / 2
    return values[np.searchsorted(midpoints, x, side="right")]


def dequantize(codes: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Float32 values of codes (scale 1)."""
    codes = np.asarray(codes, dtype=np.int64)
    magnitude = grid[codes & (sign_bit(grid) - 1)]
    return np.where(codes & sign_bit(grid), -magnitude, magnitude).astype(np.float32)


@dataclass(frozen=True)
class Quantized:
    """codes uint8 and scaled float32 like x; scale_inv float32 broadcastable to x."""

    codes: np.ndarray
    scaled: np.ndarray
    scale_inv: np.ndarray
    values: np.ndarray


def _quantize_group(x: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    if not np.isfinite(x).all():
        nothing = np.zeros(x.shape, dtype=np.uint8)
        return nothing, np.full(x.shape, np.nan, dtype=np.float32), np.float32(np.nan)
    amax = np.abs(x).max(initial=np.float32(0))
    if amax < TINY_AMAX:
        amax = np.float32(1)
    largest = np.float32(grid[-1])
    inv = np.float32(largest / amax)
    scaled = np.clip((x * inv).astype(np.float32), -largest, largest)
    return nearest_even_code(scaled, grid), scaled, np.float32(amax / largest)


def _group_slices(shape: tuple[int, int], group: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    for row in range(0, shape[0], max(group[0], 1)):
        for column in range(0, shape[1], max(group[1], 1)):
            yield slice(row, row + group[0]), slice(column, column + group[1])


def quantize_groups(x: np.ndarray, grid: np.ndarray, group: tuple[int, int]) -> Quantized:
    """Absmax scaling of a float32 (R, K) matrix in groups of (rows, columns), ragged at the ends.

    `scale_inv` comes back expanded to the shape of x, so that any layout can be compared with it.
    """
    x = np.asarray(x, dtype=np.float32)
    codes = np.zeros(x.shape, dtype=np.uint8)
    scaled, scale_inv = np.zeros_like(x), np.zeros_like(x)
    for where in _group_slices(x.shape, group):
        codes[where], scaled[where], scale_inv[where] = _quantize_group(x[where], grid)
    values = (dequantize(codes, grid) * scale_inv).astype(np.float32)
    return Quantized(codes, scaled, scale_inv, values)


def quantize_rows(x: np.ndarray, grid: np.ndarray) -> Quantized:
    """One scale per row of a float32 (R, K) matrix; scale_inv is (R, 1)."""
    whole = quantize_groups(x, grid, (1, max(x.shape[1], 1)))
    return Quantized(whole.codes, whole.scaled, whole.scale_inv[:, :1], whole.values)


def pack_nibbles(codes: list[int]) -> list[int]:
    """Two codes a byte, low nibble first, odd length padded with code 0."""
    padded = codes + [0] * (len(codes) % 2)
    return [padded[i] | padded[i + 1] << 4 for i in range(0, len(padded), 2)]


def thresholds(values: np.ndarray, alpha: float) -> tuple[float, float]:
    """(lo, hi): the order statistics n-1-i and i with i = floor(alpha * n), by a full sort."""
    ordered = np.sort(np.asarray(values).ravel())
    index = math.floor(alpha * ordered.size)
    return float(ordered[ordered.size - 1 - index]), float(ordered[index])


def clamp_rows(x: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """(clamped float32, residual float64) with one pair of thresholds per row."""
    clamped = np.empty(x.shape, dtype=np.float32)
    for row in range(x.shape[0]):
        clamped[row] = np.clip(x[row], *thresholds(x[row], alpha))
    return clamped, x.astype(np.float64) - clamped.astype(np.float64)


def dge_slope(x: np.ndarray, grid: np.ndarray, k: float, max_slope: float) -> np.ndarray:
    """f'(x) = min(|t|^(1/k - 1) / k, max_slope), t from -1 to 1 between neighbours; 0 beyond."""
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    upper = np.clip(np.searchsorted(grid, magnitude, side="left"), 1, len(grid) - 1)
    lo, hi = grid[upper - 1], grid[upper]
    t = np.abs(2 * (magnitude - lo) / (hi - lo) - 1)
    with np.errstate(divide="ignore"):
        slope = np.minimum(t ** (1 / k - 1) / k, max_slope)
    return np.where(magnitude > grid[-1], 0.0, slope)


@dataclass(frozen=True)
class LinearReference:
    """Float64 results: output (T, N), grad_input (T, K), grad_weight (N, K), grad_bias (N,)."""

    output: np.ndarray
    grad_input: np.ndarray
    grad_weight: np.ndarray
    grad_bias: np.ndarray
    slope: np.ndarray
    num_clamped: int


def linear_reference(
    x: np.ndarray,
    weight: np.ndarray,
    grad_output: np.ndarray,
    *,
    formats: tuple[str | None, str | None] = ("e2m1", "e2m1"),
    alpha: float | None = None,
    dge: tuple[float, float] | None = None,
    compensate: bool = True,
    bias: np.ndarray | None = None,
) -> LinearReference:
    """The layer of arXiv 2501.17116 and its straight-through/DGE gradient, all GEMMs in float64.

    formats: (input, weight) names, None = not quantised. grad_output is never quantised here.
    """
    x, weight = x.astype(np.float32), weight.astype(np.float32)
    grad = grad_output.astype(np.float64)
    clamped, residual = (x, np.zeros(x.shape)) if alpha is None else clamp_rows(x, alpha)
    num_clamped = int((residual != 0).sum())
    if not compensate:
        residual = np.zeros(x.shape)
    x_lp, _ = _rounded(clamped, formats[0])
    w_lp, w_scaled = _rounded(weight, formats[1])
    slope = np.ones(weight.shape)
    if dge is not None:
        slope = dge_slope(w_scaled, GRIDS[formats[1]], *dge)
    output = x_lp @ w_lp.T + residual @ weight.astype(np.float64).T
    return LinearReference(
        output=output if bias is None else output + bias.astype(np.float64),
        grad_input=grad @ w_lp,
        grad_weight=(grad.T @ x_lp) * slope + grad.T @ residual,
        grad_bias=grad.sum(0),
        slope=slope,
        num_clamped=num_clamped,
    )


def _rounded(x: np.ndarray, name: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(values, scaled), one scale per row; the products code * scale_inv stay in float64."""
    if name is None:
        return x.astype(np.float64), x
    quantized = quantize_rows(x, GRIDS[name])
    exact = dequantize(quantized.codes, GRIDS[name]).astype(np.float64) * quantized.scale_inv
    return exact, quantized.scaled


def relative_frobenius(value: np.ndarray, reference: np.ndarray) -> float:
    """||value - reference|| / ||reference|| in float64."""
    difference = np.asarray(value, dtype=np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def sqnr_db(reference: np.ndarray, value: np.ndarray) -> float:
    """20 log10(||reference|| / ||reference - value||)."""
    reference = np.asarray(reference, dtype=np.float64)
    noise = np.linalg.norm(reference - np.asarray(value, dtype=np.float64))
    return float(20 * np.log10(np.linalg.norm(reference) / noise))


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...], rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32 of Salmon et al. (SC'11) in plain integers."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
