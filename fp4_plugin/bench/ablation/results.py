"""Finished runs on disk: one JSON file each, found again by the hash of its settings."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp4_plugin.bench.ablation.settings import RunSettings
from fp4_plugin.bench.ablation.training import RunResult
from fp4_plugin.errors import ConfigError, DataError

__all__ = ["ResultStore", "write_atomically"]


@dataclass(frozen=True)
class ResultStore:
    """`folder`/runs/<arm>-seed<n>-lr<rate>-<key>.json"""

    folder: Path

    def path(self, settings: RunSettings) -> Path:
        name = f"{settings.arm}-seed{settings.seed}-lr{settings.learning_rate:g}-{settings.key()}"
        return self.folder / "runs" / f"{name}.json"

    def load(self, settings: RunSettings) -> RunResult | None:
        """The finished run of these settings, or None. Raises DataError for an unreadable file."""
        path = self.path(settings)
        if not path.is_file():
            return None
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            held_out, losses = record["held_out_loss"], tuple(record["train_losses"])
            return RunResult(settings, held_out, losses, record["seconds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not the result of a run ({type(error).__name__}: {error}); remove it "
                "and the run will be made again"
            ) from error

    def save(self, result: RunResult) -> None:
        record = {
            "status": "diverged" if result.has_diverged else "finished",
            "held_out_loss": result.held_out_loss,
            "steps_done": len(result.train_losses),
            "seconds": result.seconds,
            "settings": {**asdict(result.settings), "key": result.settings.key()},
            "machine": {"processor": platform.machine(), "torch": torch.__version__, "threads": 1},
            "train_losses": result.train_losses,
        }
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_atomically(self.path(result.settings), text)


def write_atomically(path: Path, text: str) -> None:
    """Write under another name and rename: a reader sees the old file or the new one, whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
