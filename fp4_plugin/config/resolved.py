"""A valid section, resolved: what every layer is to run can be asked by name."""

from __future__ import annotations

import copy
import fnmatch
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.comm.spec import CommunicationSpec
from fp4_plugin.config.merging import (
    apply_rule,
    complete,
    complete_communication,
    complete_optimizer_states,
    complete_tensor_parallel,
    has_path,
    merged,
    refuse_idle_keys,
)
from fp4_plugin.config.models import SECTION, UNQUANTIZED
from fp4_plugin.config.validation import build_estimator, validate_section
from fp4_plugin.core.formats import FORMATS
from fp4_plugin.errors import ConfigError
from fp4_plugin.linear.spec import LinearSpec, OperandSpec, OutlierSpec
from fp4_plugin.recipes import RECIPES

__all__ = ["Fp4Config", "parse_section"]


class Fp4Config:
    """A valid section: what every layer is to run can be asked by name."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._section = validate_section(section)
        self.enabled: bool = self._section.get("enabled", True)
        self.recipe: str = self._section.get("recipe", "paper")
        self.on_mismatch: Literal["error", "warn"] = self._section.get("on_mismatch", "error")
        self.layers: list[dict[str, Any]] = self._section.get("layers", [])
        recipe = RECIPES[self.recipe]
        self._linear = complete(merged(recipe["linear"], self._section, "linear"))
        if self._linear is not None:
            _build_spec(_freeze(self._linear))  # contradictions surface here
        refuse_idle_keys(recipe["linear"], self._linear)
        self._communication = complete_communication(
            merged(recipe["gradient_communication"], self._section, "gradient_communication")
        )
        self._states = complete_optimizer_states(
            merged(recipe["optimizer_states"], self._section, "optimizer_states")
        )
        self._tensor_parallel = complete_tensor_parallel(self._section.get("tensor_parallel", {}))
        for index, rule in enumerate(self.layers):
            self._check_rule(index, rule)

    @property
    def optimizer_states(self) -> dict[str, Any] | None:
        """Settings of FP16StateAdamW, by its argument names; None to leave the optimizer alone."""
        return dict(self._states) if self._states is not None and self.enabled else None

    @property
    def communication_spec(self) -> CommunicationSpec | None:
        """What gradient communication is to be; None to leave it as it is."""
        if self._communication is None or not self.enabled:
            return None
        settings = dict(self._communication)
        codec = BlockCodec.named(settings.pop("format"), settings.pop("block_size"))
        return CommunicationSpec(codec, **settings)

    @property
    def tensor_parallel(self) -> dict[str, bool]:
        """Settings of layers that tensor parallelism cuts."""
        return dict(self._tensor_parallel)

    @property
    def asks_for_tensor_parallel(self) -> bool:
        """Whether the section itself says something about them."""
        return "tensor_parallel" in self._section

    def linear_spec(self, name: str) -> LinearSpec | None:
        """What the linear called `name` is to run; None for high precision."""
        linear = self.linear_settings(name)
        return None if linear is None or not self.enabled else _build_spec(_freeze(linear))

    def linear_settings(self, name: str) -> dict[str, Any] | None:
        """The merged `linear` object for the layer called `name`, as in JSON."""
        linear = self._linear
        for rule in self.matching_rules(name):
            linear = apply_rule(linear, rule)
        return copy.deepcopy(linear)

    def matching_rules(self, name: str) -> list[dict[str, Any]]:
        """The rules that apply to `name`, in order of application."""
        return [rule for _, rule in self.numbered_rules(name)]

    def numbered_rules(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """`matching_rules` with their places in `layers`."""
        rules = enumerate(self.layers)
        return [(i, rule) for i, rule in rules if fnmatch.fnmatchcase(name, rule["match"])]

    def resolved(self) -> dict[str, Any]:
        """The section with every default filled in, as plain JSON values."""
        resolved = {
            "enabled": self.enabled,
            "recipe": self.recipe,
            "linear": self._linear,
            "layers": self.layers,
            "gradient_communication": self._communication,
            "optimizer_states": self._states,
            "tensor_parallel": self._tensor_parallel,
            "on_mismatch": self.on_mismatch,
        }
        return dict(json.loads(json.dumps(resolved)))

    def hash(self) -> str:
        """SHA-256 of the resolved section; equal for sections that mean the same."""
        text = json.dumps(self.resolved(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def origin(self, path: Iterable[str], name: str | None = None) -> str:
        """Where the value at `path` comes from: "recipe paper", "section" or "layers[i] ..."."""
        keys = list(path)
        origin = "section" if has_path(self._section, keys) else f"recipe {self.recipe}"
        whole_model = keys[0] in ("gradient_communication", "optimizer_states")
        if whole_model and not has_path(RECIPES[self.recipe], keys):
            origin = "section" if origin == "section" else "default"
        plain = ("enabled", "recipe", "layers", "tensor_parallel", "on_mismatch")
        if keys[0] in plain and origin != "section":
            origin = "default"
        if name is None or keys[0] != "linear":
            return origin
        for index, rule in self.numbered_rules(name):
            if "recipe" in rule:
                origin = f"layers[{index}] recipe {rule['recipe']}"
            elif has_path(rule, keys):
                origin = f"layers[{index}]"
        return origin

    def _check_rule(self, index: int, rule: Mapping[str, Any]) -> None:
        path = f"{SECTION}.layers[{index}]"
        if ("recipe" in rule) == ("linear" in rule):
            raise ConfigError(
                f"{path}: a rule holds either 'recipe' or 'linear', this one holds "
                f"{'both' if 'recipe' in rule else 'neither'}: {json.dumps(rule)}"
            )
        try:
            linear = apply_rule(self._linear, rule)
            if linear is not None:
                _build_spec(_freeze(linear))
                if "linear" in rule:
                    refuse_idle_keys(self._linear, linear)
        except ConfigError as error:
            raise ConfigError(f"{path} (match {rule['match']!r}): {error}") from None


def parse_section(section: Mapping[str, Any] | Fp4Config) -> Fp4Config:
    """The object under "fp4" -> Fp4Config. Raises ConfigError; touches nothing."""
    return section if isinstance(section, Fp4Config) else Fp4Config(section)


def _freeze(linear: Mapping[str, Any]) -> str:
    return json.dumps(linear, sort_keys=True)


@functools.lru_cache(maxsize=256)
def _build_spec(frozen: str) -> LinearSpec:
    """Equal settings give the same object: a model has few of them and many layers."""
    linear = json.loads(frozen)
    try:
        return _linear_spec(linear)
    except ConfigError as error:
        raise ConfigError(f"{SECTION}.{error}") from None


def _linear_spec(linear: Mapping[str, Any]) -> LinearSpec:
    weight, activation = linear["weight"], linear["input"]
    outliers = activation["outliers"]
    return LinearSpec(
        weight=_operand_spec(weight),
        input=_operand_spec(activation),
        grad_output=_operand_spec(linear["grad_output"]),
        fprop=linear["fprop"],
        dgrad=linear["dgrad"],
        wgrad=linear["wgrad"],
        outliers=None if outliers is None else OutlierSpec(**outliers),
        estimator=build_estimator(weight["estimator"], "linear.weight.estimator"),
    )


def _operand_spec(operand: Mapping[str, Any]) -> OperandSpec:
    name = operand["format"]
    return OperandSpec(
        format=None if name == UNQUANTIZED else FORMATS[name],
        granularity=operand["granularity"],
        rounding=operand["rounding"],
        scale=operand["scale"],
    )
