"""The DeepSpeed JSON of a run: the user's or the built-in one, completed and made explicit.

Precedence: a flag on the command line, then the JSON, then the model preset. What comes out is the
exact dictionary that `deepspeed.initialize` gets; it is written beside the logs. "auto", which only
the Hugging Face Trainer can fill in, counts as "not stated" where we have a value and is refused
elsewhere.
"""

from __future__ import annotations

import copy
from typing import Any

from fp4_plugin.errors import ConfigError
from fp4_plugin.integrations.deepspeed.ds_config import read_config
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.presets import ModelPreset
from fp4_plugin.pretrain.sample_order import BatchLayout

__all__ = ["built_in_config", "complete_config", "twin_config"]

AUTO = "auto"
TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def built_in_config() -> dict[str, Any]:
    """ZeRO-2, BF16, AdamW without compiled extensions, the paper's FP4 recipe."""
    return {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "fp4": {"recipe": "paper"},
    }


def complete_config(
    options: PretrainOptions, preset: ModelPreset, world_size: int
) -> tuple[dict[str, Any], BatchLayout]:
    """The full DeepSpeed configuration for `world_size` ranks, and its batch layout."""
    config = read_config(options.config) if options.config else built_in_config()
    config = _without_auto(config)
    for key in config.keys() & {"zero_optimization", "bf16", "fp16"}:
        _section(config, key)
    training = preset.training
    if options.zero_stage is not None:
        _section(config, "zero_optimization")["stage"] = options.zero_stage
    if options.recipe is not None:
        _section(config, "fp4")["recipe"] = options.recipe
    if "fp4" not in config or config["fp4"] == {"enabled": False}:
        # Converts nothing, but makes the checkpoints those of this package: verified.
        config["fp4"] = {"recipe": "bf16"}
    if not any("enabled" in config.get(kind, {}) for kind in ("bf16", "fp16")):
        _section(config, "bf16")["enabled"] = True
    config.setdefault("gradient_clipping", training.gradient_clipping)
    _complete_optimizer(config, options, preset)
    layout = _batch_layout(config, options, preset, world_size)
    batch = (layout.global_batch, layout.micro_batch, layout.grad_accum)
    config.update(zip(TRIPLE, batch, strict=True))
    _complete_monitors(config, options)
    config.setdefault("steps_per_print", 1 << 30)  # the job logs its own lines
    return config, layout


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """A copy without the "auto" values that are ours to fill in; other ones are refused."""
    config = copy.deepcopy(config)
    ours = {(key,) for key in (*TRIPLE, "gradient_clipping")} | {
        *(("optimizer", "params", key) for key in ("lr", "betas", "eps", "weight_decay")),
        *((kind, "enabled") for kind in ("bf16", "fp16")),
    }

    def strip(node: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in list(node.items()):
            here = (*path, key)
            if isinstance(value, dict):
                strip(value, here)
            elif value == AUTO and here in ours:
                del node[key]
            elif value == AUTO:
                raise ConfigError(
                    f'{".".join(here)}: "auto" is filled in by the Hugging Face Trainer only; '
                    "write a value or leave the key out"
                )

    strip(config, ())
    return config


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`, made if there is none."""
    section = config.setdefault(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f'"{key}" in the DeepSpeed JSON must be an object, not {section!r}')
    return section


def _complete_optimizer(
    config: dict[str, Any], options: PretrainOptions, preset: ModelPreset
) -> None:
    training = preset.training
    optimizer = _section(config, "optimizer")
    optimizer.setdefault("type", "AdamW")
    params = _section(optimizer, "params")
    if options.lr is not None:
        params["lr"] = options.lr
    params.setdefault("lr", training.peak_lr)
    if str(optimizer["type"]).lower() in ("adam", "adamw"):
        params.setdefault("betas", list(training.betas))
        params.setdefault("eps", training.eps)
        params.setdefault("weight_decay", training.weight_decay)


def _batch_layout(
    config: dict[str, Any], options: PretrainOptions, preset: ModelPreset, world_size: int
) -> BatchLayout:
    """Complete (global, micro, accumulation) from what is stated; refuse what cannot be met."""
    total, micro, accum = (_positive_or_none(config, key) for key in TRIPLE)
    if options.micro_batch or options.grad_accum:
        total = None  # the flags decide anew
    micro, accum = options.micro_batch or micro, options.grad_accum or accum
    if total is None:
        total = _default_total(preset, world_size, micro, accum)
    if micro is None:
        per_rank = total // (world_size * (accum or 1))
        micro = per_rank if accum else _largest_divisor(per_rank, preset.training.micro_batch)
    if accum is None:
        accum = total // (world_size * max(1, micro))
    if micro < 1 or accum < 1 or micro * accum * world_size != total:
        raise ConfigError(
            f"train_batch_size {total} is not micro batch {micro} x accumulation {accum} x "
            f"{world_size} ranks; state two of the three"
        )
    return BatchLayout(micro, accum, world_size)


def _positive_or_none(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f'"{key}" in the DeepSpeed JSON is {value!r}; a number above 0 is needed')
    return value


def _default_total(
    preset: ModelPreset, world_size: int, micro: int | None, accum: int | None
) -> int:
    """The preset's batch, rounded up to what this many ranks can share."""
    if micro and accum:
        return micro * accum * world_size
    unit = (micro or accum or 1) * world_size
    return -(-preset.training.batch_sequences // unit) * unit


def _largest_divisor(number: int, limit: int) -> int:
    return next((d for d in range(min(number, limit), 0, -1) if number % d == 0), 1)


def _complete_monitors(config: dict[str, Any], options: PretrainOptions) -> None:
    """CSV unless the JSON says no, TensorBoard on request; in the folder of the run by default."""
    if options.tensorboard:
        _section(config, "tensorboard")["enabled"] = True
    config.setdefault("csv_monitor", {"enabled": True})
    for name in ("csv_monitor", "tensorboard"):
        if name in config:
            monitor = _section(config, name)
            monitor.setdefault("output_path", str(options.output / "monitor" / name))
            monitor.setdefault("job_name", "fp4")


def twin_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same job in plain BF16: only the `fp4` section and the monitors' job name differ."""
    twin = copy.deepcopy(config)
    twin["fp4"] = {"recipe": "bf16"}
    for section in ("csv_monitor", "tensorboard"):
        if section in twin:
            twin[section]["job_name"] = "bf16_twin"
    return twin
