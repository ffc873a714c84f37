"""Communication around an FP4 GEMM under tensor parallelism, with its other direction in backward.

Megatron has the same functions, but their signatures change from version to version.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["from_first_rank", "gather_sequence", "gathered_shape", "sum_gradient"]

Group = dist.ProcessGroup


def sum_gradient(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x as it is; its gradient is summed over the ranks, each of which has some outputs."""
    result: torch.Tensor = _SumGradient.apply(x, group)
    return result


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x: (S / ranks, ...) -> (S, ...); each rank gets the sum of the gradients of its part."""
    result: torch.Tensor = _GatherSequence.apply(x, group)
    return result


def gathered_shape(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`gather_sequence` for who knows the values already: nothing is sent, all elements are one.

    The gradient is that of `gather_sequence`.
    """
    result: torch.Tensor = _GatheredShape.apply(x, group)
    return result


def from_first_rank(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x on the first rank, zeros on the others: a later sum over the ranks has the bits of x.

    For an x that is whole on every rank already; the gradient is that of the sum.
    """
    result: torch.Tensor = _FromFirstRank.apply(x, group)
    return result


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None


class _GatheredShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        whole = (x.shape[0] * group.size(), *x.shape[1:])
        return x.new_zeros(()).expand(whole)

    backward = _GatherSequence.backward


class _FromFirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view_as(x) if group.rank() == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
