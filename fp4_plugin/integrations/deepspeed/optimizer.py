"""Which optimizer DeepSpeed is given: decided, and refused, before an engine exists.

{"type": "FP16StateAdamW"}    a name that DeepSpeed finds, while it builds the engine
{"type": "AdamW"}             rewritten where the section asks for "optimizer_states"
an optimizer object           turned into FP16StateAdamW in place, see optimizer_objects
a callable                    the same with what it returns
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fp4_plugin.config import Fp4Config
from fp4_plugin.integrations.deepspeed.ds_config import (
    config_source,
    offloads_optimizer,
    refuse_state_conflicts,
)
from fp4_plugin.integrations.deepspeed.optimizer_objects import converted, require_convertible
from fp4_plugin.integrations.deepspeed.optimizer_section import (
    NAME,
    refuse_fp16_master,
    rewritten_optimizer,
)
from fp4_plugin.optim import FP16StateAdamW

__all__ = ["known_to_deepspeed", "prepare_optimizer"]

_OWN_CPU_OPTIMIZER = "zero_force_ds_cpu_optimizer"


def prepare_optimizer(
    arguments: dict[str, Any], ds_config: Mapping[str, Any] | None, config: Fp4Config | None
) -> None:
    """Change `arguments` of a `deepspeed.initialize` call so that states are kept as asked.

    arguments: bound, and not the caller's own dict; what they refer to is copied where it changes,
    except for an optimizer object. ds_config: the resolved configuration. Raises ConfigError for
    what cannot be honoured, before anything is changed.
    """
    if ds_config is None:
        return
    asked = None if config is None else config.optimizer_states
    if asked is not None:
        refuse_fp16_master(asked)
    if arguments.get("optimizer") is None:
        _prepare_section(arguments, ds_config, asked)
    else:
        _prepare_client(arguments, ds_config, asked)


def _prepare_section(
    arguments: dict[str, Any], ds_config: Mapping[str, Any], asked: Mapping[str, Any] | None
) -> None:
    section = ds_config.get("optimizer")
    if not isinstance(section, Mapping) or section.get("type") is None:
        return  # an engine without an optimizer, or one that DeepSpeed complains about
    changed = rewritten_optimizer(section, asked)
    if changed is not None:
        refuse_state_conflicts(ds_config)
        _replace_config(arguments, {**ds_config, "optimizer": changed})


def _prepare_client(
    arguments: dict[str, Any], ds_config: Mapping[str, Any], asked: Mapping[str, Any] | None
) -> None:
    client = arguments["optimizer"]
    is_object = isinstance(client, torch.optim.Optimizer)
    is_left_alone = asked is None and not isinstance(client, FP16StateAdamW)
    if is_object and not is_left_alone:
        require_convertible(client, asked)
    if not is_left_alone:
        refuse_state_conflicts(ds_config)
        if offloads_optimizer(ds_config):
            # Otherwise DeepSpeed takes no optimizer object but its own compiled one.
            _replace_config(arguments, {**ds_config, _OWN_CPU_OPTIMIZER: False})
    if is_object:
        arguments["optimizer"] = converted(client, asked)
    elif callable(client):
        arguments["optimizer"] = _converting(client, asked)


def _converting(
    make: Callable[[Any], Any], asked: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    """`make`, which takes parameters, with its result turned into FP16StateAdamW."""

    def make_converted(parameters: Any) -> Any:
        optimizer = make(parameters)
        require_convertible(optimizer, asked)
        return converted(optimizer, asked)

    return make_converted


def _replace_config(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    name, owner = config_source(arguments)
    if owner is None:
        arguments[name] = config
        return
    arguments["args"] = copy.copy(owner)
    setattr(arguments["args"], name, config)


@contextlib.contextmanager
def known_to_deepspeed() -> Iterator[None]:
    """While it lasts DeepSpeed finds FP16StateAdamW by name and lets ZeRO partition its states.

    It looks names up in torch.optim, and only while it builds an engine: nothing stays behind.
    """
    from deepspeed.runtime.zero import utils

    supported = utils.ZERO_SUPPORTED_OPTIMIZERS
    if hasattr(torch.optim, NAME):  # inside another call
        yield
        return
    setattr(torch.optim, NAME, FP16StateAdamW)
    supported.append(FP16StateAdamW)
    try:
        yield
    finally:
        delattr(torch.optim, NAME)
        supported.remove(FP16StateAdamW)
