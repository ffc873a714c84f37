"""Universal checkpoints of ZeRO-1 and -2 for ZeRO-3, and the other way.

Weights and moments are per parameter in a universal checkpoint, whatever stage they come from.
Three details differ, and DeepSpeed (0.19) reads those of the same stage only: the name of the file
with the counters of the run, the form of `zero/optimizer_state.pt`, and that ZeRO-3 writes bare
flat tensors where the others write dictionaries. Here a stage is shown a folder of links in which
all is as it expects it; the checkpoint itself stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4_plugin.errors import CheckpointError

__all__ = [
    "LATEST",
    "bare_tensors_named",
    "named_tensors_bared",
    "original_path",
    "readable_by_stage",
]

LATEST = "latest_universal"

_COUNTERS = re.compile(r"(zero_pp_rank_0_)?(mp_rank_\d+_model_states\.pt)")
_ZERO3_PREFIX = "zero_pp_rank_0_"
_OPTIMIZER = "optimizer_state.pt"
_STEP = "step.pt"
_SHARED_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version")


def readable_by_stage(stage: int, load_dir: Path, tag: str, scratch: Path) -> Path:
    """A folder from which ZeRO of `stage` loads `tag`: `load_dir`, or `scratch` with links in it.

    Raises CheckpointError if the optimiser state of another stage is missing or unreadable.
    """
    folder = load_dir / tag
    names = [match for path in _files(folder) if (match := _COUNTERS.fullmatch(path.name))]
    is_zero3 = stage == 3
    if not names or any(bool(match[1]) == is_zero3 for match in names):
        return load_dir
    view = scratch / tag
    _link_all(folder, view, except_for="zero")
    for match in names:
        name = (_ZERO3_PREFIX if is_zero3 else "") + match[2]
        (view / name).symlink_to(folder.absolute() / match[0])
    _link_all(folder / "zero", view / "zero", except_for=_OPTIMIZER)
    torch.save(_for_any_stage(folder / "zero"), view / "zero" / _OPTIMIZER)
    return scratch


@contextlib.contextmanager
def bare_tensors_named(parameters: Iterator[nn.Parameter], scratch: Path) -> Iterator[None]:
    """Meanwhile ZeRO-1 and -2 also load tensors of ZeRO-3, one parameter at a time by `scratch`."""
    patched: list[tuple[Any, Callable[..., Any]]] = []
    for parameter in parameters:
        load = getattr(parameter, "load_hp_checkpoint_state", None)
        if load is not None:
            patched.append((parameter, load))
            setattr(parameter, load.__name__, _by_scratch(parameter, load, scratch))
    try:
        yield
    finally:
        for parameter, load in patched:
            setattr(parameter, load.__name__, load)


@contextlib.contextmanager
def named_tensors_bared(optimizer: Any, scratch: Path) -> Iterator[None]:
    """Meanwhile ZeRO-3 of DeepSpeed before 0.19 also loads the dictionaries of ZeRO-1 and -2."""
    load = getattr(optimizer, "load_hp_checkpoint_state", None)
    if load is None or "param" in inspect.signature(load).parameters:  # since 0.19
        yield
        return

    def load_bare(folder: str, key: str) -> Any:
        value = _read(Path(folder) / f"{key}.pt")
        if not isinstance(value, Mapping):
            return load(folder, key)
        with tempfile.TemporaryDirectory(dir=scratch) as bare:
            torch.save(value["param"], Path(bare) / f"{key}.pt")
            return load(bare, key)

    optimizer.load_hp_checkpoint_state = load_bare
    try:
        yield
    finally:
        del optimizer.load_hp_checkpoint_state


def _by_scratch(parameter: nn.Parameter, load: Callable[..., Any], scratch: Path) -> Any:
    def load_named(folder: str, *args: Any, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory(dir=scratch) as named:
            for path in _files(Path(folder)):
                value = _read(path)
                if path.name != _STEP:
                    value = {"param": _shaped(value, parameter, path)}
                torch.save(value, Path(named) / path.name)
            return load(named, *args, **kwargs)

    return load_named


def _shaped(value: torch.Tensor, parameter: nn.Parameter, path: Path) -> torch.Tensor:
    if value.numel() != parameter.numel():
        raise CheckpointError(
            f"{path} has {value.numel():,} elements, the parameter {parameter.numel():,}: a "
            "checkpoint of ZeRO-3 is taken over by ZeRO-1 and -2 for the same model, and without "
            "tensor parallelism; load it with ZeRO-3"
        )
    return value.view(parameter.shape)


def original_path(path: str | None, scratch: Path) -> str | None:
    """What DeepSpeed says it has loaded, by its name in the checkpoint."""
    if path is None or scratch not in Path(path).parents:
        return path
    return str(Path(path).readlink())


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _link_all(folder: Path, view: Path, except_for: str) -> None:
    view.mkdir(parents=True)
    for path in _files(folder):
        if path.name != except_for:
            (view / path.name).symlink_to(path.absolute())


def _for_any_stage(zero: Path) -> dict[str, Any]:
    """The small part of `zero/optimizer_state.pt`, under the names of either form."""
    saved = _read(zero / _OPTIMIZER)
    groups = saved.get("param_groups", [])
    state = {"step": _step(zero, saved, groups)}
    return {
        "ds_version": _deepspeed_version(),  # which ZeRO-3 does not write
        **{key: saved[key] for key in _SHARED_KEYS if key in saved},
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
    }


def _step(zero: Path, saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> Any:
    """Steps done: ZeRO-3 has them in its first state, the others per parameter, FusedAdam a group.

    None where nobody has counted.
    """
    states = saved.get("optimizer_state_dict", {}).get("state", {})
    if states:
        return states[0].get("step")
    per_parameter = next(zero.glob(f"*/{_STEP}"), None)
    if per_parameter is not None:
        return _read(per_parameter)
    return groups[0].get("step") if groups else None


def _read(path: Path) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: the universal checkpoint is incomplete; convert it again with "
            "python -m deepspeed.checkpoint.ds_to_universal"
        )
    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # A damaged file fails in whatever way its bytes say.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}): convert the checkpoint "
            "again with python -m deepspeed.checkpoint.ds_to_universal"
        ) from error


def _deepspeed_version() -> str:
    import deepspeed

    return str(deepspeed.__version__)
