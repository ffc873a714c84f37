"""How a moment or a master weight is stored: low-precision codes, one scale per block of 1024.

A block's amax is scaled into the binade below the format's largest, which leaves a headroom of two
(amax / (max / 2), rounded down to a power of two). Scales are powers of two throughout, so that
decoding, squaring and taking the root again return the same bits: a state written as float32 and
read back is the same state.

The second moment v = E[g^2] is stored as sqrt(v). As a plain FP16 number v spans the square of the
range of the gradients, flushes to zero where they are small, and the update there is 3-4 times too
large. Rounding to nearest would never let sqrt(v) decay where beta2 is close to 1 (its change per
step is less than half a spacing), so that it is rounded stochastically. So is an E4M3 first moment:
to nearest it stops a quarter short of a steady gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from fp4_plugin.registry import Registry

__all__ = ["BLOCK_SIZE", "STATE_FORMATS", "StateFormat", "Workspace", "num_blocks"]

BLOCK_SIZE = 1024

_MANTISSA_BITS_FP32 = 23
_EXPONENT_MASK_FP32 = 0x7F800000
_MIN_SUBNORMAL_EXPONENT_FP32 = -149
# The bits of a finite E4M3 number, moved up by 7, are an FP16 number 2^-8 as large. Moving them is
# exact and several times faster on CPU than the casts; NaN and Inf live in the scale.
_FP16_PER_E4M3 = 2.0**8
_EXPONENT_TOP_BIT_FP16 = 0x4000
# Large enough that one float32 spacing below a format's smallest normal, times this, exceeds it.
_STEEP = 2.0**60


def num_blocks(numel: int) -> int:
    """Blocks, and so scales, of a tensor with `numel` elements; the last one may be short."""
    return -(-numel // BLOCK_SIZE)


class Workspace(Protocol):
    """Where temporary tensors come from: reused memory in eager mode, the compiler's otherwise."""

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class StateFormat:
    """A storage format of the optimiser.

    dtype: of the codes, a floating-point type of 16 or 8 bits. is_root: the square root is stored.
    stochastic: round up with the probability of the distance to the lower neighbour.
    """

    name: str
    dtype: torch.dtype
    is_root: bool = False
    stochastic: bool = False

    @property
    def mantissa_bits(self) -> int:
        return round(-math.log2(torch.finfo(self.dtype).eps))

    @property
    def dropped_bits(self) -> int:
        """Mantissa bits of float32 that the format has no room for."""
        return _MANTISSA_BITS_FP32 - self.mantissa_bits

    @property
    def top_exponent(self) -> int:
        """Binade that a block's amax is scaled to."""
        return math.floor(math.log2(torch.finfo(self.dtype).max)) - 1

    @property
    def min_normal(self) -> float:
        return torch.finfo(self.dtype).smallest_normal

    @property
    def min_scale(self) -> float:
        """The least scale whose codes (squared, for a root) are all exact as float32."""
        exponent = math.ceil(_MIN_SUBNORMAL_EXPONENT_FP32 / (2 if self.is_root else 1))
        return 2.0 ** (exponent - round(math.log2(self.min_normal)) + self.mantissa_bits)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """out = (codes * scale), squared for a root.

        codes: (blocks, width); scale: (blocks, 1) float32; out: (blocks, width) float32.
        """
        if self.dtype == torch.float8_e4m3fn:
            bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
            out.copy_(bits.bitwise_and_(~_EXPONENT_TOP_BIT_FP16).view(torch.float16))
            scale = scale * _FP16_PER_E4M3
        else:
            out.copy_(codes)
        out.mul_(scale)
        if self.is_root:
            out.mul_(out)

    def encode(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        noise: torch.Tensor | None,
        workspace: Workspace,
    ) -> None:
        """Store `x` in `codes` and `scale`; `x` is left as what the codes stand for, scaled.

        x: (blocks, width) float32, not negative for a root. noise: int32 below 2^dropped_bits, of
        the shape of `x`; None rounds to nearest. A block with a number that is not finite becomes
        NaN as a whole, and so stays visible.
        """
        if self.is_root:
            x.sqrt_()
        scale.copy_(self._scale(_block_amax(x, is_positive=self.is_root)))
        x.mul_(1.0 / scale)
        if noise is None:
            codes.copy_(x)
            return
        self._add_noise(x, noise, workspace)
        if self.dtype == torch.float8_e4m3fn:
            bits = (x * (1.0 / _FP16_PER_E4M3)).to(torch.float16).view(torch.int16)
            sign = (bits >> 8).bitwise_and_(-0x80)
            codes.view(torch.int8).copy_(bits.bitwise_right_shift_(7).bitwise_and_(0x7F) | sign)
        else:
            codes.copy_(x)

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Power of two for each block; inf where amax is not finite, which decodes to NaN.

        amax is rounded up to the format's mantissa first: what it is stored as then never belongs
        into a higher binade than amax itself, and encoding a decoded state changes nothing.
        """
        round_up = (1 << self.dropped_bits) - 1
        binade = (amax.view(torch.int32) + round_up).bitwise_and_(_EXPONENT_MASK_FP32)
        return binade.view(torch.float32).mul_(2.0**-self.top_exponent).clamp_(min=self.min_scale)

    def _add_noise(self, x: torch.Tensor, noise: torch.Tensor, workspace: Workspace) -> None:
        """Round `x` to the format's grid, stochastically, in place.

        Adding noise to the bits that will be dropped, then dropping them, rounds a normal number.
        Below min_normal the grid is that of the binade above: there x moves up by min_normal, is
        rounded, and moves back.
        """
        shift = workspace.like(x, "shift", torch.float32)
        if self.is_root:
            torch.mul(x, -_STEEP, out=shift)
        else:
            torch.abs(x, out=shift)
            shift.mul_(-_STEEP)
        shift.add_(self.min_normal * _STEEP).clamp_(0.0, self.min_normal)
        if not self.is_root:
            torch.copysign(shift, x, out=shift)
        x.add_(shift)
        x.view(torch.int32).add_(noise).bitwise_and_(-(1 << self.dropped_bits))
        x.sub_(shift)


def _block_amax(x: torch.Tensor, is_positive: bool) -> torch.Tensor:
    """(blocks, width) -> (blocks, 1) max|x|; NaN where the block holds one."""
    high = x.amax(dim=1, keepdim=True)
    return high if is_positive else torch.maximum(high, x.amin(dim=1, keepdim=True).neg_())


STATE_FORMATS: Registry[StateFormat] = Registry("optimiser state format")
STATE_FORMATS.register("fp16", StateFormat("fp16", torch.float16))
STATE_FORMATS.register("e4m3", StateFormat("e4m3", torch.float8_e4m3fn, stochastic=True))
STATE_FORMATS.register("fp16_master", StateFormat("fp16_master", torch.float16, stochastic=True))
STATE_FORMATS.register(
    "fp16_sqrt", StateFormat("fp16_sqrt", torch.float16, is_root=True, stochastic=True)
)
