"""Which code does the float32 AdamW in the middle of a step.

A step decodes the states of a piece to float32, updates, and encodes. torch has a kernel for the
update; apex and Transformer Engine have others, which `fp4_plugin.integrations.fused_adam` offers.
All that are registered are tried once per process and device, on a piece of their own: results that
differ from torch's operations by more than MAX_ERROR refuse a backend, with a warning; of the
others the fastest is chosen.

On a CPU it is always torch's kernel, and nothing is tried. The rest has not run on a GPU so far:
the tests use kernels that run on a CPU in the place of those that do not.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fp4_plugin.optim.arithmetic import (
    Arithmetic,
    Hyperparameters,
    TensorCoefficients,
    adamw,
    fused_adamw,
)
from fp4_plugin.optim.scratch import Scratch
from fp4_plugin.optim.workspace import Workspace
from fp4_plugin.registry import Registry

__all__ = [
    "BACKENDS",
    "MAX_ERROR",
    "OPERATIONS",
    "TORCH_FUSED",
    "Backend",
    "Choice",
    "backend_for",
    "choose",
    "largest_error",
]

# Relative, of any element of the weight and both moments.
MAX_ERROR = 1e-6
OPERATIONS = "torch operations"
TORCH_FUSED = "torch fused"

_TRIAL_NUMEL = 1 << 20
_TRIAL_REPEATS = 5
_BETAS = (0.9, 0.95)


def _always(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """update: takes Hyperparameters. unavailable: why it is not on a device, or None."""

    update: Arithmetic
    unavailable: Callable[[torch.device], str | None] = _always


@dataclass(frozen=True)
class Choice:
    """reason: a sentence for the manifest and `fp4 doctor`. refused: backend -> why not."""

    name: str
    update: Arithmetic
    reason: str
    refused: dict[str, str]


def _operations(
    weight: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    coefficients: Hyperparameters,
    workspace: Workspace,
) -> None:
    adamw(weight, grad, m, v, TensorCoefficients.of(coefficients), workspace)


BACKENDS: Registry[Backend] = Registry("AdamW backend")
# Runs on every device, and says what the others must compute.
BACKENDS.register(OPERATIONS, Backend(_operations))
BACKENDS.register(TORCH_FUSED, Backend(fused_adamw))

_CHOSEN: dict[torch.device, Choice] = {}


def backend_for(device: torch.device) -> Choice:
    """The choice for `device`, made at the first call."""
    if device not in _CHOSEN:
        _CHOSEN[device] = _on_cpu() if device.type == "cpu" else choose(device)
    return _CHOSEN[device]


def _on_cpu() -> Choice:
    reason = "AdamW on cpu: torch fused, as always on a CPU"
    return Choice(TORCH_FUSED, BACKENDS[TORCH_FUSED].update, reason, {})


def choose(device: torch.device, names: Iterable[str] | None = None) -> Choice:
    """Try torch's operations and the backends `names` (default: all) on `device` now.

    Warns of a backend that calls itself available and gives wrong results or raises.
    """
    seconds = {OPERATIONS: _seconds(BACKENDS[OPERATIONS], device)}
    refused = {}
    for name in BACKENDS if names is None else names:
        reason = BACKENDS[name].unavailable(device) or _fault(name, device)
        if reason is not None:
            refused[name] = reason
        elif name != OPERATIONS:
            seconds[name] = _seconds(BACKENDS[name], device)
    best = min(seconds, key=seconds.__getitem__)
    measured = ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in seconds.items())
    reason = f"AdamW on {device}: {best}, the fastest on {_TRIAL_NUMEL:,} elements ({measured})"
    if refused:
        reason += "; not used: " + ", ".join(f"{name} ({why})" for name, why in refused.items())
    return Choice(best, BACKENDS[best].update, reason, refused)


def _fault(name: str, device: torch.device) -> str | None:
    """What is wrong with a backend, also as a warning, or None."""
    try:
        error = largest_error(BACKENDS[name], device)
    # Foreign code on foreign hardware: whatever it raises, torch's operations are there.
    except Exception as raised:
        said = f"it raises {type(raised).__name__}: {raised}"
    else:
        if error <= MAX_ERROR:
            return None
        said = f"its results are off by {error:.1e} relative, more than {MAX_ERROR:g}"
    warnings.warn(f"AdamW by {name} on {device} is not used: {said}", RuntimeWarning, stacklevel=3)
    return said


def largest_error(backend: Backend, device: torch.device) -> float:
    """Largest relative difference of an element from torch's operations; inf if one is NaN."""
    largest, scratch = 0.0, Scratch()
    for step in (1, 1000):
        hyper = Hyperparameters(step, 1e-2, _BETAS, 1e-8, 0.1)
        for size, start in ((1.0, 0.0), (1e-6, 0.0), (1.0, 1.0)):
            ours = _trial_tensors(size, start, step, device)
            weight, grad, m, v = exact = [tensor.clone() for tensor in ours]
            _operations(weight, grad, m, v, hyper, scratch)
            backend.update(*ours, hyper, scratch)
            for value, expected in zip(ours, exact, strict=True):
                error = float(((value - expected).abs() / expected.abs()).max())
                largest = max(largest, error if math.isfinite(error) else math.inf)
    return largest


Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _trial_tensors(size: float, weight: float, step: int, device: torch.device) -> Four:
    """Random weight, gradient and moments, without cancellation in any sum.

    Elementwise errors are then those of rounding. Gradient and moment have the same sign, opposite
    to the weight's, which is 0 or at least 1. Before the first step there are no moments.
    """
    generator = torch.Generator().manual_seed(step)

    def magnitudes() -> torch.Tensor:
        return 0.1 + torch.rand(_TRIAL_NUMEL, generator=generator)

    sign = torch.randint(0, 2, (_TRIAL_NUMEL,), generator=generator).mul_(2).sub_(1)
    moment = 0.0 if step == 1 else size
    return (
        (-weight * (1 + magnitudes()) * sign).to(device),
        (size * magnitudes() * sign).to(device),
        (moment * magnitudes() * sign).to(device),
        (moment * magnitudes()).square().to(device),
    )


def _seconds(backend: Backend, device: torch.device) -> float:
    """Median of a step, without the first."""
    tensors, scratch = _trial_tensors(1.0, 1.0, 1000, device), Scratch()
    hyper = Hyperparameters(1000, 0.0, _BETAS, 1e-8, 0.0)
    found = []
    for _ in range(_TRIAL_REPEATS + 1):
        _synchronize(device)
        start = time.perf_counter()
        backend.update(*tensors, hyper, scratch)
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
