"""An optimizer that the user built, turned into FP16StateAdamW without making another object.

Learning-rate schedulers and trainers hold on to the object and to its `param_groups`, so that both
stay: the class changes, and with it `step`. States that are there already are taken over.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fp4_plugin.errors import ConfigError
from fp4_plugin.integrations.deepspeed.optimizer_section import (
    SETTINGS,
    refuse_fp16_master,
    require_equal,
)
from fp4_plugin.optim import FP16StateAdamW

__all__ = ["converted", "require_convertible"]

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
# DeepSpeed's own, by name: importing them may compile something.
_DEEPSPEED_ADAM = ("deepspeed.ops.adam.fused_adam.FusedAdam",)
_DEEPSPEED_CPU_ADAM = ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",)
# Values of a param group that change what a step computes; others cannot be honoured.
_ONLY = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "bias_correction": True,
}
# Of no meaning to FP16StateAdamW. "step" is FusedAdam's, which counts per group.
_OTHER_KEYS = (*_ONLY, "foreach", "fused", "decoupled_weight_decay", "step")
_REMEDY = (
    "pass torch.optim.AdamW or fp4_plugin.optim.FP16StateAdamW, or set "
    '"optimizer_states": null in the "fp4" section'
)


def require_convertible(optimizer: Any, asked: Mapping[str, Any] | None) -> None:
    """Raise ConfigError that says what to pass, unless `converted` can serve `optimizer`.

    asked: the resolved "optimizer_states"; with None every optimizer is served, as it is.
    """
    if isinstance(optimizer, FP16StateAdamW):
        _require_one_storage(optimizer, asked)
    elif asked is not None:
        _require_adamw(optimizer)
        _require_plain_step(optimizer)


def converted(optimizer: Any, asked: Mapping[str, Any] | None) -> Any:
    """`optimizer` itself, as FP16StateAdamW that stores what `asked` says."""
    if asked is None or isinstance(optimizer, FP16StateAdamW):
        return optimizer
    twin = _twin(optimizer, asked)
    _release_native_part(optimizer)
    for own, new in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for key in _OTHER_KEYS:
            own.pop(key, None)
        own.update({key: new[key] for key in (*_HYPERPARAMETERS, *SETTINGS)})
    # The twin's own parameters are other objects for the same memory.
    theirs, ours = _params(twin), _params(optimizer)
    states = {
        own: twin.state[one] for one, own in zip(theirs, ours, strict=True) if one in twin.state
    }
    optimizer.__class__ = FP16StateAdamW
    optimizer.defaults = twin.defaults
    optimizer.state.clear()
    optimizer.state.update(states)
    vars(optimizer).pop("_step_supports_amp_scaling", None)  # torch's fused AdamW
    optimizer.__setstate__({})  # what a new object of the class has beside these
    _rebind_step(optimizer)
    return optimizer


def _twin(optimizer: Optimizer, asked: Mapping[str, Any]) -> FP16StateAdamW:
    """A new FP16StateAdamW on the same parameters, with the same states and hyperparameters."""
    groups = [
        # Megatron's distributed optimizer steps views, which a new optimizer refuses.
        {
            "params": [param.detach() for param in group["params"]],
            **{key: group[key] for key in _HYPERPARAMETERS},
        }
        for group in optimizer.param_groups
    ]
    defaults = {
        key: optimizer.defaults[key] for key in _HYPERPARAMETERS if key in optimizer.defaults
    }
    twin = FP16StateAdamW(groups, **defaults, **asked)
    if optimizer.state:
        twin.load_state_dict(_state_of(optimizer))
    return twin


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its state dict with the steps where torch has them, and without parameters never stepped."""
    content = optimizer.state_dict()
    steps = {
        index: group["step"]
        for group in content["param_groups"]
        for index in group["params"]
        if "step" in group
    }
    content["state"] = {
        index: {"step": steps[index], **state} if index in steps else state
        for index, state in content["state"].items()
        if state
    }
    return content


def _require_one_storage(optimizer: FP16StateAdamW, asked: Mapping[str, Any] | None) -> None:
    first = optimizer.param_groups[0]
    for index, group in enumerate(optimizer.param_groups):
        refuse_fp16_master(group)
        require_equal(group, asked, f"the optimizer's param_groups[{index}]")
        for key in SETTINGS:
            if group[key] != first[key]:
                raise ConfigError(
                    f"param_groups[{index}] of the optimizer has {key}={group[key]!r}, the first "
                    f"has {first[key]!r}: under DeepSpeed, whose checkpoints keep one value, all "
                    "groups need the same"
                )


def _require_adamw(optimizer: Any) -> None:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    is_torch = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not is_torch and kind not in (*_DEEPSPEED_ADAM, *_DEEPSPEED_CPU_ADAM):
        raise ConfigError(
            f'"optimizer_states" cannot be applied to an optimizer of type {kind}, whose step may '
            f"be another than AdamW's: {_REMEDY}"
        )
    for index, group in enumerate(optimizer.param_groups):
        for key, only in _ONLY.items():
            if group.get(key, only) != only:
                raise ConfigError(
                    f"param_groups[{index}] of the optimizer has {key}={group[key]!r}, which "
                    f"FP16StateAdamW does not implement: {_REMEDY}"
                )
        if group["weight_decay"] != 0.0 and not _is_decoupled(optimizer, group):
            raise ConfigError(
                f"param_groups[{index}] of the optimizer ({kind}) has weight_decay="
                f"{group['weight_decay']!r}, coupled with the gradient, which FP16StateAdamW does "
                f"not implement: {_REMEDY}"
            )


def _is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    if hasattr(optimizer, "adam_w_mode"):  # DeepSpeed's
        return bool(optimizer.adam_w_mode)
    is_adamw = type(optimizer) is torch.optim.AdamW
    return is_adamw or bool(group.get("decoupled_weight_decay", False))


def _require_plain_step(optimizer: Any) -> None:
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"the step of this {type(optimizer).__name__} object has been replaced (by a gradient "
            f"scaler, say), so that it cannot become one with 16-bit states: {_REMEDY}"
        )


def _rebind_step(optimizer: Any) -> None:
    """A scheduler of torch has put its own `step` on the object, around that of the old class."""
    if "step" not in vars(optimizer):
        return
    del optimizer.step
    plain = FP16StateAdamW.step

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return plain(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)


def _release_native_part(optimizer: Any) -> None:
    """DeepSpeedCPUAdam frees its C++ half in `__del__`, which the new class does not have."""
    if hasattr(optimizer, "ds_opt_adam"):
        optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
        del optimizer.ds_opt_adam
