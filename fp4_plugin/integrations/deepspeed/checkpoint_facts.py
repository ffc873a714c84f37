"""What a checkpoint says of the run it was taken from, and whether another run may load it.

    fp4       the section, resolved           what is trained, and in which arithmetic
    models    parameter -> shape, dtype, trainable; per distinct part (pipeline stage, shard)
    layout    ranks, ZeRO stage, tensor and pipeline parallelism

A run that only takes the weights needs the same names and shapes, nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp4_plugin.activation import Activation
from fp4_plugin.errors import CheckpointError
from fp4_plugin.integrations.deepspeed.agreement import Groups, gather

__all__ = [
    "FRAMEWORK",
    "checkpoint_bytes",
    "checkpoint_facts",
    "converted_states",
    "other_layout",
    "other_model",
    "other_recipe",
    "run_facts",
]

FRAMEWORK = "deepspeed"
# Keys of the section that say how, not what is trained; "recipe" only names a set of values.
_MAY_CHANGE = ("on_mismatch", "recipe", "telemetry", "tensor_parallel")
# These are converted when they are loaded.
_STATES = "optimizer_states"
_STATE_BYTES = 4  # optimizer states leave in float32, whatever they are kept in

Model = Mapping[str, list[Any]]


def run_facts(engine: Any) -> dict[str, Any]:
    """What the run manifest should know of the engine; the ranks agreed on it when it was made."""
    import torch.distributed as dist

    return {
        "world_size": dist.get_world_size(),
        "zero_stage": engine.zero_optimization_stage(),
        "tensor_parallel_size": max(1, engine.autotp_size()),
        "global_steps": engine.global_steps,
    }


def checkpoint_facts(engine: Any, activation: Activation, groups: Groups) -> dict[str, Any]:
    """The facts of the manifest of a checkpoint; a collective over the ranks of the engine."""
    model = _model_of(engine)
    digest = hashlib.sha256(json.dumps(model).encode()).hexdigest()
    digests: dict[int, str] = gather(digest, groups)
    distinct = list(dict.fromkeys(digests.values()))
    speaks = min(rank for rank, one in digests.items() if one == digest) == engine.global_rank
    told = gather((digest, model) if speaks else None, groups)
    models = dict(one for one in told.values() if one is not None)
    return {
        "framework": FRAMEWORK,
        "fp4": activation.config.resolved(),
        "layout": _layout_of(engine),
        "global_steps": engine.global_steps,
        "models": [models[one] for one in distinct],
        "model_of_rank": {str(rank): distinct.index(one) for rank, one in digests.items()},
    }


def _model_of(engine: Any) -> dict[str, list[Any]]:
    return {
        name: [
            list(getattr(parameter, "ds_shape", parameter.shape)),  # ZeRO-3 keeps the whole shape
            str(parameter.dtype).removeprefix("torch."),
            parameter.requires_grad,
        ]
        for name, parameter in engine.module.named_parameters()
    }


def _layout_of(engine: Any) -> dict[str, Any]:
    import torch.distributed as dist

    return {
        "world_size": dist.get_world_size(),
        "data_parallel_size": engine.seq_dp_world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "tensor_parallel_size": max(1, engine.autotp_size(), engine.mp_world_size),
        "pipeline_stages": engine.num_stages if engine.pipeline_parallelism else 1,
        # Also without ZeRO: DeepSpeed's BF16_Optimizer writes a part per rank.
        "partitioned_optimizer": engine.save_zero_checkpoint,
    }


def other_recipe(activation: Activation, facts: Mapping[str, Any]) -> CheckpointError | None:
    """Name the keys of the section that differ, with both values; None if none matters."""
    saved, mine = facts["fp4"], activation.config.resolved()
    may_change = (*_MAY_CHANGE, *([] if _are_codes_for_adamw(saved, mine) else [_STATES]))
    lines = [
        f'  "{path}": {json.dumps(before)} in the checkpoint, {json.dumps(now)} here'
        for path, before, now in _differences(saved, mine)
        if not any(path == key or path.startswith(f"{key}.") for key in may_change)
    ]
    if not lines:
        return None
    return CheckpointError("it was trained with another recipe:\n" + "\n".join(lines))


def converted_states(activation: Activation, facts: Mapping[str, Any]) -> str | None:
    """How the states of this run are kept, if the checkpoint's are converted to that."""
    saved, mine = (one.get(_STATES) for one in (facts["fp4"], activation.config.resolved()))
    formats = [
        None if one is None else (one["exp_avg"], one["exp_avg_sq"]) for one in (saved, mine)
    ]
    if formats[0] == formats[1]:
        return None
    before, now = ("float32" if one is None else " and ".join(one) for one in formats)
    return f"optimizer states kept as {before} go on as {now}"


