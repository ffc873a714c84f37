"""One AdamW step on one piece of a tensor: decode the states, update in float32, encode them.

    codes, scales --decode--> m, v (float32) --AdamW with grad--> m, v, weight --encode--> codes

A piece holds so few elements that its float32 copies stay in the cache; the same function is run
eagerly and compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp4_plugin.optim.arithmetic import Arithmetic
from fp4_plugin.optim.state_format import StateFormat
from fp4_plugin.optim.workspace import Workspace

__all__ = ["Formats", "Noise", "Piece", "update_piece"]


@dataclass(frozen=True)
class Formats:
    """Storage of the two moments, and of the master weight (None: float32)."""

    exp_avg: StateFormat
    exp_avg_sq: StateFormat
    master: StateFormat | None = None


@dataclass
class Piece:
    """Views into a tensor and its states, (blocks, width) each, scales (blocks, 1).

    master is None where the parameter itself is float32; master_scale is None for a float32 master.
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_scale: torch.Tensor
    exp_avg_sq: torch.Tensor
    exp_avg_sq_scale: torch.Tensor
    master: torch.Tensor | None = None
    master_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Noise:
    """Bits for stochastic rounding, of the shape of the piece; None rounds to nearest."""

    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    master: torch.Tensor | None = None


def update_piece(
    piece: Piece,
    formats: Formats,
    adamw: Arithmetic,
    coefficients: Any,
    noise: Noise,
    workspace: Workspace,
) -> None:
    """Update parameter, master and states of `piece` in place; `coefficients` are for `adamw`."""
    m = workspace.like(piece.param, "exp_avg", torch.float32)
    v = workspace.like(piece.param, "exp_avg_sq", torch.float32)
    formats.exp_avg.decode(piece.exp_avg, piece.exp_avg_scale, m, workspace)
    formats.exp_avg_sq.decode(piece.exp_avg_sq, piece.exp_avg_sq_scale, v, workspace)
    grad = piece.grad
    if grad.dtype != torch.float32:
        grad = workspace.like(grad, "grad", torch.float32)
        grad.copy_(piece.grad)
    weight = _weight(piece, formats, workspace)
    adamw(weight, grad, m, v, coefficients, workspace)
    formats.exp_avg.encode(m, piece.exp_avg, piece.exp_avg_scale, noise.exp_avg, workspace)
    formats.exp_avg_sq.encode(
        v, piece.exp_avg_sq, piece.exp_avg_sq_scale, noise.exp_avg_sq, workspace
    )
    if piece.master is None:
        return
    if formats.master is not None:
        assert piece.master_scale is not None
        formats.master.encode(weight, piece.master, piece.master_scale, noise.master, workspace)
        # The parameter is the stored master, rounded: the same before and after a resume.
        formats.master.decode(piece.master, piece.master_scale, weight, workspace)
    piece.param.copy_(weight)


def _weight(piece: Piece, formats: Formats, workspace: Workspace) -> torch.Tensor:
    """The float32 weight to update: in place, except where it is stored in fewer bits."""
    if piece.master is None:
        return piece.param
    if formats.master is None:
        return piece.master
    assert piece.master_scale is not None
    weight = workspace.like(piece.param, "weight", torch.float32)
    formats.master.decode(piece.master, piece.master_scale, weight, workspace)
    return weight
