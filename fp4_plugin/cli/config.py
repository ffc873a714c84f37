"""`fp4 config`: is an "fp4" section right, what does it resolve to, and what may it hold.

FILE is a DeepSpeed JSON with an "fp4" section, or the section alone. It is read as DeepSpeed reads
it: comments are allowed where the hjson package is installed, a repeated key is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4_plugin.errors import ConfigError

if TYPE_CHECKING:
    from fp4_plugin.config import Fp4Config

__all__ = ["add_parser", "parsed_file"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "config",
        help='check, explain and describe the "fp4" section',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    validate = actions.add_parser(
        "validate", help="exit 0 if FILE is right, else 2 with the reason"
    )
    validate.add_argument("file", type=Path, metavar="FILE")
    validate.set_defaults(func=_validate)
    explain = actions.add_parser("explain", help="every resolved value, and where it comes from")
    explain.add_argument("file", type=Path, metavar="FILE")
    explain.add_argument("--layer", metavar="NAME", help="for the layer of this dotted name")
    explain.set_defaults(func=_explain)
    schema = actions.add_parser("schema", help="the JSON Schema of the section, for editors")
    schema.add_argument("--output", type=Path, metavar="FILE", help="write it there instead")
    schema.set_defaults(func=_schema)


def _validate(arguments: argparse.Namespace) -> int:
    config = parsed_file(arguments.file)
    print(f"{arguments.file}: the fp4 section is valid")
    for name, text in _summary(config):
        print(f"  {name:<13}{text}")
    return 0


def parsed_file(path: Path) -> Fp4Config:
    """The "fp4" section in `path`. ConfigError also for DeepSpeed settings that exclude it."""
    from fp4_plugin.config import parse_section
    from fp4_plugin.integrations.deepspeed.ds_config import (
        read_config,
        refuse_conflicts,
        section_in,
    )
    from fp4_plugin.integrations.deepspeed.optimizer_section import (
        refuse_fp16_master,
        rewritten_optimizer,
    )

    content = read_config(path)
    section = section_in(content, path)
    try:
        config = parse_section(section)
        if section is not content:
            refuse_conflicts(content, config)
            if config.optimizer_states is not None:
                refuse_fp16_master(config.optimizer_states)
            if content.get("optimizer") is not None:
                rewritten_optimizer(content["optimizer"], config.optimizer_states)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from error
    return config


def _summary(config: Fp4Config) -> Iterator[tuple[str, str]]:
    """(name, text) lines that say what a linear layer runs unless a layer rule changes it."""
    resolved = config.resolved()
    linear = resolved["linear"]
    yield "recipe", config.recipe
    if not config.enabled:
        yield "enabled", "false: the model is left untouched"
    elif linear is None:
        yield "linear", "left in high precision"
    else:
        for operand in ("weight", "input", "grad_output"):
            yield operand, _sentence(linear[operand])
        yield "GEMMs", ", ".join(f"{gemm} {linear[gemm]}" for gemm in ("fprop", "dgrad", "wgrad"))
    for rule in resolved["layers"]:
        change = f"recipe {rule['recipe']}" if "recipe" in rule else _sentence(rule["linear"])
        yield "layers", f"{rule['match']}: {change}"
    if config.enabled:
        communication = resolved["gradient_communication"]
        yield "gradients", "reduced as ever" if communication is None else _sentence(communication)
        states = resolved["optimizer_states"]
        yield "optimizer", "left as it is" if states is None else _sentence(states)
    yield "on_mismatch", config.on_mismatch
    yield "hash", config.hash()


def _sentence(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = (
            f"{key} ({_sentence(v)})" if isinstance(v, Mapping) else f"{key} {_sentence(v)}"
            for key, v in value.items()
        )
        return ", ".join(parts)
    return value if isinstance(value, str) else json.dumps(value)


def _explain(arguments: argparse.Namespace) -> int:
    config = parsed_file(arguments.file)
    resolved = config.resolved()
    if arguments.layer is not None:
        # One layer: what applies to it takes the place of the general settings and their rules.
        resolved["linear"] = config.linear_settings(arguments.layer)
        for key in ("layers", "gradient_communication", "optimizer_states"):
            del resolved[key]
        print(f"layer {arguments.layer}: {_which_rules(config, arguments.layer)}")
    rows = [("key", "value", "from")]
    for keys, value in _leaves(resolved):
        rows.append((".".join(keys), json.dumps(value), config.origin(keys, arguments.layer)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, origin in rows:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    if resolved["linear"] is None or not config.enabled:
        print("linear layers stay in high precision")
    return 0


def _which_rules(config: Fp4Config, name: str) -> str:
    rules = config.numbered_rules(name)
    if not rules:
        return "no rule of layers matches"
    return "matched by " + ", ".join(f"layers[{index}] ({rule['match']})" for index, rule in rules)


def _leaves(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of everything in nested objects that is not itself an object."""
    if not isinstance(value, Mapping):
        yield keys, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*keys, key))


def _schema(arguments: argparse.Namespace) -> int:
    from fp4_plugin.config import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {arguments.output}: {error}") from error
    print(f"wrote {arguments.output}")
    return 0
