"""ColumnParallelLinear and RowParallelLinear whose GEMMs run in FP4.

An FP4 form is a subclass that replaces `_forward_impl`, the product between Megatron's own
communication; parameters, state-dict names, sharded checkpoints and everything else stay
Megatron's.

    column   W (N / ranks, K)   rows of x and W are whole; rows of grad_output are cut
    row      W (N, K / ranks)   rows of x and W are cut; the output is a sum over ranks

With shared scales a cut row has the scale and the clamping thresholds of the whole one, so that
numbers do not depend on the number of ranks; `Shards` says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from fp4_plugin.errors import UnsupportedError
from fp4_plugin.integrations.megatron.collectives import (
    from_first_rank,
    gather_sequence,
    gathered_shape,
    sum_gradient,
)
from fp4_plugin.linear.function import LayerRun, fp4_linear
from fp4_plugin.linear.gathered import can_gather, gather_input
from fp4_plugin.linear.operand import as_rows, quantize_input
from fp4_plugin.linear.shards import Shards, sums_over

__all__ = ["FP4ColumnParallelLinear", "FP4RowParallelLinear", "TensorParallel", "fp4_forms"]


@dataclass(frozen=True)
class TensorParallel:
    """The section's "tensor_parallel": scales of whole rows, and sums that are exact as well."""

    shared_scales: bool = True
    exact: bool = False


class _FP4TensorParallel(nn.Module):
    """Mixed in before a linear of Megatron; `fp4` holds the spec and the record of what ran."""

    fp4: LayerRun
    tp_group: dist.ProcessGroup
    _cut: Literal["n", "k"]

    @classmethod
    def from_run(
        cls, linear: nn.Module, run: LayerRun, settings: TensorParallel
    ) -> _FP4TensorParallel:
        """Turn `linear` itself into this class; parameters and hooks stay what they are."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.fp4 = run
        if not hasattr(linear, "tp_group"):  # Megatron before 0.13
            linear.tp_group = _tensor_parallel_group(linear)
        group = linear.tp_group
        needs_shards = group.size() > 1 and settings.shared_scales
        if needs_shards or settings.exact:
            run.shards = Shards(cls._cut, group, settings.exact)
        return linear

    # Megatron 0.12 and 0.13 assign their function to this name in every forward: a property with
    # a setter that does nothing stays where a method would be hidden.
    @property
    def _forward_impl(self) -> Any:
        return self._multiply

    @_forward_impl.setter
    def _forward_impl(self, value: Any) -> None:
        pass

    def _multiply(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: Any = None,
        **_others: Any,
    ) -> torch.Tensor:
        """Takes what Megatron's linear_with_grad_accumulation_and_async_allreduce takes.

        input: (S, B, K), or (S / ranks, B, K) with sequence parallelism -> (S, B, N).
        """
        if grad_output_buffer is not None:
            raise UnsupportedError(
                f"{self.fp4.name}: defer_embedding_wgrad_compute computes weight gradients outside "
                "of the layer, which an FP4 layer cannot do; it is for the output layer alone"
            )
        group = self.tp_group
        quantized = None
        if sequence_parallel and can_gather(self.fp4.spec):
            with torch.no_grad():
                part = quantize_input(as_rows(input), self.fp4.spec, self.fp4.shards)
                quantized = gather_input(part, group)
            input = gathered_shape(input, group)
        elif sequence_parallel:
            input = gather_sequence(input, group)
        elif allreduce_dgrad:
            input = sum_gradient(input, group)
        if gradient_accumulation_fusion and weight.requires_grad:
            weight = _into_main_grad(weight)
        output = fp4_linear(input, weight, bias, self.fp4, quantized)
        if sums_over(self.fp4.shards) is not None:
            output = from_first_rank(output, group)
        return output


def _tensor_parallel_group(linear: nn.Module) -> dist.ProcessGroup:
    if linear.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


class FP4ColumnParallelLinear(_FP4TensorParallel, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear with FP4 GEMMs."""

    _cut = "n"


class FP4RowParallelLinear(_FP4TensorParallel, RowParallelLinear):
    """Megatron's RowParallelLinear with FP4 GEMMs."""

    _cut = "k"


@dataclass(frozen=True)
class _Form:
    """What `apply_plan` makes of a linear: the class, and how it is to treat its shards."""

    kind: type[_FP4TensorParallel]
    settings: TensorParallel

    def from_run(self, linear: nn.Module, run: LayerRun) -> nn.Module:
        return self.kind.from_run(linear, run, self.settings)


def fp4_forms(settings: TensorParallel) -> dict[type[nn.Module], Any]:
    """Class of a linear of Megatron -> its FP4 form."""
    return {
        ColumnParallelLinear: _Form(FP4ColumnParallelLinear, settings),
        RowParallelLinear: _Form(FP4RowParallelLinear, settings),
    }


def _into_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, whose gradient is added to weight.main_grad instead of becoming weight.grad."""
    result: torch.Tensor = _IntoMainGrad.apply(weight)
    return result


class _IntoMainGrad(torch.autograd.Function):
    """Megatron's gradient_accumulation_fusion, by two operations instead of one kernel."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        weight = ctx.weight
        weight.main_grad.add_(grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # DistributedDataParallel takes this for "done", and needs some gradient for its hook.
        weight.grad_added_to_main_grad = True
        is_read = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if is_read else torch.empty_like(weight)
