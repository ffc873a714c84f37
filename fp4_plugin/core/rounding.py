"""Rounding float32 values to the grid of a minifloat: nearest-even, half-up and stochastic.

All three saturate at +-max, keep the sign of zero and pass NaN through; they differ in what
happens between two neighbouring grid points:

    nearest     round to nearest, ties to the even code: what `cvt.rn.satfinite`, the OCP
                specification and ml_dtypes do
    half_up     round to nearest, ties toward +infinity: neither symmetric nor any hardware's rule,
                kept to reproduce the authors' released kernel
    stochastic  up with the probability of the distance to the lower neighbour; unbiased

Stochastic rounding draws from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) at a counter made of the *element's index*: what an element gets depends on the
key and its index alone, not on chunking, device, thread or parallel layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4_plugin.core.codes import decode, encode
from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.errors import ConfigError

__all__ = ["ROUNDINGS", "PhiloxKey", "philox", "philox_uniform", "round_to_grid"]

ROUNDINGS = ("nearest", "half_up", "stochastic")

_FLOAT32_EXPONENT_MASK = 0x7F800000
_UINT32_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class PhiloxKey:
    """What a stream of random numbers belongs to; equal keys give equal numbers."""

    seed: int = 0
    step: int = 0
    micro_step: int = 0
    tensor_id: int = 0


def round_to_grid(
    y: torch.Tensor, fmt: MiniFloat, rounding: str = "nearest", key: PhiloxKey | None = None
) -> torch.Tensor:
    """Values of `y` rounded to the grid of `fmt`.

    y: any shape, float32, already scaled. Returns float32 of the same shape, |value| <= fmt.max;
    NaN stays NaN and Inf saturates. Raises ConfigError for an unknown rounding, or for stochastic
    rounding without a key.
    """
    if rounding not in ROUNDINGS:
        raise ConfigError(f"unknown rounding {rounding!r}: allowed are {list(ROUNDINGS)}")
    if rounding != "nearest" and not fmt.signed:
        raise ConfigError(f"{fmt.name} holds powers of two and is rounded to nearest only")
    if fmt.signed:
        y = y.clamp(-fmt.max, fmt.max)
    if rounding == "nearest":
        return torch.where(y.isnan(), y, decode(encode(y, fmt), fmt))
    if rounding == "half_up":
        rounded = _round_up_where(y, fmt, 0.5)
    else:
        if key is None:
            raise ConfigError("stochastic rounding needs a key: pass key=PhiloxKey(seed, ...)")
        uniform = philox_uniform(key, 0, y.numel(), y.device).view(y.shape)
        # Up if uniform < distance, that is if distance >= nextafter(uniform): an element on the
        # grid (distance 0) never moves.
        rounded = _round_up_where(y, fmt, torch.nextafter(uniform, uniform.new_ones(())))
    return torch.copysign(rounded, y)


def _round_up_where(y: torch.Tensor, fmt: MiniFloat, up_from: torch.Tensor | float) -> torch.Tensor:
    """Toward +inf where the distance to the lower neighbour, in spacings, is >= `up_from`."""
    binade = (y.view(torch.int32) & _FLOAT32_EXPONENT_MASK).view(torch.float32)
    spacing = binade.clamp_min(fmt.min_normal) * 2.0**-fmt.mantissa_bits
    index = y / spacing
    lower = index.floor()
    return (lower + (index - lower >= up_from)) * spacing


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Philox4x32-10: (..., 4) int64 counters below 2^32 -> (..., 4) int64 words below 2^32."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_32(c0, 0xD2511F53)
        high1, low1 = _multiply_32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _UINT32_MASK, (k1 + 0xBB67AE85) & _UINT32_MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiply_32(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32 bit product, in int64 without overflow."""
    low_product = (a & 0xFFFF) * b
    high_product = (a >> 16) * b
    middle = high_product + (low_product >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_product & 0xFFFF)


def philox_uniform(
    key: PhiloxKey, start: int, count: int, device: torch.device | None = None
) -> torch.Tensor:
    """`count` float32 numbers in [0, 1) for the elements start .. start + count - 1.

    The counter of element i is (i // 4 low, i // 4 high, step, micro_step), its word i % 4; the
    key is (seed, tensor_id). 24 bits of the word become the number.
    """
    first_block, last_block = start // 4, (start + count + 3) // 4
    block = torch.arange(first_block, last_block, dtype=torch.int64, device=device)
    step = torch.full_like(block, key.step & _UINT32_MASK)
    micro_step = torch.full_like(block, key.micro_step & _UINT32_MASK)
    counter = torch.stack((block & _UINT32_MASK, block >> 32, step, micro_step), dim=-1)
    words = philox(counter, (key.seed & _UINT32_MASK, key.tensor_id & _UINT32_MASK)).view(-1)
    offset = start - 4 * first_block
    return (words[offset : offset + count] >> 8).to(torch.float32) * 2.0**-24
