"""Time and bytes of a step by all contenders in turn, in one process, on the same gradients.

A repeat calls every contender once; the next one starts with the next contender, so that none
always follows the same other. Contenders of one type share parameters: what they hold matters to no
time, and memory is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from fp4_plugin.bench.optim.contenders import Contender
from fp4_plugin.bench.optim.settings import tensor_shapes

__all__ = [
    "WARMUP_REPEATS",
    "Measured",
    "StepMemory",
    "measure_steps",
    "owned_bytes",
    "parameters",
]

# The first step makes the states and compiles; the second finds both there.
WARMUP_REPEATS = 2
_GRADIENT_SIZE = 1e-3


@dataclass(frozen=True)
class StepMemory:
    """Bytes beside parameters, gradients and states.

    kept: what stays between steps: scratch memory, and what a compiler made for these sizes. step:
    what a step takes on top of that while it runs.
    """

    kept: int
    step: int


@dataclass(frozen=True)
class Measured:
    """One contender at one size. seconds: of each repeat. Bytes: as of `owned_bytes`.

    memory: None if it was not measured.
    """

    label: str
    numel: int
    tensors: int
    seconds: tuple[float, ...]
    owned_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    memory: StepMemory | None = None

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def parameters(numel: int, tensors: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """With gradients."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in tensor_shapes(numel, tensors):
        param = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        grad = torch.randn(shape, generator=generator).mul_(_GRADIENT_SIZE)
        param.grad = grad.to(dtype)
        params.append(param)
    return params


def owned_bytes(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> int:
    """Bytes of the states, and of float32 parameters, which are their own master weights."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    tensors += [param for param in params if param.dtype == torch.float32]
    return sum(map(_storage_bytes, filter(torch.is_tensor, tensors)))


def _storage_bytes(tensor: torch.Tensor) -> int:
    """Also of a tensor made of tensors, as torchao's states are."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_storage_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def measure_steps(
    contenders: Sequence[Contender],
    numel: int,
    tensors: int,
    repeats: int,
    after_step: Callable[[], object],
) -> list[Measured]:
    """All `contenders`, which must be available, at one size."""
    params = {one.dtype: parameters(numel, tensors, one.dtype) for one in contenders}
    optimizers = [one.make(params[one.dtype]) for one in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(repeats + WARMUP_REPEATS):
        for offset in range(len(contenders)):
            index = (number + offset) % len(contenders)
            start = time.perf_counter()
            optimizers[index].step()
            seconds[index].append(time.perf_counter() - start)
            after_step()
    return [
        Measured(
            one.label,
            numel,
            tensors,
            tuple(seconds[index][WARMUP_REPEATS:]),
            owned_bytes(optimizers[index], params[one.dtype]),
            sum(map(_storage_bytes, params[one.dtype])),
            sum(
                _storage_bytes(param.grad) for param in params[one.dtype] if param.grad is not None
            ),
        )
        for index, one in enumerate(contenders)
    ]
