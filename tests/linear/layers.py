"""Layers, data and runs shared by the tests of the FP4 linear."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp4_plugin.linear import FP4Linear

__all__ = [
    "BACKWARDS",
    "Results",
    "backward_bytes",
    "gaussian",
    "make_layer",
    "make_section",
    "outlier_channels",
    "run_layer",
    "same_results",
]

# name -> (grad_output format, arithmetic of dgrad and wgrad)
BACKWARDS = {"bf16": ("bf16", "bf16"), "e5m2": ("e5m2", "fp8"), "e4m3": ("e4m3", "fp8")}


def make_section(
    *,
    estimator: str = "dge",
    alpha: float | None = 0.99,
    scope: str = "row",
    compensation: str | None = "sparse",
    backward: str = "e5m2",
    granularity: str = "row",
) -> dict[str, Any]:
    """An `fp4` section over the `paper` recipe; alpha None = no outlier handling."""
    grad_format, arithmetic = BACKWARDS[backward]
    outliers = {"alpha": alpha, "compensation": compensation, "scope": scope}
    weight = {"granularity": granularity}
    if estimator != "dge":
        weight["estimator"] = {"name": estimator}
    return {
        "recipe": "paper",
        "linear": {
            "weight": weight,
            "input": {"granularity": granularity, "outliers": None if alpha is None else outliers},
            "grad_output": {"format": grad_format},
            "dgrad": arithmetic,
            "wgrad": arithmetic,
        },
    }


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outlier_channels(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gaussian with eight channels (of K >= 8) 20 times larger."""
    x = gaussian(*shape, seed=seed)
    x[..., :: max(1, shape[-1] // 8)] *= 20
    return x


def make_layer(
    in_features: int,
    out_features: int,
    section: dict[str, Any],
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> FP4Linear:
    """An FP4Linear with reproducible Gaussian weights of the usual size."""
    linear = nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(gaussian(out_features, in_features, seed=101) / in_features**0.5)
        if linear.bias is not None:
            linear.bias.copy_(gaussian(out_features, seed=102))
    return FP4Linear.from_float(linear.to(dtype), copy.deepcopy(section))


@dataclass(frozen=True)
class Results:
    """What one forward and backward leave."""

    output: torch.Tensor
    grad_input: torch.Tensor | None
    grad_weight: torch.Tensor | None
    grad_bias: torch.Tensor | None


def run_layer(
    layer: nn.Module,
    x: torch.Tensor,
    grad_output: torch.Tensor,
    call: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Results:
    """One forward and backward of `call` (default: the layer) from fresh gradients."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = (call or layer)(x)
    output.backward(grad_output)
    grads = [
        None if p is None or p.grad is None else p.grad.clone() for p in (layer.weight, layer.bias)
    ]
    return Results(output.detach(), x.grad, *grads)


def same_results(a: Results, b: Results) -> bool:
    """Equal bits everywhere."""
    return all(
        (one is None and other is None) or torch.equal(one, other)
        for one, other in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@contextmanager
def _packed_tensors() -> Iterator[list[torch.Tensor]]:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def backward_bytes(
    call: Callable[[torch.Tensor], object], x: torch.Tensor, parameters: list[nn.Parameter]
) -> int:
    """Bytes of unique storages that a forward saves, parameters and their aliases excluded.

    x is an intermediate result here, as an activation is: saving it counts.
    """
    source = x.detach().requires_grad_()
    with _packed_tensors() as kept:
        result = call(source * 1.0)
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    assert result is not None  # the graph must live while addresses are compared
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known)
