"""Reading the DeepSpeed configuration of one call, and refusing what cannot go with FP4 linears."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4_plugin.config import Fp4Config, find_section
from fp4_plugin.config.models import SECTION, SectionModel
from fp4_plugin.errors import ConfigError

__all__ = [
    "COMMUNICATION_CONFLICTS",
    "CONFLICTS",
    "STATE_CONFLICTS",
    "config_source",
    "offloads_optimizer",
    "read_config",
    "refuse_conflicts",
    "refuse_state_conflicts",
    "resolve_config",
    "section_in",
]

# Top-level keys by which a DeepSpeed configuration without an "fp4" section is known.
_DEEPSPEED_KEYS = ("train_", "zero_", "optimizer", "scheduler", "bf16", "fp16", "gradient_")
# Dotted key of a DeepSpeed setting -> why it cannot be honoured together with the "fp4" section.
CONFLICTS: dict[str, str] = {
    "compile.deepcompile": (
        "DeepCompile rewrites the traced graph around ATen linears and inserts its own gather, "
        "release and reduce nodes; the FP4 autograd function is opaque to it"
    ),
    "hybrid_engine.enabled": (
        "its inference containers take the weights over and generate with kernels that know "
        "nothing of FP4, so that rollouts and training would use different arithmetic"
    ),
    "expert_parallel.enabled": (
        "AutoEP rebuilds MoE blocks as stacked three-dimensional expert weights for a grouped "
        "GEMM: no linear layer is left to convert, and most of the model would stay BF16"
    ),
    "zero_optimization.zero_quantized_weights": (
        "weights would reach the layer through an int8 all-gather, so that E2M1 codes would be "
        "taken of weights that another quantizer has changed already"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "frozen weights are stored as int8 by DeepSpeed, so that E2M1 codes would be taken of "
        "weights that another quantizer has changed already"
    ),
    "tensor_parallel.tp_overlap_comm": (
        "it moves the column-parallel GEMMs into DeepSpeed's own backward, where no FP4 code runs"
    ),
}

# The same for "gradient_communication"; null there lifts them.
COMMUNICATION_CONFLICTS: dict[str, str] = {
    "zero_optimization.zero_quantized_gradients": (
        "it reduces gradients in 4 bits by a path of its own, so that nothing would be left to "
        'send in FP8; switch it off, or set "gradient_communication": null'
    ),
}
# The same for optimizer states of 16 bits.
_OTHER_MASTER = (
    "it replaces DeepSpeed's float32 master weights, or the states, by BF16 or FP16 without scales"
)
STATE_CONFLICTS: dict[str, str] = {
    "zero_optimization.elastic_checkpoint": (
        "it cuts every tensor of the optimizer to the length of the parameters, block scales too, "
        "and restores what is missing in float32 (universal checkpoints do work)"
    ),
    "zero_optimization.zenflow": (
        "its optimizer updates selected channels with float32 states of its own"
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        "its workers hold the states themselves and step with DeepSpeedCPUAdam"
    ),
    "bf16.bf16_master_weights_and_grads": _OTHER_MASTER,
    "bf16.bf16_optimizer_states": _OTHER_MASTER,
    "bfloat16.bf16_master_weights_and_grads": _OTHER_MASTER,
    "bfloat16.bf16_optimizer_states": _OTHER_MASTER,
    "fp16.fp16_master_weights_and_grads": _OTHER_MASTER,
}
_OFFLOAD = "zero_optimization.offload_optimizer"
_NVME = (
    "its swapper writes every tensor of the optimizer as if it were float32, and would mix codes "
    'and scales; "device": "cpu" works'
)
_RATIO = (
    "below 1 a second optimizer, torch.optim.AdamW with float32 states, steps what stays on the "
    "device"
)
_FEEDBACK_STAGE = (
    '"error_feedback" keeps a whole float32 copy of the gradients on every rank, which is what '
    'stages 2 and 3 exist to avoid; it works with stages 0 and 1. Or set "error_feedback": false'
)
_NAMES_IN_ARGS = ("deepspeed_config", "deepscale_config")


def read_config(path: Path) -> dict[str, Any]:
    """The object in the file `path`: JSON, or with comments (HJSON) as DeepSpeed reads it.

    Raises ConfigError for a file that cannot be read or parsed, that holds something else than an
    object, or that gives a key twice in one object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = _parse(path, text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text ({error})") from error
    if not isinstance(content, dict) or not text.strip():
        found = type(content).__name__ if text.strip() else "an empty file"
        raise ConfigError(f"{path}: expected a JSON object, got {found}")
    return content


def section_in(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The section in the file `path`: a DeepSpeed configuration's, or the file is one itself.

    Raises ConfigError for a DeepSpeed configuration without one.
    """
    # "optimizer_states" and "gradient_communication" begin as keys of DeepSpeed do.
    others = content.keys() - SectionModel.model_fields.keys()
    is_deepspeeds = SECTION in content or any(key.startswith(_DEEPSPEED_KEYS) for key in others)
    if not is_deepspeeds and content.keys() & SectionModel.model_fields.keys():
        return content
    section = find_section(content)
    if section is not None:
        return section
    if is_deepspeeds:
        raise ConfigError(
            f'{path}: a DeepSpeed configuration without an "fp4" section trains in high precision; '
            'add  "fp4": {"recipe": "paper"}'
        )
    return content


def _parse(path: Path, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        plain_error = error
    try:
        import hjson
    except ModuleNotFoundError:
        raise ConfigError(f"{path} is not JSON: {plain_error}") from plain_error
    try:
        return hjson.loads(text, object_pairs_hook=_unique_keys)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {plain_error}") from error


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ConfigError(f"keys given twice in one JSON object: {repeated}")
    return content


def resolve_config(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The DeepSpeed configuration of one `deepspeed.initialize` call, found as DeepSpeed finds it.

    `arguments` are the bound arguments of the call. The configuration is `config`, else
    `config_params`, else `args.deepspeed_config` (or its old name `args.deepscale_config`); a
    string is a path or base64. None if there is no configuration, or more than one: DeepSpeed
    itself complains about that.
    """
    sources = [_given(arguments), _from_args(arguments.get("args"))]
    configs = [source for source in sources if source is not None]
    if len(configs) != 1:
        return None
    if isinstance(configs[0], Mapping):
        return configs[0]
    loaded = _load(configs[0])
    if loaded is not None and not isinstance(loaded, Mapping):
        raise ConfigError(f"the DeepSpeed configuration must be a JSON object, not {loaded!r}")
    return loaded


def _load(config: Any) -> Any:
    """What DeepSpeed reads from `config`; None where an old DeepSpeed has yet to refuse it."""
    import deepspeed

    if hasattr(deepspeed, "load_ds_config"):
        return deepspeed.load_ds_config(config)
    # Up to 0.17 DeepSpeedConfig reads a path, else urlsafe base64, and keeps that to itself.
    if os.path.exists(config):
        return read_config(Path(config))
    try:
        return json.loads(base64.urlsafe_b64decode(config).decode())
    except (binascii.Error, ValueError):
        return None


def _given(arguments: Mapping[str, Any]) -> Any:
    config = arguments.get("config")
    return arguments.get("config_params") if config is None else config


def _from_args(args: Any) -> Any:
    for name in _NAMES_IN_ARGS:
        config = getattr(args, name, None)
        if config is not None:
            return config
    return None


def config_source(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, owner) of what `resolve_config` read: an argument (owner None), or one of `args`."""
    for name in ("config", "config_params"):
        if arguments.get(name) is not None:
            return name, None
    args = arguments.get("args")
    return next(n for n in _NAMES_IN_ARGS if getattr(args, n, None) is not None), args


_AUTOTP_SIZE = "tensor_parallel.autotp_size"
_AUTOTP_SCALES = (
    'the layers of AutoTP have scales of their own shards; "tensor_parallel" in the fp4 section is '
    "for Megatron's layers, take it out"
)


def refuse_conflicts(ds_config: Mapping[str, Any], config: Fp4Config) -> None:
    """Raise one ConfigError that names every DeepSpeed setting the FP4 section cannot go with.

    config: the parsed section of `ds_config`.
    """
    if not config.enabled:
        return
    communication = config.communication_spec
    reasons = CONFLICTS if communication is None else {**CONFLICTS, **COMMUNICATION_CONFLICTS}
    found = [key for key in reasons if _is_on(ds_config, key)]
    lines = [f'  "{key}": {_value(ds_config, key)!r}: {reasons[key]}' for key in found]
    stage = _value(ds_config, "zero_optimization.stage") or 0
    if communication is not None and communication.error_feedback and stage > 1:
        lines.append(f'  "zero_optimization.stage": {stage}: {_FEEDBACK_STAGE}')
    if config.asks_for_tensor_parallel and (_value(ds_config, _AUTOTP_SIZE) or 1) > 1:
        lines.append(f'  "{_AUTOTP_SIZE}": {_value(ds_config, _AUTOTP_SIZE)}: {_AUTOTP_SCALES}')
    remedy = '"fp4": {"enabled": false}'
    if config.optimizer_states is not None:
        states = _state_conflicts(ds_config)
        remedy = '"optimizer_states": null' if states and not lines else remedy
        lines += states
    if lines:
        raise ConfigError(
            'the "fp4" section cannot be used together with these DeepSpeed settings:\n'
            + "\n".join(lines)
            + f"\nSwitch them off, or set {remedy}."
        )


def refuse_state_conflicts(ds_config: Mapping[str, Any]) -> None:
    """The same for an optimizer with 16-bit states that the section did not ask for."""
    lines = _state_conflicts(ds_config)
    if lines:
        raise ConfigError(
            "FP16StateAdamW cannot be used together with these DeepSpeed settings:\n"
            + "\n".join(lines)
            + "\nSwitch them off, or take another optimizer."
        )


def _state_conflicts(ds_config: Mapping[str, Any]) -> list[str]:
    found = {key: why for key, why in STATE_CONFLICTS.items() if _is_on(ds_config, key)}
    if str(_value(ds_config, f"{_OFFLOAD}.device")).lower() == "nvme":
        found[f"{_OFFLOAD}.device"] = _NVME
    ratio = _value(ds_config, f"{_OFFLOAD}.ratio")
    if ratio not in (None, 1):
        found[f"{_OFFLOAD}.ratio"] = _RATIO
    return [f'  "{key}": {_value(ds_config, key)!r}: {why}' for key, why in found.items()]


def offloads_optimizer(ds_config: Mapping[str, Any]) -> bool:
    """Whether the optimizer steps on the host; also by the old key "cpu_offload"."""
    return _value(ds_config, f"{_OFFLOAD}.device") == "cpu" or _is_on(
        ds_config, "zero_optimization.cpu_offload"
    )


def _is_on(ds_config: Mapping[str, Any], key: str) -> bool:
    return _value(ds_config, key) not in (None, False)


def _value(ds_config: Mapping[str, Any], key: str) -> Any:
    value: Any = ds_config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
