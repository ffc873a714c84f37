"""From a parameter and its states to the pieces that a step works on, eagerly or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fp4_plugin.optim.noise import NoiseTile
from fp4_plugin.optim.scratch import CompilerWorkspace, Scratch, max_blocks, pieces
from fp4_plugin.optim.state_format import BLOCK_SIZE, StateFormat
from fp4_plugin.optim.states import EXP_AVG, EXP_AVG_SQ, MASTER, SCALE
from fp4_plugin.optim.update import Coefficients, Formats, Noise, Piece, update_piece

__all__ = ["Stepper"]

# Each kind of state that is rounded stochastically draws its own bits.
_STREAMS = {EXP_AVG_SQ: 0, MASTER: 1, EXP_AVG: 2}


class Stepper:
    """Applies AdamW to one parameter at a time; what it holds is scratch memory only."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._noise = {name: NoiseTile(stream) for name, stream in _STREAMS.items()}
        self._compiled: Callable[..., None] | None = None

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, Any],
        formats: Formats,
        step: int,
        coefficients: Coefficients,
        compiled: bool,
    ) -> None:
        """Change `param` and `state` in place. param, grad: the same shape, any strides."""
        flat = param.detach().reshape(-1)
        tensors = {name: value.view(-1) for name, value in state.items() if value.dim()}
        tensors |= {"param": flat, "grad": grad.detach().reshape(-1)}
        tiles = self._tiles(formats, step, flat.device)
        for elements, blocks, width in pieces(flat.numel(), flat.device):
            piece = Piece(
                **{
                    name: value[blocks].view(-1, 1)
                    if name.endswith(SCALE)
                    else value[elements].view(-1, width)
                    for name, value in tensors.items()
                }
            )
            rows = blocks.stop - blocks.start
            noise = Noise(**{name: tile[:rows, :width] for name, tile in tiles.items()})
            # The last, short block has another width, which is not worth compiling for.
            if compiled and width == BLOCK_SIZE:
                self._run_compiled(piece, formats, coefficients, noise)
            else:
                update_piece(piece, formats, coefficients, noise, self._scratch)
        if flat.data_ptr() != param.data_ptr():  # of a tensor that is not contiguous it is a copy
            param.copy_(flat.view(param.shape))

    def _tiles(self, formats: Formats, step: int, device: torch.device) -> dict[str, torch.Tensor]:
        kinds: dict[str, StateFormat | None] = {
            EXP_AVG: formats.exp_avg,
            EXP_AVG_SQ: formats.exp_avg_sq,
            MASTER: formats.master,
        }
        return {
            name: self._noise[name].rows(step, fmt.dropped_bits, max_blocks(device), device)
            for name, fmt in kinds.items()
            if fmt is not None and fmt.stochastic
        }

    def _run_compiled(
        self, piece: Piece, formats: Formats, coefficients: Coefficients, noise: Noise
    ) -> None:
        if self._compiled is None:
            self._compiled = torch.compile(update_piece)
        # As tensors: a number that changes would be compiled in, again in every step.
        varying = replace(
            coefficients,
            decay=torch.tensor(coefficients.decay),
            step_size=torch.tensor(coefficients.step_size),
            root_correction=torch.tensor(coefficients.root_correction),
        )
        self._compiled(piece, formats, varying, noise, _COMPILER)


_COMPILER = CompilerWorkspace()
