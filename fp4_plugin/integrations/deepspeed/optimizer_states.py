"""The 16-bit optimizer states of one engine: attached, verified, accounted for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fp4_plugin.errors import MismatchError, NotRunYet
from fp4_plugin.integrations.deepspeed.optimizer_access import decode_accesses
from fp4_plugin.integrations.deepspeed.optimizer_section import SETTINGS
from fp4_plugin.optim import STATE_FORMATS, FP16StateAdamW
from fp4_plugin.optim.fused import backend_for

__all__ = ["EngineOptimizerStates", "attach_optimizer_states", "sizes_of"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def attach_optimizer_states(
    engine: Any, asked: Mapping[str, Any] | None
) -> EngineOptimizerStates | None:
    """Serve the states of `engine` if FP16StateAdamW steps it; None if nobody asked for that.

    asked: the resolved "optimizer_states". Raises MismatchError if they were asked for and another
    optimizer steps the engine.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if isinstance(optimizer, FP16StateAdamW):
        decode_accesses(engine, optimizer)
    elif asked is None:
        return None
    states = EngineOptimizerStates(engine, asked)
    states.verify()
    return states


class EngineOptimizerStates:
    """What the manifest says of the states, and the proof that they are what was asked for."""

    def __init__(self, engine: Any, asked: Mapping[str, Any] | None) -> None:
        # Weakly: the engine's module is the key of a registry that leads here.
        self._engine_ref = weakref.ref(engine)
        self._asked = asked

    @property
    def _engine(self) -> Any:
        engine = self._engine_ref()
        if engine is None:
            raise NotRunYet("the engine whose optimizer states were kept no longer exists")
        return engine

    def verify(self) -> None:
        """Raise MismatchError unless states are stored as asked, as far as there are any yet."""
        optimizer = getattr(self._engine, "basic_optimizer", None)
        if optimizer is None:
            return
        if not isinstance(optimizer, FP16StateAdamW):
            raise MismatchError(
                f'"optimizer_states" was asked for, but the engine is stepped by '
                f"{type(optimizer).__name__}, which keeps its states in its own way"
            )
        expected = self._settings(optimizer)
        for group in optimizer.param_groups:
            found = {key: group[key] for key in SETTINGS}
            if found != dict(expected):
                raise MismatchError(f"optimizer states: asked for {expected}, configured {found}")
        for name in _MOMENTS:
            wanted = STATE_FORMATS[expected[name]].dtype
            kept = {state[name].dtype for state in optimizer.state.values() if name in state}
            if kept - {wanted}:
                raise MismatchError(f"{name} is kept as {kept}, not as {wanted}")
        if self._num_steps() > 0 and not optimizer.state and _trains(self._engine):
            raise MismatchError("FP16StateAdamW has kept no state in a step: something else steps")

    def report(self) -> dict[str, Any]:
        """The entry of the manifest; bytes are those of this rank."""
        optimizer = getattr(self._engine, "basic_optimizer", None)
        if optimizer is None:
            return {"state": "not applied: this engine has no optimizer", "asked": self._asked}
        settings = self._settings(optimizer)
        report = {
            "state": "active" if optimizer.state else "idle: no step has been made yet",
            "asked": dict(settings),
            "asked_by": "the optimizer" if self._asked is None else "the section",
        }
        return {**report, **sizes_of(optimizer)}

    def _settings(self, optimizer: FP16StateAdamW) -> Mapping[str, Any]:
        if self._asked is not None:
            return self._asked
        return {key: optimizer.param_groups[0][key] for key in SETTINGS}

    def _num_steps(self) -> int:
        return int(self._engine.global_steps - self._engine.skipped_steps)


def _trains(engine: Any) -> bool:
    return any(parameter.requires_grad for parameter in engine.module.parameters())


def sizes_of(optimizer: FP16StateAdamW) -> dict[str, Any]:
    """For the manifest: bytes of states, and of master weights, which are what it steps."""
    masters = [value for value in optimizer.state if isinstance(value, torch.Tensor)]
    count = sum(master.numel() for master in masters)
    by_kind = {
        **optimizer.state_nbytes(),
        "master_weights": sum(master.numel() * master.element_size() for master in masters),
    }
    per_parameter = sum(by_kind.values()) / count if count else None
    return {
        "arithmetic": _arithmetic(optimizer, masters),
        "parameters": count,
        "bytes": by_kind,
        "bytes_per_parameter": per_parameter,
    }


def _arithmetic(optimizer: FP16StateAdamW, masters: list[torch.Tensor]) -> str | None:
    """Which code updates in float32, and why; None before the first step, which may choose it."""
    if not masters:
        return None
    if optimizer.param_groups[0]["compile"]:
        return "torch.compile"
    return backend_for(masters[0].device).reason
