"""AdamW itself, in float32, on float32 moments.

Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, with the bias corrections
of Kingma & Ba, "Adam", ICLR 2015:

    w <- w (1 - lr * weight_decay)
    m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
    w <- w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fp4_plugin.optim.workspace import Workspace

__all__ = ["Arithmetic", "Hyperparameters", "TensorCoefficients", "adamw", "fused_adamw"]


class Arithmetic(Protocol):
    """One step on float32 tensors of one shape, in place; `grad` stays as it is."""

    def __call__(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        coefficients: Any,
        workspace: Workspace,
    ) -> None: ...


@dataclass(frozen=True)
class Hyperparameters:
    """Those of one step; `step` from 1."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class TensorCoefficients:
    """What a compiled step multiplies with: what changes from step to step is a 0-dim tensor.

    A number would be compiled in, and compiled again in the next step.
    """

    beta1: float
    beta2: float
    eps: float
    decay: torch.Tensor
    step_size: torch.Tensor
    root_correction: torch.Tensor

    @classmethod
    def of(cls, hyper: Hyperparameters) -> TensorCoefficients:
        beta1, beta2 = hyper.betas
        return cls(
            beta1=beta1,
            beta2=beta2,
            eps=hyper.eps,
            decay=torch.tensor(1.0 - hyper.lr * hyper.weight_decay),
            step_size=torch.tensor(hyper.lr / (1.0 - beta1**hyper.step)),
            root_correction=torch.tensor(1.0 / math.sqrt(1.0 - beta2**hyper.step)),
        )


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    coefficients: TensorCoefficients,
    workspace: Workspace,
) -> None:
    """The formulas above, operation by operation: for a compiler to fuse."""
    c = coefficients
    m.lerp_(grad, 1.0 - c.beta1)
    v.mul_(c.beta2).addcmul_(grad, grad, value=1.0 - c.beta2)
    update = workspace.like(v, "shift", torch.float32)
    torch.sqrt(v, out=update)
    update.mul_(c.root_correction).add_(c.eps)
    torch.div(m, update, out=update)
    weight.mul_(c.decay)
    weight.sub_(update.mul_(c.step_size))


def fused_adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    coefficients: Hyperparameters,
    workspace: Workspace,
) -> None:
    """The same by the kernel of torch.optim.AdamW(fused=True): one pass instead of nine."""
    step = torch.tensor(float(coefficients.step), device=weight.device)
    torch._fused_adamw_(
        [weight],
        [grad],
        [m],
        [v],
        [],
        [step],
        lr=coefficients.lr,
        beta1=coefficients.betas[0],
        beta2=coefficients.betas[1],
        weight_decay=coefficients.weight_decay,
        eps=coefficients.eps,
        amsgrad=False,
        maximize=False,
    )
