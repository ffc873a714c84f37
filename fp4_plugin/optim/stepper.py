"""From parameters and their states to the pieces that a step works on, eagerly or compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch

from fp4_plugin.optim.arithmetic import Hyperparameters, TensorCoefficients, adamw
from fp4_plugin.optim.fused import backend_for
from fp4_plugin.optim.noise import NoiseTile
from fp4_plugin.optim.pieces import SCALE, Fields, for_each_piece
from fp4_plugin.optim.scratch import CompilerWorkspace, Scratch, max_blocks
from fp4_plugin.optim.state_format import StateFormat
from fp4_plugin.optim.states import EXP_AVG, EXP_AVG_SQ, MASTER
from fp4_plugin.optim.update import Formats, Noise, Piece, update_piece

__all__ = ["Stepper", "Work"]

# Each kind of state that is rounded stochastically draws its own bits.
_STREAMS = {EXP_AVG_SQ: 0, MASTER: 1, EXP_AVG: 2}
_CONSTANT = ("grad",)


@dataclass(frozen=True)
class Work:
    """One parameter that takes a step. param, grad: the same shape, any strides."""

    param: torch.Tensor
    grad: torch.Tensor
    state: Mapping[str, torch.Tensor]
    step: int


class Stepper:
    """Applies AdamW to parameters in place; what it holds is scratch memory only."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._noise = {name: NoiseTile(stream) for name, stream in _STREAMS.items()}
        self._compiled: Callable[..., None] | None = None

    def update(
        self,
        work: Iterable[Work],
        formats: Formats,
        hyperparameters: Callable[[int], Hyperparameters],
        compiled: bool,
    ) -> None:
        """One step of all of `work`; `hyperparameters` of the number of a step, from 1."""
        alike: dict[tuple[Any, ...], list[Work]] = {}
        for one in work:
            key = (one.step, one.param.device, one.param.dtype, one.grad.dtype)
            alike.setdefault(key, []).append(one)
        for (step, device, *_), those in alike.items():
            noise = self._noise_at(step, formats, device)
            self._update_alike(those, formats, hyperparameters(step), noise, compiled)

    def _update_alike(
        self,
        work: list[Work],
        formats: Formats,
        hyper: Hyperparameters,
        noise: Mapping[str, torch.Tensor],
        compiled: bool,
    ) -> None:
        coefficients = TensorCoefficients.of(hyper) if compiled else hyper
        update = adamw if compiled else backend_for(work[0].param.device).update

        def run(fields: Fields) -> None:
            piece = Piece(**fields)
            bits = Noise(**{name: tile[: len(piece.param)] for name, tile in noise.items()})
            if compiled:
                self._compile()(piece, formats, update, coefficients, bits, _COMPILER)
            else:
                update_piece(piece, formats, update, coefficients, bits, self._scratch)

        flat = [one.param.detach().reshape(-1).contiguous() for one in work]
        fields = [_fields(param, one, formats) for param, one in zip(flat, work, strict=True)]
        for_each_piece(fields, self._scratch, run, constant=_CONSTANT)
        for param, one in zip(flat, work, strict=True):
            if param.data_ptr() != one.param.data_ptr():  # a copy: the parameter has gaps
                one.param.copy_(param.view(one.param.shape))

    def _noise_at(
        self, step: int, formats: Formats, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return {
            name: self._noise[name].rows(step, fmt.dropped_bits, max_blocks(), device)
            for name, fmt in _kinds(formats).items()
            if fmt is not None and fmt.stochastic
        }

    def _compile(self) -> Callable[..., None]:
        if self._compiled is None:
            # Said of BF16 parameters with FP16 states, which are both read as float32.
            warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed in the scheduler")
            self._compiled = torch.compile(_copy_of(cast(FunctionType, update_piece)))
        return self._compiled


_COMPILER = CompilerWorkspace()


def _copy_of(function: FunctionType) -> FunctionType:
    """The compiler gives up on code that it has compiled eight times, so each has its own."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__)


def _kinds(formats: Formats) -> dict[str, StateFormat | None]:
    return {
        EXP_AVG: formats.exp_avg,
        EXP_AVG_SQ: formats.exp_avg_sq,
        MASTER: formats.master,
    }


def _fields(param: torch.Tensor, work: Work, formats: Formats) -> Fields:
    """Flat tensors by the names that `Piece` has for them; `param`: work.param, flat."""
    fields = {"param": param, "grad": work.grad.detach().reshape(-1).contiguous()}
    state = work.state
    for name, fmt in _kinds(formats).items():
        if name in state:
            fields[name] = (state[name] if fmt is None else fmt.storage(state[name])).view(-1)
        if name + SCALE in state:
            fields[name + SCALE] = state[name + SCALE]
    return fields
