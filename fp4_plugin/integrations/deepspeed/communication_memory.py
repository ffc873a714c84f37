"""What the optional modes of gradient communication keep from step to step, and in checkpoints."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import torch

from fp4_plugin.checkpoint import write_safetensors
from fp4_plugin.comm.reducer import GradientReducer
from fp4_plugin.integrations.deepspeed.timeouts import device_of

__all__ = ["Memory"]

logger = logging.getLogger("fp4_plugin")

_FILE = "fp4_gradient_communication_rank_{rank:05d}.safetensors"
_RESIDUAL = "error_feedback."
_FACTOR = "automatic_factor"


class Memory:
    """The error feedback and the automatic factor of one engine; empty where both are off."""

    def __init__(self, engine: Any, reducer: GradientReducer, num_ranks: int) -> None:
        self._engine = weakref.proxy(engine)
        self._feedback = reducer.feedback
        self._factor = reducer.factor
        self._num_ranks = num_ranks
        self._loss_scale = self._current_loss_scale()

    def after_step(self, skipped: bool) -> None:
        """What was lost of a gradient carries its loss scale, and belongs to a step that counts."""
        before, self._loss_scale = self._loss_scale, self._current_loss_scale()
        if self._feedback is None:
            return
        if skipped:
            self._feedback.reset()
        elif self._loss_scale != before:
            self._feedback.rescale(self._loss_scale / before)

    def save(self, folder: Path) -> list[Path]:
        """Write a file of this rank to `folder`, if a mode is on; returns it. CheckpointError."""
        if self._feedback is None and self._factor is None:
            return []
        state: dict[str, torch.Tensor] = {}
        if self._feedback is not None:
            residuals = self._feedback.residuals
            state |= {_RESIDUAL + name: one for name, one in residuals.items()}
        if self._factor is not None:
            state[_FACTOR] = torch.tensor(self._factor.value)
        path = self._path(folder)
        write_safetensors(path, state, {"ranks": str(self._num_ranks)})
        return [path]

    def load(self, folder: Path) -> None:
        """Take back from `folder` what `save` wrote; without a file that fits, start anew."""
        self._loss_scale = self._current_loss_scale()
        if self._feedback is None and self._factor is None:
            return
        problem = self._load(self._path(folder))
        if problem is None:
            return
        if self._feedback is not None:
            self._feedback.reset()
        logger.warning("fp4: error feedback and automatic factor start anew: %s", problem)

    def _load(self, path: Path) -> str | None:
        from safetensors import SafetensorError, safe_open

        device = device_of(self._engine)
        try:
            with safe_open(path, "pt") as file:
                saved_ranks = (file.metadata() or {}).get("ranks")
                if saved_ranks != str(self._num_ranks):
                    return f"{path} was saved by {saved_ranks} ranks, these are {self._num_ranks}"
                state = {key: file.get_tensor(key) for key in file.keys()}
            if self._factor is not None:
                self._factor.restore(state[_FACTOR].item(), device)
            if self._feedback is not None:
                residuals = {
                    key.removeprefix(_RESIDUAL): one
                    for key, one in state.items()
                    if key.startswith(_RESIDUAL)
                }
                self._feedback.load(residuals, device)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            return f"cannot use {path}: {error}"
        return None

    def _path(self, folder: Path) -> Path:
        return folder / _FILE.format(rank=self._engine.global_rank)

    def _current_loss_scale(self) -> float:
        """1 where the optimizer scales no loss."""
        return float(getattr(self._engine.optimizer, "loss_scale", None) or 1.0)
