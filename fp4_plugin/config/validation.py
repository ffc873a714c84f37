"""From a dict to the keys that were given, checked; every error says what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from fp4_plugin.config.models import SECTION, UNQUANTIZED, SectionModel
from fp4_plugin.core.formats import FORMATS
from fp4_plugin.errors import ConfigError
from fp4_plugin.estimators import ESTIMATORS, Estimator
from fp4_plugin.recipes import RECIPES
from fp4_plugin.registry import Registry, nearest_name

__all__ = ["build_estimator", "find_section", "validate_section"]

T = TypeVar("T")
# Keys of the section that mean something else at the top of a DeepSpeed configuration, or anywhere.
_ALSO_OF_DEEPSPEED = ("enabled", "tensor_parallel")


def find_section(ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The "fp4" section of a DeepSpeed configuration, or None.

    DeepSpeed accepts unknown sections without a word, so a key that nearly reads "fp4", or holds
    it ("fp4_plugin"), would train in BF16: such keys raise ConfigError.
    """
    for key in ds_config:
        if isinstance(key, str) and key != SECTION and _is_near_miss(key):
            raise ConfigError(
                f"unknown section {key!r}: it looks like {SECTION!r}; write it exactly so, or "
                "remove it (DeepSpeed would ignore it and train in high precision)"
            )
        if key in SectionModel.model_fields and key not in _ALSO_OF_DEEPSPEED:
            raise ConfigError(
                f"{key!r} stands beside {SECTION!r} and would be ignored there; write it inside "
                f"the {SECTION!r} section"
            )
    if SECTION not in ds_config:
        return None
    section: Mapping[str, Any] = ds_config[SECTION]
    _require_object(section)
    return section


def _require_object(section: Any) -> None:
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'{SECTION}: expected an object such as {{"recipe": "paper"}}, got {section!r}'
        )


def _is_near_miss(key: str) -> bool:
    plain = re.sub(r"[^a-z0-9]", "", key.lower())
    # DeepSpeed has no such name, so "fp4_config" and "nvfp4" are meant for us.
    return SECTION in plain or (
        "4" in plain
        and len(plain) <= len(SECTION) + 1
        and nearest_name(plain, [SECTION]) is not None
    )


def validate_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that were given, checked; ConfigError otherwise."""
    _require_object(section)
    if SECTION in section:
        raise ConfigError(
            f"{SECTION}.{SECTION}: this is a configuration that holds the section, not the section "
            f'itself; pass what is under "{SECTION}"'
        )
    _refuse_auto(section, SECTION)
    try:
        model = SectionModel.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(e) for e in error.errors())) from None
    given = model.model_dump(exclude_unset=True)
    _check_names(given, SECTION)
    for index, rule in enumerate(given.get("layers", [])):
        _check_names(rule, f"{SECTION}.layers[{index}]")
    return given


def _refuse_auto(value: Any, path: str) -> None:
    if value == "auto":
        raise ConfigError(
            f"{path}: 'auto' is never a value in the {SECTION!r} section; write the value, or "
            "leave the key out to take the recipe's"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_auto(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_auto(item, f"{path}[{index}]")


def _describe(error: Any) -> str:
    """One pydantic error as a sentence with path, value, what is allowed and the nearest name."""
    path = SECTION + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]
    )
    if error["type"] == "extra_forbidden":
        allowed = _allowed_keys(error["loc"][:-1])
        guess = nearest_name(str(error["loc"][-1]), allowed)
        hint = f"; did you mean {guess!r}?" if guess else ""
        return f"{path}: unknown key (value {error['input']!r}); allowed are {allowed}{hint}"
    message = _EXPECTED.get(error["type"]) or error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        guess = nearest_name(error["input"], choices)
        message += f"; did you mean {guess!r}?" if guess else ""
    return f"{path}: {message}; got {_as_json(error['input'])}"


# What pydantic says in terms of Python, in terms of JSON.
_EXPECTED = {
    "bool_type": "expected true or false",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "model_type": "expected an object",
    "string_type": "expected a string",
}


def _as_json(value: Any) -> str:
    return json.dumps(value, default=repr)


def _allowed_keys(loc: tuple[str | int, ...]) -> list[str]:
    """The keys of the model at `loc`."""
    model: type[BaseModel] = SectionModel
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def _check_names(given: Mapping[str, Any], path: str) -> None:
    """Names that a registry knows: recipes, formats, estimators and their parameters."""
    linear = given.get("linear") or {}
    if given.get("recipe") is not None:
        _look_up(RECIPES, given["recipe"], f"{path}.recipe")
    for operand in ("weight", "input", "grad_output"):
        name = linear.get(operand, {}).get("format", UNQUANTIZED)
        if name != UNQUANTIZED and name not in FORMATS:
            allowed = [*(n for n in FORMATS.names() if FORMATS[n].signed), UNQUANTIZED]
            guess = nearest_name(name, allowed)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise ConfigError(
                f"{path}.linear.{operand}.format: unknown number format {name!r}: allowed are "
                f"{allowed}{hint}"
            )
    estimator = linear.get("weight", {}).get("estimator")
    if estimator is not None and "name" in estimator:
        build_estimator(estimator, f"{path}.linear.weight.estimator")


def _look_up(registry: Registry[T], name: str, path: str) -> T:
    try:
        return registry[name]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def build_estimator(settings: Mapping[str, Any], path: str) -> Estimator:
    parameters = dict(settings)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{path}.name: an estimator has a name, one of {ESTIMATORS.names()}; got {name!r}"
        )
    cls = _look_up(ESTIMATORS, name, f"{path}.name")
    known = list(getattr(cls, "__dataclass_fields__", {}))
    for parameter in parameters:
        if parameter not in known:
            guess = nearest_name(parameter, known)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise ConfigError(
                f"{path}.{parameter}: {name!r} has no such parameter; allowed are {known}{hint}"
            )
    try:
        # As JSON, because strict validation of Python objects takes instances only.
        estimator: Estimator = TypeAdapter(cls).validate_json(json.dumps(parameters), strict=True)
        return estimator
    except ValidationError as error:
        first = error.errors()[0]
        at = "".join(f".{part}" for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}{at}: {message}; got {first['input']!r}") from None
