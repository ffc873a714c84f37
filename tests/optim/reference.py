"""AdamW written out in float64, and the small jobs that the tests of the optimiser share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from fp4_plugin.optim import STATE_FORMATS, StateFormat
from fp4_plugin.optim.states import decode_tensor, encode_tensor

__all__ = [
    "SCALES",
    "adamw_float64",
    "by_scale",
    "decode_tensor",
    "encode_tensor",
    "gradients",
    "relative",
    "replaced",
    "run",
]

# Gradients of these sizes lie side by side in every block.
SCALES = [10.0**exponent for exponent in range(1, -8, -1)]


def adamw_float64(
    weight: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.Tensor:
    """Loshchilov & Hutter, algorithm 2, step by step; no step where the gradient is None."""
    beta1, beta2 = betas
    theta = weight.double()
    m, v, t = torch.zeros_like(theta), torch.zeros_like(theta), 0
    for grad in grads:
        if grad is None:
            continue
        g, t = grad.double(), t + 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        theta = theta - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * theta)
    return theta


def gradients(kind: str, scales: Sequence[float], steps: int, numel: int) -> list[torch.Tensor]:
    """Normal numbers times scales[i % len(scales)].

    kind: "random" anew in each step, "steady" the same in all, "noisy" steady with 30 % noise.
    """
    generator = torch.Generator().manual_seed(7)
    scale = torch.tensor(scales)[torch.arange(numel) % len(scales)]
    steady = torch.randn(numel, generator=generator)
    weights = {"random": (0.0, 1.0), "steady": (1.0, 0.0), "noisy": (1.0, 0.3)}[kind]
    return [
        scale * (weights[0] * steady + weights[1] * torch.randn(numel, generator=generator))
        for _ in range(steps)
    ]


def run(
    make: Callable[[list[torch.nn.Parameter]], Optimizer],
    weight: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """The parameter that starts as `weight` after one step for each of `grads`."""
    param = torch.nn.Parameter(weight.clone())
    optimizer = make([param])
    for grad in grads:
        param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return param.detach()


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def by_scale(value: torch.Tensor, expected: torch.Tensor, scales: Sequence[float]) -> list[float]:
    """`relative` for each of the scales of `gradients`."""
    count = len(scales)
    return [relative(value[i::count], expected[i::count]) for i in range(count)]


@contextlib.contextmanager
def replaced(name: str, fmt: StateFormat) -> Iterator[None]:
    """The registered format `name` is `fmt`: to see that a test notices a worse one."""
    original = STATE_FORMATS[name]
    STATE_FORMATS.unregister(name)
    STATE_FORMATS.register(name, fmt)
    try:
        yield
    finally:
        STATE_FORMATS.unregister(name)
        STATE_FORMATS.register(name, original)
