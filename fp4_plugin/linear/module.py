"""FP4Linear: an nn.Linear whose three GEMMs run as its LinearSpec says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fp4_plugin.errors import ConfigError
from fp4_plugin.linear.function import LayerRun, fp4_linear
from fp4_plugin.linear.spec import LinearSpec

__all__ = ["FP4Linear"]


class SpecSource(Protocol):
    """A parsed configuration: Fp4Config, which lies above this layer."""

    def linear_spec(self, name: str) -> LinearSpec | None: ...


Section = Mapping[str, Any] | SpecSource


def _spec_of(section: Section) -> LinearSpec:
    # The one place below the edge that accepts JSON, because the constructor is public.
    from fp4_plugin.config import parse_section

    config = parse_section(section) if isinstance(section, Mapping) else section
    spec = config.linear_spec("")
    if spec is None:
        raise ConfigError(
            "this section leaves linear layers in high precision (recipe 'bf16', or enabled is "
            "false): there is nothing to make an FP4Linear of"
        )
    return spec


class FP4Linear(nn.Linear):
    """Parameters, state-dict keys and dtype are those of the nn.Linear it was made from.

    `fp4` holds the spec and the record of what ran. Build one with `from_float`, or turn the
    linears of a whole model with `fp4_plugin.convert_to_fp4`.
    """

    fp4: LayerRun

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        section: Section | None = None,
    ) -> None:
        """As nn.Linear; `section` as in `from_float`, by default the `paper` recipe."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self.fp4 = LayerRun(name="", spec=_spec_of(section or {}))

    @classmethod
    def from_float(cls, linear: nn.Linear, section: Section) -> FP4Linear:
        """A new module with the Parameters of `linear`, which itself stays as it is.

        section: the dict under "fp4", or a parsed Fp4Config. Raises ConfigError for a section
        that is wrong, or whose recipe leaves linears in high precision.
        """
        has_bias = linear.bias is not None
        sizes = (linear.in_features, linear.out_features)
        module = cls(*sizes, has_bias, "meta", linear.weight.dtype, section=section)
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    @classmethod
    def from_run(cls, linear: nn.Linear, run: LayerRun) -> FP4Linear:
        """Turn `linear` itself into an FP4Linear, in place.

        The class is swapped, so Parameter objects, hooks and references held by optimisers,
        ZeRO and parent modules stay what they are. Weight values are not read.
        """
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.fp4 = run
        return linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return fp4_linear(input, self.weight, self.bias, self.fp4)

    def extra_repr(self) -> str:
        spec = self.fp4.spec
        formats = (spec.weight.format_name, spec.input.format_name, spec.grad_output.format_name)
        clamped = f", alpha={spec.outliers.alpha}" if spec.outliers else ""
        return (
            f"{super().extra_repr()}, w/x/g={'/'.join(formats)}, "
            f"fprop/dgrad/wgrad={spec.fprop}/{spec.dgrad}/{spec.wgrad}{clamped}, "
            f"estimator={spec.estimator}"
        )
