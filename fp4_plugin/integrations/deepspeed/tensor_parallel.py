"""FP4 forms of the linears that AutoTP builds (deepspeed/module_inject/layers.py).

A column-parallel layer computes

    input -> identity (all-reduce in backward) -> matmul(input, weight^T) -> + bias [-> gather]

and a row-parallel one

    input -> matmul(input, weight^T) -> all-reduce (identity in backward) -> + bias

An FP4 form is a subclass that runs DeepSpeed's own forward and substitutes the one matmul in it,
so that its collectives, their order and whatever else the method does stay DeepSpeed's. If the
method does not multiply by its weight exactly once, the layer raises instead of guessing.

Numbers: an output channel's scale is that of its shard (the whole row of W for column-parallel, K
columns of it for row-parallel), and a row-parallel layer clamps and scales its own shard of a
token. A row-parallel FP4 layer under TP is therefore not bit-equal to the unsharded one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.module_inject import layers
from deepspeed.module_inject.layers import (
    LinearAllreduce,
    LinearLayer,
    LmHeadLinearAllreduce,
    TensorParallel_Layer,
)
from torch import nn
from torch.overrides import TorchFunctionMode

from fp4_plugin.errors import UnsupportedError
from fp4_plugin.linear.function import LayerRun, fp4_linear
from fp4_plugin.linear.module import FP4Linear

__all__ = ["FP4TensorParallel", "fp4_forms", "keep_fp4"]

# VocabParallelLinear came with 0.19.
_HEADS = (LmHeadLinearAllreduce, *filter(None, [getattr(layers, "VocabParallelLinear", None)]))
_forms: dict[type[nn.Module], type[nn.Module]] = {}


def fp4_forms(model: nn.Module) -> dict[type[nn.Module], type[nn.Module]]:
    """Class in `model` -> the class it becomes: nn.Linear and each AutoTP linear that occurs.

    Raises UnsupportedError for an AutoTP linear of another kind, which could not be converted.
    """
    forms: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FP4Linear, FP4Linear: FP4Linear}
    for name, module in model.named_modules():
        kind = type(module)
        if not isinstance(module, TensorParallel_Layer) or isinstance(module, _HEADS):
            continue
        if isinstance(module, (LinearLayer, LinearAllreduce)):
            forms[kind] = _fp4_form(kind)
        elif getattr(module, "weight", None) is not None and _multiplies(module):
            raise UnsupportedError(
                f"tensor_parallel.autotp_size: AutoTP made {name!r} a {kind.__name__}, for which "
                "there is no FP4 form; supported are LinearLayer and LinearAllreduce"
            )
    return forms


def keep_fp4(before: nn.Module, after: nn.Module) -> None:
    """Make what AutoTP built of an FP4 layer the FP4 layer that it was, with the record it had.

    before: a layer that `convert_to_fp4` converted ahead of `deepspeed.initialize`. A DeepSpeed
    with patches/deepspeed-0.19.patch calls this. Raises UnsupportedError where there is no form.
    """
    run = getattr(before, "fp4", None)
    if not isinstance(run, LayerRun):
        return
    form = fp4_forms(after).get(type(after))
    if form is None:
        raise UnsupportedError(
            f"{run.name}: AutoTP made this FP4 layer a {type(after).__name__}, for which there is "
            "no FP4 form; supported are LinearLayer and LinearAllreduce"
        )
    form.from_run(after, run)  # type: ignore[attr-defined]


def _multiplies(module: nn.Module) -> bool:
    """Whether an AutoTP layer is a linear, not an embedding or a norm."""
    return "linear" in type(module).__name__.lower()


def _fp4_form(kind: type[nn.Module]) -> type[nn.Module]:
    """The FP4 subclass of `kind`; layers of one kind share it."""
    if kind not in _forms:
        _forms[kind] = type(f"FP4{kind.__name__}", (FP4TensorParallel, kind), {})
    return _forms[kind]


class FP4TensorParallel(nn.Module):
    """Mixed in before an AutoTP linear; `fp4` holds the spec and the record of what ran."""

    fp4: LayerRun

    @classmethod
    def from_run(cls, linear: nn.Module, run: LayerRun) -> FP4TensorParallel:
        """Turn `linear` itself into this class; parameters and hooks stay what they are."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.fp4 = run
        return linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, torch.Tensor)

        def multiply(local_input: torch.Tensor) -> torch.Tensor:
            return fp4_linear(local_input, weight, None, self.fp4)

        with _SubstituteMatmul(weight, multiply) as substitute:
            output: torch.Tensor = super().forward(input)
        if substitute.count != 1:
            raise UnsupportedError(
                f"{self.fp4.name}: {type(self).__name__} multiplied by its weight "
                f"{substitute.count} times, expected once; this version of DeepSpeed computes it "
                "in a way that fp4_plugin does not know"
            )
        return output


class _SubstituteMatmul(TorchFunctionMode):
    """Inside the block, torch.matmul(x, weight.transpose(-1, -2)) is `multiply(x)`."""

    def __init__(
        self, weight: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.count = 0
        self._weight = weight
        self._multiply = multiply
        self._transposed: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.matmul and len(args) == 2 and args[1] is self._transposed:
            self.count += 1
            return self._multiply(args[0])
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.transpose and args[0] is self._weight:
            self._transposed = result
        return result
