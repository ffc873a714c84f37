"""Values to codes (nearest-even) and back; packed codes straight to what a GEMM reads."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch

from fp4_plugin.core.formats import E4M3, E5M2, MiniFloat
from fp4_plugin.core.packing import unpack

__all__ = ["decode", "decode_packed", "encode"]

# Formats that torch itself stores: its casts agree with the rule below once values are clamped.
_TORCH_DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

_FLOAT32_MANTISSA_BITS = 23
_MAGNITUDE_MASK = 0x7FFFFFFF


def encode(y: torch.Tensor, fmt: MiniFloat) -> torch.Tensor:
    """y: float32 within +-fmt.max -> uint8 codes, one per element, nearest, ties to the even code.

    The sign of zero is kept; grid points are fixed points. NaN becomes the format's NaN code where
    it has one and is undefined elsewhere: a group that holds a NaN carries it in its scale.
    """
    if fmt in _TORCH_DTYPES:
        return y.to(_TORCH_DTYPES[fmt]).view(torch.uint8)
    if not fmt.signed:
        return _encode_scale(y, fmt)
    # A float32 is a minifloat with more mantissa bits: drop them, rounding at the last one kept.
    bits = y.view(torch.int32)
    magnitude = bits & _MAGNITUDE_MASK
    shift = _FLOAT32_MANTISSA_BITS - fmt.mantissa_bits
    code = (magnitude >> shift).bitwise_and_(1).add_(magnitude)
    code.add_((1 << (shift - 1)) - 1).bitwise_right_shift_(shift)
    code.sub_((127 - fmt.bias) << fmt.mantissa_bits)
    # Below min_normal the grid is evenly spaced: adding 2^23 spacings leaves the rounded number
    # of spacings, which is the code, in the low bits of the sum.
    magic = fmt.min_subnormal * 2.0**_FLOAT32_MANTISSA_BITS
    subnormal = (y.abs() + magic).view(torch.int32).sub_(_bits_of(magic))
    # Choose by mask, all ones where magnitude < min_normal: torch.where is 20x slower on the CPU.
    is_subnormal = magnitude.sub_(_bits_of(fmt.min_normal)).bitwise_right_shift_(31)
    code.bitwise_xor_(subnormal.bitwise_xor_(code).bitwise_and_(is_subnormal))
    sign = (bits >> 31).bitwise_and_(1 << (fmt.bits - 1))
    return code.bitwise_or_(sign).to(torch.uint8)


def _encode_scale(y: torch.Tensor, fmt: MiniFloat) -> torch.Tensor:
    """Nearest power of two, ties to the even exponent; zero and negative numbers become NaN."""
    smallest = fmt.grid[0]
    bits = y.clamp(smallest, fmt.max).view(torch.int32)
    half = 1 << (_FLOAT32_MANTISSA_BITS - 1)
    is_odd = (bits >> _FLOAT32_MANTISSA_BITS) & 1
    code = (bits + (half - 1) + is_odd) >> _FLOAT32_MANTISSA_BITS
    # 2^-127 is a float32 subnormal: its neighbours are told apart by comparison, not by exponent.
    code = torch.where(y <= 1.5 * smallest, 0, code.clamp_max(len(fmt.grid) - 1))
    return torch.where(y > 0, code, fmt.nan_code or 0).to(torch.uint8)


def _bits_of(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def decode(codes: torch.Tensor, fmt: MiniFloat) -> torch.Tensor:
    """codes: uint8, one per element -> float32 values, same shape."""
    # On the CPU torch's cast from 8 bits is not vectorised: looking values up is 5x faster.
    if fmt in _TORCH_DTYPES and codes.device.type != "cpu":
        return codes.view(_TORCH_DTYPES[fmt]).to(torch.float32)
    table = _value_table(fmt, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def decode_packed(
    packed: torch.Tensor, num_columns: int, fmt: MiniFloat, *, doubled: bool = False
) -> torch.Tensor:
    """Packed 4-bit codes (..., ceil(K/2)) -> (..., K) float32 values.

    With `doubled`, int8 integers `value * fmt.integer_multiplier` instead. One table look-up gives
    the two elements of a byte, so no unpacked copy of the codes is made.
    """
    table = _pair_table(fmt, doubled, packed.device)
    pairs = table.index_select(0, packed.reshape(-1).to(torch.int32))
    # A pair is one wide element of the table; seen as its narrow type it is the two values.
    element_type = torch.int8 if doubled else torch.float32
    values = pairs.view(element_type).view(*packed.shape[:-1], 2 * packed.shape[-1])
    return values if values.shape[-1] == num_columns else values[..., :num_columns].contiguous()


@lru_cache(maxsize=64)
def _value_table(fmt: MiniFloat, device: torch.device) -> torch.Tensor:
    """One float32 per code, usable inside and outside inference mode."""
    with torch.inference_mode(mode=False):
        return fmt.decode_table(device)


@lru_cache(maxsize=64)
def _pair_table(fmt: MiniFloat, doubled: bool, device: torch.device) -> torch.Tensor:
    """256 entries of (low nibble value, high nibble value), as one int16 or int64 each."""
    # Built on the CPU outside any inference mode, so that the cached table works everywhere.
    with torch.inference_mode(mode=False):
        nibbles = unpack(torch.arange(256, dtype=torch.uint8).view(256, 1), 2)
        values = decode(nibbles & ((1 << fmt.bits) - 1), fmt)
        if not doubled:
            return values.view(torch.int64).view(-1).to(device)
        multiplier = fmt.integer_multiplier
        assert multiplier is not None
        return (values * multiplier).to(torch.int8).view(torch.int16).view(-1).to(device)
