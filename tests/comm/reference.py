"""FP8 reductions in plain numpy, bit for bit, and how far they may be from exact.

Nothing here imports `fp4_plugin`. The rule: every rank but the owner rounds its share in blocks,
the owner adds up in float32 in rank order with its own share unrounded; an all-reduce rounds the
sum once more. A rounding to a grid of p significant bits, smallest step s and largest value M, with
a block scale A / M, moves x by at most half a step of the grid there:

    max(|x| 2^-p, s / 2 * A / M)

and the float32 arithmetic around it by a few 2^-24 of |x|; a block below 2^-102 becomes 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from tests.oracles import GRIDS, ML_DTYPES, Quantized, quantize_groups

__all__ = [
    "DTYPES",
    "cast_bound",
    "message_of",
    "reduced_shares",
    "reduction_bound",
    "rounded",
    "rounded_in_blocks",
    "share_bounds",
]

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_LAYOUTS = {"e4m3": 0x43, "e5m2": 0x52}
# Half a unit in the last place, relative: 2^-p with p significant bits.
_HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_FLOAT16_STEP = 2.0**-24
_TINY = 2.0**-102


def rounded_in_blocks(values: np.ndarray, fmt: str, block_size: int) -> Quantized:
    """1-D float32 `values` in blocks; `scale_inv` has one entry per element."""
    if len(values) == 0:
        nothing = np.zeros(0, np.float32)
        return Quantized(np.zeros(0, np.uint8), nothing, nothing, nothing)
    whole = quantize_groups(values[None], GRIDS[fmt], (1, block_size))
    return Quantized(whole.codes[0], whole.scaled[0], whole.scale_inv[0], whole.values[0])


def message_of(values: np.ndarray, fmt: str, block_size: int) -> bytes:
    """Header, scales and codes, little-endian, as the codec documents them."""
    if len(values) == 0:
        return b""
    quantized = rounded_in_blocks(values, fmt, block_size)
    magic = int.from_bytes(b"\x01fp8", "little")
    header = struct.pack("<4i", magic, _LAYOUTS[fmt], block_size, len(values))
    scales = quantized.scale_inv[::block_size].astype("<f4").tobytes()
    return header + scales + quantized.codes.tobytes()


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as `dtype` would store them."""
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype]).astype(np.float32)


def share_bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Equal shares, rounded up to 16 elements; the last ones get what is left."""
    share = ((numel + size - 1) // size + 15) // 16 * 16
    return [(min(r * share, numel), min(r * share + share, numel)) for r in range(size)]


def reduced_shares(
    inputs: Sequence[np.ndarray],
    bounds: Sequence[tuple[int, int]],
    fmt: str,
    block_size: int,
    *,
    twice: bool,
) -> list[np.ndarray]:
    """float32 sums of the shares that rank after rank owns; `twice`: rounded for their return."""
    sums = []
    for owner, (start, stop) in enumerate(bounds):
        total = np.zeros(stop - start, np.float32)
        for rank, values in enumerate(inputs):
            share = values[start:stop]
            if rank != owner:
                share = rounded_in_blocks(share, fmt, block_size).values
            total = total + share if rank else share.copy()
        sums.append(rounded_in_blocks(total, fmt, block_size).values if twice else total)
    return sums


def cast_bound(magnitude: np.ndarray, fmt: str, block_size: int) -> np.ndarray:
    """Largest error of one rounding of values that are nowhere larger than `magnitude`."""
    info = ml_dtypes.finfo(ML_DTYPES[fmt])
    bound = np.zeros_like(magnitude)
    for start in range(0, len(magnitude), block_size):
        block = magnitude[start : start + block_size]
        half_step = float(info.smallest_subnormal) / 2 * block.max() / float(info.max)
        relative = 2.0 ** -(info.nmant + 1)
        bound[start : start + block_size] = np.maximum(block * relative, half_step)
    return bound * (1 + 2.0**-20) + magnitude * 2.0**-21 + _TINY


def reduction_bound(
    inputs: Sequence[np.ndarray],
    bounds: Sequence[tuple[int, int]],
    fmt: str,
    block_size: int,
    dtype: str,
    *,
    twice: bool,
) -> list[np.ndarray]:
    """Per share and element: how far the result may be from the float64 sum."""
    found = []
    for owner, (start, stop) in enumerate(bounds):
        shares = [np.abs(one[start:stop].astype(np.float64)) for one in inputs]
        errors = [cast_bound(one, fmt, block_size) for r, one in enumerate(shares) if r != owner]
        error = sum(errors, np.zeros(stop - start))
        # Every float32 addition rounds a number no larger than the sum of all magnitudes.
        error = error + len(shares) * 2.0**-24 * (sum(shares) + error)
        total = np.abs(sum(one[start:stop].astype(np.float64) for one in inputs))
        if twice:
            error = error + cast_bound(total + error, fmt, block_size)
        output = (total + error) * _HALF_ULP[dtype]
        if dtype == "float16":
            output = output + _FLOAT16_STEP / 2
        found.append(error + output)
    return found
