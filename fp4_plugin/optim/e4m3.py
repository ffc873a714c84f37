"""E4M3 codes to float32 and back, several times faster on a CPU than torch's casts.

E4M3 with its bits moved apart is FP16 with another exponent bias, subnormal numbers too: all
numbers here are those that the codes stand for, divided by UNIT. Eagerly it is 16-bit operations
that take little time; a compiler, which fuses operations, vectorises them on 32 bits only.
"""

from __future__ import annotations

import torch

from fp4_plugin.optim.workspace import Workspace

__all__ = ["UNIT", "narrow", "widen"]

# FP16 has seven mantissa bits more, and the exponent bias 15 instead of 7.
_SHIFT_FP16 = 7
UNIT = 2.0 ** (15 - 7)
_TOP_EXPONENT_BIT_FP16 = 0x4000
_MIN_NORMAL_FP16 = 2.0**-14
# The same between FP16's exponent bias and float32.
_SHIFT_FP32 = 20
_REBIAS_FP32 = (127 - 15) << 23


def widen(codes: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """codes: int8 -> out: float32, the numbers they stand for / UNIT; NaN comes out as 480."""
    if workspace.is_fused:
        _widen_fused(codes, out, workspace)
        return
    half = workspace.like(out, "half", torch.int16)
    half.copy_(codes)  # the sign bit fills the upper byte
    half.bitwise_left_shift_(_SHIFT_FP16).bitwise_and_(~_TOP_EXPONENT_BIT_FP16)
    out.copy_(half.view(torch.float16))


def narrow(x: torch.Tensor, codes: torch.Tensor, workspace: Workspace) -> None:
    """x: float32, numbers / UNIT of magnitude below 448 / UNIT -> codes: int8.

    Exact on the grid; elsewhere half rounds up.
    """
    if workspace.is_fused:
        _narrow_fused(x, codes, workspace)
        return
    half = workspace.like(x, "half", torch.int16)
    half.view(torch.float16).copy_(x)
    half.add_(1 << (_SHIFT_FP16 - 1))
    sign = workspace.like(x, "sign", torch.int16)
    torch.bitwise_right_shift(half, 8, out=sign)
    half.bitwise_right_shift_(_SHIFT_FP16).bitwise_or_(sign.bitwise_and_(-0x80))
    codes.copy_(half)


def _widen_fused(codes: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """With exponent and mantissa moved into a float32, y is right for normal numbers; for subnormal
    ones 2 y - min_normal is, and it is the smaller of the two just there.
    """
    signed = workspace.like(out, "shift", torch.float32)
    signed.view(torch.int32).copy_(codes)
    bits = out.view(torch.int32)
    torch.bitwise_and(signed.view(torch.int32), 0x7F, out=bits)
    bits.bitwise_left_shift_(_SHIFT_FP32).add_(_REBIAS_FP32)
    doubled = workspace.like(out, "doubled", torch.float32)
    torch.mul(out, 2.0, out=doubled)
    torch.minimum(out, doubled.sub_(_MIN_NORMAL_FP16), out=out)
    torch.copysign(out, signed, out=out)


def _narrow_fused(x: torch.Tensor, codes: torch.Tensor, workspace: Workspace) -> None:
    """The inverse: of x and (x + min_normal) / 2, the larger has the code's bits."""
    magnitude = workspace.like(x, "shift", torch.float32)
    torch.abs(x, out=magnitude)
    halved = workspace.like(x, "doubled", torch.float32)
    torch.add(magnitude, _MIN_NORMAL_FP16, out=halved)
    torch.maximum(magnitude, halved.mul_(0.5), out=magnitude)
    bits = magnitude.view(torch.int32)
    bits.add_((1 << (_SHIFT_FP32 - 1)) - _REBIAS_FP32).bitwise_right_shift_(_SHIFT_FP32)
    sign = halved.view(torch.int32)
    torch.bitwise_right_shift(x.view(torch.int32), 24, out=sign)
    codes.copy_(bits.bitwise_or_(sign.bitwise_and_(-0x80)))
