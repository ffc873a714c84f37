"""What one linear layer is asked to do: frozen, typed, no strings from a config file.

Arithmetic of a GEMM:

    fp4   both operands have 4 bits along the contraction axis
    fp8   8-bit operands, or an 8-bit and a 4-bit one (backward: grad_output is cast to 8 bits,
          the other operand is the saved codes)
    bf16  at least one operand keeps the model's precision (backward: grad_output is not cast
          below BF16, scales are folded in)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fp4_plugin.core.formats import MiniFloat
from fp4_plugin.errors import ConfigError
from fp4_plugin.estimators import STE, Estimator

__all__ = ["Arithmetic", "LinearSpec", "OperandSpec", "OutlierSpec"]

Arithmetic = Literal["fp4", "fp8", "bf16"]


@dataclass(frozen=True)
class OperandSpec:
    """How one operand is quantised; format None leaves it in the model's precision."""

    format: MiniFloat | None
    granularity: Literal["row", "tensor"] = "row"
    rounding: str = "nearest"
    scale: str = "absmax"

    @property
    def bits(self) -> int:
        return 16 if self.format is None else self.format.bits

    @property
    def format_name(self) -> str:
        return "bf16" if self.format is None else self.format.name


@dataclass(frozen=True)
class OutlierSpec:
    """Clamping of the input (core/outliers.py); compensation None clamps without adding back."""

    alpha: float
    compensation: Literal["sparse"] | None = "sparse"
    scope: Literal["row", "tensor"] = "row"


@dataclass(frozen=True)
class LinearSpec:
    """Raises ConfigError if the parts contradict each other; the message names the key."""

    weight: OperandSpec
    input: OperandSpec
    grad_output: OperandSpec
    fprop: Arithmetic
    dgrad: Arithmetic
    wgrad: Arithmetic
    outliers: OutlierSpec | None = None
    estimator: Estimator = field(default_factory=STE)

    def __post_init__(self) -> None:
        for label in ("weight", "input", "grad_output"):
            fmt = getattr(self, label).format
            if fmt is not None and not fmt.signed:
                raise ConfigError(
                    f"linear.{label}.format: {fmt.name!r} holds scales, not values; "
                    "use a signed format such as 'e2m1' or 'e4m3'"
                )
        if self.weight.format is None and not isinstance(self.estimator, STE):
            raise ConfigError(
                "linear.weight.estimator: an estimator needs a quantised weight, but "
                'linear.weight.format is \'bf16\'; use {"name": "ste"} or quantise the weight'
            )
        if self.outliers is not None and self.input.bits > 4:
            raise ConfigError(
                "linear.input.outliers: clamping needs a 4-bit input, but linear.input.format is "
                f"{self.input.format_name!r}; set outliers to null or use e.g. 'e2m1'"
            )
        self._check_fprop()
        self._check_backward("dgrad", self.dgrad, "weight", self.weight)
        self._check_backward("wgrad", self.wgrad, "input", self.input)

    @property
    def keeps_transposed_input(self) -> bool:
        """True if wgrad reads the input quantised along tokens instead of along K."""
        return self.wgrad == "fp4"

    def _check_fprop(self) -> None:
        widest = max(self.weight.bits, self.input.bits)
        needed = "fp4" if widest <= 4 else "fp8" if widest <= 8 else "bf16"
        if self.fprop != needed:
            raise ConfigError(
                f"linear.fprop: {self.fprop!r} does not fit weight.format "
                f"{self.weight.format_name!r} and input.format {self.input.format_name!r}; "
                f"these are multiplied as {needed!r}"
            )

    def _check_backward(
        self, gemm: str, arithmetic: Arithmetic, other_name: str, other: OperandSpec
    ) -> None:
        if arithmetic == "bf16":
            return
        needed_bits = {"fp4": range(1, 5), "fp8": range(5, 9)}[arithmetic]
        if self.grad_output.bits not in needed_bits:
            raise ConfigError(
                f"linear.{gemm}: {arithmetic!r} casts grad_output to a format of "
                f"{needed_bits[-1]} bits, but linear.grad_output.format is "
                f"{self.grad_output.format_name!r}; change one of the two"
            )
        if other.format is None:
            raise ConfigError(
                f"linear.{gemm}: {arithmetic!r} multiplies the codes of the {other_name}, but "
                f"linear.{other_name}.format is 'bf16'; use 'bf16' for {gemm}"
            )
        if arithmetic == "fp4" and other.bits > 4:
            raise ConfigError(
                f"linear.{gemm}: 'fp4' needs a 4-bit {other_name}, but linear.{other_name}.format "
                f"is {other.format_name!r}"
            )