def _are_codes_for_adamw(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Whether states are stored as codes, and the optimizer of this run knows none."""
    states = saved.get(_STATES) or {}
    return states.get("checkpoint") == "native" and mine.get(_STATES) is None


def _differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key path, value, other value); a key that an older release did not know counts as null."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            below = f"{path}.{key}" if path else key
            yield from _differences(one.get(key), other.get(key), below)
    elif one != other:
        yield path, one, other


def other_model(
    engine: Any, facts: Mapping[str, Any], *, weights_only: bool
) -> CheckpointError | None:
    """Name the first parameter that differs; None if none does, or nobody can tell.

    weights_only: only names and shapes matter, not dtypes and, mostly, what is trained.
    """
    saved, mine = _saved_model(engine.global_rank, facts), _model_of(engine)
    if saved is None:
        return None
    fields = ("shape", "dtype", "trainable")[: 1 if weights_only else 3]
    for name in dict.fromkeys([*mine, *saved]):
        if name not in saved or name not in mine:
            where = "the checkpoint" if name not in mine else "this model"
            return _another_model(f"only {where} has a parameter {name!r}")
        for field, before, now in zip(fields, saved[name], mine[name], strict=False):
            if before != now:
                return _another_model(f"{name!r} has {field} {before} in it, {now} here")
        if saved[name][-1] and not mine[name][-1] and facts["layout"]["zero_stage"] > 1:
            return CheckpointError(
                f"{name!r} was trained and is frozen now, which DeepSpeed cannot load from a "
                f"checkpoint of ZeRO-{facts['layout']['zero_stage']}: freeze it after loading"
            )
    return None


def _saved_model(rank: int, facts: Mapping[str, Any]) -> Model | None:
    models, of_rank = facts["models"], facts["model_of_rank"]
    if len(models) == 1:
        return models[0]
    return models[of_rank[str(rank)]] if str(rank) in of_rank else None


def _another_model(difference: str) -> CheckpointError:
    return CheckpointError(
        f"it is of another model: {difference}; build the model that was saved, or load another "
        "checkpoint"
    )


def other_layout(engine: Any, facts: Mapping[str, Any]) -> CheckpointError | None:
    """Name what differs in how the job is spread over ranks; None if the states fit."""
    saved, mine = facts["layout"], _layout_of(engine)
    differing = [key for key in mine if saved.get(key) != mine[key]]
    whole = not (saved["partitioned_optimizer"] or mine["partitioned_optimizer"])
    if not differing or (whole and set(differing) <= {"world_size", "data_parallel_size"}):
        return None
    lines = [f"  {key}: {saved.get(key)} in the checkpoint, {mine[key]} here" for key in differing]
    return CheckpointError(
        "it was saved by a job of another layout:\n"
        + "\n".join(lines)
        + "\nStart the job as it was; or convert the checkpoint to the universal format (python -m "
        'deepspeed.checkpoint.ds_to_universal) and set "checkpoint": {"load_universal": true}; or '
        "load the weights alone (load_module_only=True)"
    )


def checkpoint_bytes(engine: Any) -> int:
    """About how much this rank will write: weights, if it writes them, and optimizer states."""
    writes_weights = engine.save_non_zero_checkpoint or engine.has_moe_layers
    writes_states = engine.save_zero_checkpoint or engine.save_non_zero_checkpoint
    num_bytes = 0
    if writes_weights:
        num_bytes += sum(p.numel() * p.element_size() for p in engine.module.parameters())
    if not writes_states or engine.basic_optimizer is None:
        return num_bytes
    for parameter, states in engine.basic_optimizer.state.items():
        tensors = [state for state in states.values() if torch.is_tensor(state)]
        num_states = sum(state.numel() == parameter.numel() for state in tensors)
        num_bytes += parameter.numel() * _STATE_BYTES * (num_states + 1)  # the master weights
    return num_bytes
