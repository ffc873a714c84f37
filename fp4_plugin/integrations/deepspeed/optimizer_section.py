"""The "optimizer" object of a DeepSpeed configuration that builds FP16StateAdamW.

It is there by name, {"type": "FP16StateAdamW", "params": {...}}; or "optimizer_states" of the
section asks for it, and what says AdamW (or Adam with decoupled weight decay) is rewritten. All of
this is known from the JSON alone, so that `fp4 config validate` says the same as a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from fp4_plugin.errors import ConfigError
from fp4_plugin.optim import FP16StateAdamW

__all__ = ["NAME", "SETTINGS", "refuse_fp16_master", "require_equal", "rewritten_optimizer"]

NAME = "FP16StateAdamW"
# What "optimizer_states" decides; the arguments of FP16StateAdamW have the same names.
SETTINGS = ("exp_avg", "exp_avg_sq", "master_weights", "checkpoint", "compile")

_PARAMS = tuple(
    name
    for name in inspect.signature(FP16StateAdamW.__init__).parameters
    if name not in ("self", "params")
)
_ADAM = ("adam", "adamw")  # DeepSpeed reads these two in lower case
# They choose between implementations of AdamW that compute the same.
_CHOOSE_IMPLEMENTATION = ("torch_adam", "foreach", "fused", "set_grad_none")
# They change what a step computes, or how states are kept: only these values can be honoured.
_ONLY = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "bias_correction": True,
    "fp32_optimizer_states": True,
}
_TORCH_WEIGHT_DECAY = 1e-2  # torch.optim.AdamW's default; DeepSpeed's own AdamW has 0


def rewritten_optimizer(
    section: Mapping[str, Any], asked: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """`section` ("optimizer" of the JSON) as it builds FP16StateAdamW; None to leave it alone.

    asked: the resolved "optimizer_states", or None. Raises ConfigError for an optimizer whose
    states are not AdamW's, a parameter that cannot be honoured, and a contradiction to `asked`.
    """
    kind = str(section.get("type"))
    given = dict(section.get("params") or {})
    if kind.lower() == NAME.lower():
        params = _named_params(given, asked)
    elif asked is None:
        return None
    elif kind.lower() in _ADAM:
        params = {**_adam_params(kind.lower(), given), **asked}
    else:
        raise ConfigError(
            f'optimizer.type {kind!r}: "optimizer_states" stores the two moments of AdamW, which '
            f'this optimizer does not have; take "type": "AdamW", or set "optimizer_states": null '
            'in the "fp4" section'
        )
    _check_values(params)
    return {**section, "type": NAME, "params": params}


def _named_params(given: dict[str, Any], asked: Mapping[str, Any] | None) -> dict[str, Any]:
    _refuse_unknown(given, _PARAMS)
    require_equal(given, asked, "optimizer.params")
    return {**(asked or {}), **given}


def require_equal(settings: Mapping[str, Any], asked: Mapping[str, Any] | None, where: str) -> None:
    """Raise ConfigError if `settings`, found at `where`, say something else than `asked`."""
    for key in SETTINGS:
        if asked is not None and key in settings and settings[key] != asked[key]:
            raise ConfigError(
                f"{where}.{key} is {settings[key]!r}, but fp4.optimizer_states.{key} is "
                f'{asked[key]!r}: say it once, in the section (or set "optimizer_states": null '
                "there, which leaves the optimizer to what is said elsewhere)"
            )


def _adam_params(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of DeepSpeed's Adam or AdamW, as FP16StateAdamW takes them."""
    for name, only in _ONLY.items():
        if given.pop(name, only) != only:
            raise ConfigError(
                f"optimizer.params.{name}: FP16StateAdamW has {only!r} only; leave it out, or set "
                '"optimizer_states": null in the "fp4" section'
            )
    is_decoupled = given.pop("adam_w_mode", True) or kind == "adamw"
    default_decay = _TORCH_WEIGHT_DECAY if given.get("torch_adam") and is_decoupled else 0.0
    given.setdefault("weight_decay", default_decay)
    if not is_decoupled and given["weight_decay"] != 0.0:
        raise ConfigError(
            f"optimizer.params.adam_w_mode false with weight_decay {given['weight_decay']!r} is "
            "Adam with coupled decay, which FP16StateAdamW does not implement: take decoupled "
            'decay ("type": "AdamW"), weight_decay 0, or set "optimizer_states": null'
        )
    for name in _CHOOSE_IMPLEMENTATION:
        given.pop(name, None)
    _refuse_unknown(given, ("lr", "betas", "eps", "weight_decay"))
    return given


def _refuse_unknown(given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            hint = '; use the top-level "gradient_clipping"' if name == "max_grad_norm" else ""
            raise ConfigError(
                f"optimizer.params.{name}: FP16StateAdamW has no such parameter; allowed are "
                f"{list(allowed)}{hint}"
            )


def _check_values(params: Mapping[str, Any]) -> None:
    refuse_fp16_master(params)
    # "auto" is for Hugging Face to fill in, which does so before DeepSpeed sees it.
    known = {name: value for name, value in params.items() if value != "auto"}
    try:
        FP16StateAdamW([torch.zeros(1)], **known)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {error}") from error


def refuse_fp16_master(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for master weights in FP16, which DeepSpeed cannot be made to keep."""
    if settings.get("master_weights", "fp32") != "fp32":
        raise ConfigError(
            f"optimizer_states.master_weights is {settings['master_weights']!r}: under DeepSpeed "
            "the master weights are its own float32 partitions, of which the optimizer only sees "
            'the values; write "fp32" (FP16 masters work in plain torch)'
        )
