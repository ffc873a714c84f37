"""`save_checkpoint` and `load_checkpoint` of one engine, made safe; see the modules for how.

The format stays DeepSpeed's: a folder per tag that plain DeepSpeed loads, with a few files more.
Only DeepSpeed's usual engine is served, which has written when `save` returns. With its
asynchronous ones nobody here knows when a file is complete: those go their own way, unverified.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4_plugin.activation import Activation
from fp4_plugin.errors import ConfigError
from fp4_plugin.integrations.deepspeed.agreement import Groups
from fp4_plugin.integrations.deepspeed.checkpoint_facts import run_facts
from fp4_plugin.integrations.deepspeed.checkpoint_loading import Loader
from fp4_plugin.integrations.deepspeed.checkpoint_saving import Saver
from fp4_plugin.integrations.deepspeed.communication import EngineCommunication
from fp4_plugin.telemetry.manifest import MANIFEST_NAME, write_manifest

__all__ = ["attach_checkpoints"]

logger = logging.getLogger("fp4_plugin")

_SYNCHRONOUS = ("TorchCheckpointEngine",)


def attach_checkpoints(
    engine: Any,
    activation: Activation,
    communication: EngineCommunication | None,
    groups: Groups,
) -> None:
    """Wrap the two methods on this engine object only: two engines in a process may differ."""
    proxy = weakref.proxy(engine)
    parts = (proxy, activation, communication, groups)
    kind = type(engine.checkpoint_engine).__name__
    if kind in _SYNCHRONOUS:
        _wrap(engine, "save_checkpoint", Saver(*parts).save)
        _wrap(engine, "load_checkpoint", Loader(*parts).load)
        return
    if engine.global_rank == 0:
        logger.warning(
            "fp4: DeepSpeed's %s writes checkpoints in its own time: they are neither verified nor "
            'put in place at once. Take the "checkpoint" writer out of the configuration for that',
            kind,
        )
    unverified = _Unverified(*parts[:3])
    _wrap(engine, "save_checkpoint", unverified.save)
    _wrap(engine, "load_checkpoint", unverified.load)


def _wrap(engine: Any, name: str, around: Any) -> None:
    original = getattr(engine, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        folder = next(iter(signature.parameters))
        if not arguments[folder]:
            raise ConfigError(f"{name}: {folder} is {arguments[folder]!r}: give a folder")
        return around(original, arguments)

    setattr(engine, name, wrapped)


class _Unverified:
    """Our files in checkpoints that DeepSpeed writes and reads in its own way."""

    def __init__(
        self, engine: Any, activation: Activation, communication: EngineCommunication | None
    ) -> None:
        self._engine = engine
        self._activation = activation
        self._communication = communication

    def save(self, original: Any, arguments: Mapping[str, Any]) -> Any:
        engine, tag = self._engine, arguments.get("tag")
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = Path(arguments["save_dir"]) / name
        result = original(**arguments)
        if self._communication is not None:
            self._communication.memory.save(folder)
            self._communication.exchange_reports()
        if engine.global_rank == 0:
            manifest = self._activation.manifest(**run_facts(engine))
            write_manifest(folder / MANIFEST_NAME, manifest)
        return result

    def load(self, original: Any, arguments: Mapping[str, Any]) -> Any:
        result = original(**arguments)
        if result[0] is not None and self._communication is not None:
            self._communication.memory.load(Path(result[0]).parent)
        return result
