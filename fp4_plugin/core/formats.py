"""Minifloats described by their bit layout; grid, bias, max and codes are derived, never typed.

A code is `sign << (e + m) | exponent << m | mantissa`. With exponent field 0 a value is subnormal
(`mantissa * 2^(1 - bias - m)`), otherwise `(1 + mantissa / 2^m) * 2^(exponent - bias)`, where
`bias = 2^(e - 1) - 1` as in IEEE 754 and the OCP 8-bit and MX specifications. `reserved` says which
top codes are not numbers:

    none  every code is a number (E2M1, E1M2, E3M0)
    nan   the all-ones code is NaN, no infinities (E4M3 "fn", and the unsigned scale format E8M0)
    ieee  the all-ones exponent holds Inf and NaN (E5M2)

Adding a format is one line: `FORMATS.register("e2m2", MiniFloat("e2m2", 2, 2))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from fp4_plugin.registry import Registry

__all__ = ["E1M2", "E2M1", "E3M0", "E4M3", "E5M2", "E8M0", "FORMATS", "MiniFloat"]

Reserved = Literal["none", "nan", "ieee"]


@dataclass(frozen=True)
class MiniFloat:
    """A number format of at most 8 bits.

    Signed formats have subnormals and a zero; an unsigned one is a pure power-of-two scale format
    (OCP E8M0: exponent field 0 is 2^-bias, there is no zero).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    reserved: Reserved = "none"
    signed: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def is_packed(self) -> bool:
        """True if two codes share a byte."""
        return self.bits <= 4

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Spacing of the grid at zero."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @cached_property
    def grid(self) -> tuple[float, ...]:
        """The non-negative finite values in ascending order; the index is the code without sign."""
        return tuple(self._magnitude(code) for code in range(self._num_magnitudes))

    @property
    def max(self) -> float:
        return self.grid[-1]

    @property
    def nan_code(self) -> int | None:
        """The code (without sign) written for NaN, or None if the format has none."""
        return None if self.reserved == "none" else self._num_codes - 1

    @cached_property
    def integer_multiplier(self) -> int | None:
        """The power of two that makes every value an integer of magnitude <= 127, or None.

        E2M1 -> 2. Products of such integers are exact in int8 arithmetic with int32 sums.
        """
        multiplier = max(1.0, 1.0 / self.min_subnormal)
        return int(multiplier) if self.signed and self.max * multiplier <= 127 else None

    def decode_table(self, device: torch.device | None = None) -> torch.Tensor:
        """Float32 value of each of the 2^bits codes (NaN and Inf where reserved)."""
        magnitudes = [self._magnitude(code) for code in range(self._num_codes)]
        for code in range(self._num_magnitudes, self._num_codes):
            is_inf = self.reserved == "ieee" and code == self._num_magnitudes
            magnitudes[code] = float("inf") if is_inf else float("nan")
        signs = (1.0, -1.0) if self.signed else (1.0,)
        values = [sign * magnitude for sign in signs for magnitude in magnitudes]
        return torch.tensor(values, dtype=torch.float32, device=device)

    @property
    def _num_codes(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def _num_magnitudes(self) -> int:
        reserved = {"none": 0, "nan": 1, "ieee": 1 << self.mantissa_bits}[self.reserved]
        return self._num_codes - reserved

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits)
        if not self.signed:
            return (1 + fraction) * 2.0 ** (exponent - self.bias)
        if exponent == 0:
            return fraction * 2.0 ** (1 - self.bias)
        return (1 + fraction) * 2.0 ** (exponent - self.bias)


FORMATS: Registry[MiniFloat] = Registry("number format")
E2M1 = FORMATS.register("e2m1", MiniFloat("e2m1", 2, 1))
E1M2 = FORMATS.register("e1m2", MiniFloat("e1m2", 1, 2))
E3M0 = FORMATS.register("e3m0", MiniFloat("e3m0", 3, 0))
E4M3 = FORMATS.register("e4m3", MiniFloat("e4m3", 4, 3, reserved="nan"))
E5M2 = FORMATS.register("e5m2", MiniFloat("e5m2", 5, 2, reserved="ieee"))
E8M0 = FORMATS.register("e8m0", MiniFloat("e8m0", 8, 0, reserved="nan", signed=False))
