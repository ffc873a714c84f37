"""16-bit optimizer states under Megatron: the AdamW that it makes becomes FP16StateAdamW, in place.

Megatron wraps its optimizer (for float32 parameters, for float32 copies of 16-bit ones, or for the
shards of the distributed optimizer), and what goes into its checkpoints are float32 moments under
the names of AdamW. The state dict of FP16StateAdamW is that already; what the distributed optimizer
reads and writes by itself is decoded and encoded here. So a checkpoint is the same with and without
16-bit states, and either kind of job continues from it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp4_plugin.errors import ConfigError, MismatchError, UnsupportedError
from fp4_plugin.integrations.deepspeed.optimizer_objects import converted, require_convertible
from fp4_plugin.integrations.deepspeed.optimizer_states import sizes_of
from fp4_plugin.optim import STATE_FORMATS, FP16StateAdamW
from fp4_plugin.optim.adamw import group_formats
from fp4_plugin.optim.states import (
    EXP_AVG,
    EXP_AVG_SQ,
    SCALE,
    STEP,
    decode_tensor,
    format_of,
    import_state,
    is_packed,
    new_state,
)

__all__ = ["OptimizerStates"]

_MOMENTS = (EXP_AVG, EXP_AVG_SQ)
_FUSED_ADAM = "FusedAdam"  # of Transformer Engine and of Apex


def _refuse_settings(asked: Mapping[str, Any]) -> None:
    """Raise ConfigError for values of "optimizer_states" that cannot be had under Megatron."""
    if asked["master_weights"] != "fp32":
        raise ConfigError(
            f"optimizer_states.master_weights is {asked['master_weights']!r}: Megatron keeps the "
            'master weights itself, in float32; write "fp32"'
        )
    if asked["checkpoint"] != "portable":
        raise ConfigError(
            f"optimizer_states.checkpoint is {asked['checkpoint']!r}: Megatron's checkpoints cut "
            'each state as they cut its parameter, which block scales cannot be; write "portable"'
        )


class OptimizerStates:
    """Turns the optimizers inside `optimizer`, one of Megatron's, into FP16StateAdamW.

    asked: the resolved "optimizer_states". Raises ConfigError for an optimizer whose states are not
    AdamW's, and UnsupportedError for one that keeps its step where Megatron needs it.
    """

    def __init__(self, optimizer: Any, asked: Mapping[str, Any]) -> None:
        _refuse_settings(asked)
        self._asked = asked
        wrappers = [one for one in _wrappers(optimizer) if one.optimizer is not None]
        for wrapper in wrappers:
            if type(wrapper.optimizer).__name__ == _FUSED_ADAM:
                raise UnsupportedError(
                    f'"optimizer_states": Megatron has found {type(wrapper.optimizer).__module__} '
                    "and makes its FusedAdam, whose count of steps it saves in another way than "
                    "that of torch's AdamW; set it to null, or take that package away"
                )
            require_convertible(wrapper.optimizer, asked)
        self._optimizers: list[FP16StateAdamW] = []
        for wrapper in wrappers:
            self._optimizers.append(converted(wrapper.optimizer, asked))
            wrapper.init_state_fn = _make_states
            if hasattr(wrapper, "_get_main_param_and_optimizer_states"):
                # It asks for the step of all states before there are any, and fails.
                _make_states(wrapper.optimizer)
                _decode_accesses(wrapper)

    def verify(self) -> None:
        """Raise MismatchError unless states are stored as asked, as far as there are any yet."""
        for optimizer in self._optimizers:
            if not isinstance(optimizer, FP16StateAdamW):
                raise MismatchError(
                    f'"optimizer_states" was asked for, but {type(optimizer).__name__} steps now'
                )
            for name in _MOMENTS:
                wanted = STATE_FORMATS[self._asked[name]].dtype
                kept = {state[name].dtype for state in optimizer.state.values() if name in state}
                if kept - {wanted}:
                    raise MismatchError(f"{name} is kept as {kept}, not as {wanted}")

    def report(self) -> dict[str, Any]:
        """The entry of the manifest; bytes are those of this rank, one entry per optimizer."""
        steps = [state[STEP] for one in self._optimizers for state in one.state.values()]
        return {
            "state": "active" if any(steps) else "idle: no step has been made yet",
            "asked": dict(self._asked),
            "asked_by": "the section",
            "optimizers": [sizes_of(optimizer) for optimizer in self._optimizers],
        }


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers that hold one of torch's, however they are chained."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for one in chained:
        yield from _wrappers(one)


def _make_states(optimizer: FP16StateAdamW, config: Any = None) -> None:
    """Megatron calls this before it loads: states for the loaded ones to take the place of."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param].update(new_state(param, group_formats(group)))


def _decode_accesses(wrapper: Any) -> None:
    """The distributed optimizer copies out of and into the states of its shards."""

    def get(wrapper: Any, model_param: Any) -> dict[str, Any]:
        _, main = _shard_of(wrapper, model_param)
        state = wrapper.optimizer.state[main]
        tensors: dict[str, Any] = {"param": main}
        for name in _MOMENTS:
            codes = state[name]
            if is_packed(state):
                codes = decode_tensor(codes, state[name + SCALE], format_of(name, codes))
            tensors[name] = codes
        return tensors

    def put(wrapper: Any, model_param: Any, tensors: Mapping[str, Any]) -> None:
        group, main = _shard_of(wrapper, model_param)
        main.detach().copy_(tensors["param"])
        step = wrapper.optimizer.state[main][STEP]  # saved with the param groups, loaded before
        moments = {name: tensors[name] for name in _MOMENTS}
        wrapper.optimizer.state[main] = import_state(
            main, {STEP: step, **moments}, group_formats(group)
        )

    wrapper._get_main_param_and_optimizer_states = types.MethodType(get, wrapper)
    wrapper._set_main_param_and_optimizer_states = types.MethodType(put, wrapper)


def _shard_of(wrapper: Any, model_param: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """The param group, and in it this rank's float32 shard, of a parameter of the model."""
    index, order = wrapper.model_param_group_index_map[model_param]
    group = wrapper.optimizer.param_groups[index]
    return group, group["params"][order]
