"""Precedence: recipe < section < layers. Objects merge by key, everything else replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fp4_plugin.config.models import (
    SECTION,
    UNQUANTIZED,
    GradientCommunicationConfig,
    LinearConfig,
    OptimizerStatesConfig,
    TensorParallelConfig,
)
from fp4_plugin.config.validation import build_estimator
from fp4_plugin.errors import ConfigError
from fp4_plugin.recipes import RECIPES

__all__ = [
    "Linear",
    "apply_rule",
    "complete",
    "complete_communication",
    "complete_optimizer_states",
    "complete_tensor_parallel",
    "has_path",
    "merged",
    "refuse_idle_keys",
]

# A `linear` object as in JSON, or None for layers that stay in high precision.
Linear = dict[str, Any] | None


def merged(base: Any, override: Mapping[str, Any], key: str) -> Any:
    """base with override[key] on top: objects merge by key, everything else replaces."""
    if key not in override:
        return base
    value = override[key]
    if key == "linear" and base is None and value is not None:
        raise ConfigError(
            f"{SECTION}.linear: there is nothing to override, since recipe 'bf16' (or null) leaves "
            "linear layers untouched; choose another recipe, or leave 'linear' out"
        )
    if not isinstance(value, Mapping) or not isinstance(base, Mapping):
        return value
    if "name" in value and value["name"] != base.get("name"):
        return dict(value)  # another estimator: the parameters of the old one mean nothing
    return {k: merged(base.get(k), value, k) for k in {**base, **value}}


def apply_rule(linear: Linear, rule: Mapping[str, Any]) -> Linear:
    if "recipe" in rule:
        linear_of_recipe: Linear = RECIPES[rule["recipe"]]["linear"]
        return linear_of_recipe
    return complete(merged(linear, rule, "linear"))


def complete(linear: Mapping[str, Any] | None) -> Linear:
    """Fill in what nobody named, such as the scope of outliers that a recipe has switched off."""
    if linear is None:
        return None
    complete = LinearConfig.model_validate(linear).model_dump()
    estimator = complete["weight"]["estimator"]
    instance = build_estimator(estimator, f"{SECTION}.linear.weight.estimator")
    complete["weight"]["estimator"] = {"name": estimator["name"], **asdict(instance)}
    return complete


def complete_communication(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`gradient_communication` with its defaults filled in, or None where it is off."""
    if settings is None:
        return None
    return GradientCommunicationConfig.model_validate(settings).model_dump()


def complete_optimizer_states(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`optimizer_states` with its defaults filled in, or None where they are left as they are."""
    if settings is None:
        return None
    return OptimizerStatesConfig.model_validate(settings).model_dump()


def complete_tensor_parallel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """`tensor_parallel` with its defaults. Raises ConfigError for exact sums of other scales."""
    complete = TensorParallelConfig.model_validate(settings).model_dump()
    if complete["exact"] and not complete["shared_scales"]:
        raise ConfigError(
            f"{SECTION}.tensor_parallel.exact: true needs shared_scales, since sums of codes with "
            "scales of their own cannot be added; set shared_scales to true, or exact to false"
        )
    return complete


def refuse_idle_keys(base: Linear, linear: Linear) -> None:
    """Raise ConfigError for a key that differs from `base` and yet changes nothing in `linear`."""
    if base is None or linear is None:
        return
    casts_gradient = not linear["dgrad"] == linear["wgrad"] == UNQUANTIZED
    for operand in ("weight", "input", "grad_output"):
        settings = linear[operand]
        if settings["format"] == UNQUANTIZED:
            keys, reason = (
                ["granularity", "rounding", "scale"],
                f"linear.{operand}.format is 'bf16'",
            )
        elif operand == "grad_output" and not casts_gradient:
            keys = ["format", "granularity", "rounding", "scale"]
            reason = "dgrad and wgrad are 'bf16' and do not cast grad_output"
        else:
            continue
        for key in keys:
            if settings[key] != base[operand].get(key):
                raise ConfigError(
                    f"{SECTION}.linear.{operand}.{key}: {settings[key]!r} would do nothing, since "
                    f"{reason}; leave it out, or change that"
                )


def has_path(settings: Any, keys: list[str]) -> bool:
    for key in keys:
        if not isinstance(settings, Mapping) or key not in settings:
            return False
        settings = settings[key]
    return True
