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

import torch

from fp4_plugin.optim import e4m3
from fp4_plugin.optim.workspace import Workspace
from fp4_plugin.registry import Registry

__all__ = ["BLOCK_SIZE", "STATE_FORMATS", "StateFormat", "num_blocks"]

BLOCK_SIZE = 1024

_MANTISSA_BITS_FP32 = 23
_EXPONENT_MASK_FP32 = 0x7F800000
_MIN_SUBNORMAL_EXPONENT_FP32 = -149
_MIN_NORMAL_EXPONENT_FP32 = -126
# Large enough that one float32 spacing below a format's smallest normal, times this, exceeds it.
_STEEP = 2.0**60


def num_blocks(numel: int) -> int:
    """Blocks, and so scales, of a tensor with `numel` elements; the last one may be short."""
    return -(-numel // BLOCK_SIZE)


@dataclass(frozen=True)
class StateFormat:
    """A storage format of the optimiser.

    dtype: of the codes, a floating-point type of 16 or 8 bits. is_root: the square root is stored.
    stochastic: round up with the probability of the distance to the lower neighbour.
    stochastic_subnormals: so too below the normal range; otherwise to nearest there.
    """

    name: str
    dtype: torch.dtype
    is_root: bool = False
    stochastic: bool = False
    stochastic_subnormals: bool = False

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
        """The least scale with a finite inverse, and all codes (or their squares) exact."""
        exponent = math.ceil(_MIN_SUBNORMAL_EXPONENT_FP32 / (2 if self.is_root else 1))
        exponent += self.mantissa_bits - round(math.log2(self.min_normal))
        return 2.0 ** max(exponent, _MIN_NORMAL_EXPONENT_FP32)

    def storage(self, codes: torch.Tensor) -> torch.Tensor:
        """`codes` as `decode` and `encode` work on them: 8-bit codes as integers."""
        return codes.view(torch.int8) if self.dtype.itemsize == 1 else codes

    def decode(
        self, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, workspace: Workspace
    ) -> None:
        """out = codes * scale, squared for a root.

        codes: (blocks, width) as from `storage`; scale: (blocks, 1) float32; out: (blocks, width)
        float32.
        """
        if self.dtype.itemsize == 1:
            e4m3.widen(codes, out, workspace)
            out.mul_(e4m3.UNIT)  # scale times UNIT might overflow
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
        """Store `x`, which is used up, in `codes` and `scale`.

        x: (blocks, width) float32, not negative for a root; codes as from `storage`. noise: int32
        below 2^dropped_bits, of the shape of `x`; None rounds to nearest. A block with a number
        that is not finite becomes NaN as a whole, and so stays visible.
        """
        if self.is_root:
            x.sqrt_()
        self._set_scale(self._block_amax(x), scale)
        is_narrowed = self.dtype.itemsize == 1 and noise is not None
        inverse = scale.reciprocal()
        x.mul_(inverse.mul_(1.0 / e4m3.UNIT) if is_narrowed else inverse)
        if noise is not None and self.stochastic_subnormals:
            self._round_small(x, noise, workspace)
        elif noise is not None:
            self._round_normal(x, noise)
        if is_narrowed:
            e4m3.narrow(x, codes, workspace)
        else:
            codes.view(self.dtype).copy_(x)

    def _block_amax(self, x: torch.Tensor) -> torch.Tensor:
        """(blocks, width) -> (blocks, 1) max|x|; NaN where the block holds one."""
        amax = x.amax(dim=1, keepdim=True)
        return amax if self.is_root else torch.maximum(amax, -x.amin(dim=1, keepdim=True))

    def _set_scale(self, amax: torch.Tensor, scale: torch.Tensor) -> None:
        """Power of two for each block; where amax is not finite, what decodes to NaN.

        That is NaN; or infinity, which costs less, for formats that keep NaN and turn all else into
        zero with it. amax is rounded up to the format's mantissa first: what it is stored as then
        never belongs into a higher binade than amax itself, and encoding a decoded state changes
        nothing.
        """
        round_up = (1 << self.dropped_bits) - 1
        binade = (amax.view(torch.int32) + round_up).bitwise_and_(_EXPONENT_MASK_FP32)
        torch.mul(binade.view(torch.float32), 2.0**-self.top_exponent, out=scale)
        scale.clamp_(min=self.min_scale)
        if self.dtype.itemsize == 1:
            scale.masked_fill_(scale == math.inf, math.nan)

    def _round_normal(self, x: torch.Tensor, noise: torch.Tensor) -> None:
        """Round numbers of the format's normal range stochastically to its grid, in place.

        Adding noise to the bits that will be dropped carries into those that are kept with the
        right probability.
        """
        x.view(torch.int32).add_(noise).bitwise_and_(-(1 << self.dropped_bits))

    def _round_small(self, x: torch.Tensor, noise: torch.Tensor, workspace: Workspace) -> None:
        """The same, also below the normal range, where the grid is that of the binade above.

        There x moves up by min_normal, is rounded, and moves back.
        """
        shift = workspace.like(x, "shift", torch.float32)
        magnitude = x if self.is_root else torch.abs(x, out=shift)
        edge = torch.full((), self.min_normal * _STEEP, device=x.device)
        torch.sub(edge, magnitude, alpha=_STEEP, out=shift).clamp_(0.0, self.min_normal)
        if not self.is_root:
            torch.copysign(shift, x, out=shift)
        x.add_(shift)
        self._round_normal(x, noise)
        x.sub_(shift)


STATE_FORMATS: Registry[StateFormat] = Registry("optimiser state format")
STATE_FORMATS.register("fp16", StateFormat("fp16", torch.float16))
# Subnormal codes to nearest: rounded up by chance, an entry would be many times too large, and so
# would be the weight's update, because the second moment of small gradients is kept exactly.
STATE_FORMATS.register("e4m3", StateFormat("e4m3", torch.float8_e4m3fn, stochastic=True))
STATE_FORMATS.register(
    "fp16_sqrt",
    StateFormat(
        "fp16_sqrt", torch.float16, is_root=True, stochastic=True, stochastic_subnormals=True
    ),
)
STATE_FORMATS.register(
    "fp16_master",
    StateFormat("fp16_master", torch.float16, stochastic=True, stochastic_subnormals=True),
)
