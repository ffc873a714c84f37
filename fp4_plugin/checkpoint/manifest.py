"""fp4_checkpoint.json: what a checkpoint consists of, by checksum, and what it was taken from.

    {"format": "fp4-plugin checkpoint", "format_version": 1, "tag": ..., "id": ..., "created": ...,
     "files": {"mp_rank_00_model_states.pt": {"bytes": ..., "sha256": ..., "rank": 0}, ...},
     "facts": {...}, "sha256": of all of the above}

It is written last, so a folder that has one was complete. `facts` belong to the caller: they say
to which run the checkpoint belongs. Checksums are SHA-256, so `sha256sum` can check them as well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4_plugin.checkpoint.files import disk_problem, write_json
from fp4_plugin.errors import CheckpointError

__all__ = ["CHECKPOINT_NAME", "FileRecord", "Manifest", "describe_file", "file_names"]

CHECKPOINT_NAME = "fp4_checkpoint.json"

_FORMAT = "fp4-plugin checkpoint"
_VERSION = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes, SHA-256 as hex digits, and the rank that wrote the file."""

    bytes: int
    sha256: str
    rank: int = 0


@dataclass(frozen=True)
class Manifest:
    """The content of fp4_checkpoint.json; paths in `files` are relative to its folder, with "/".

    identifier: unique to this checkpoint. created: seconds since 1970, by the clock of the writer.
    """

    tag: str
    identifier: str
    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)

    def write(self, folder: Path) -> None:
        """Put the file into `folder`. Raises CheckpointError."""
        record = self._record()
        write_json(folder / CHECKPOINT_NAME, {**record, "sha256": _digest(record)})

    @property
    def digest(self) -> str:
        """SHA-256 of all that the file says."""
        return _digest(self._record())

    def _record(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "format_version": _VERSION,
            "tag": self.tag,
            "id": self.identifier,
            "created": self.created,
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
            "facts": dict(self.facts),
        }

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None if there is none. Raises CheckpointError if damaged."""
        path = folder / CHECKPOINT_NAME
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls._parse(path, record)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_problem("read", path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _parse(cls, path: Path, record: dict[str, Any]) -> Manifest:
        version = record.get("format_version")
        if record.get("format") == _FORMAT and isinstance(version, int) and version > _VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this release of fp4-plugin reads up to "
                f"{_VERSION}: load it with the release that wrote it, or a later one"
            )
        stated = record.pop("sha256")
        if stated != _digest(record):
            raise CheckpointError(f"{path} is damaged: its content does not have its checksum")
        return cls(
            tag=record["tag"],
            identifier=record["id"],
            files={name: FileRecord(**one) for name, one in record["files"].items()},
            facts=record["facts"],
            created=record["created"],
        )


def describe_file(path: Path, rank: int = 0) -> FileRecord:
    """Size and checksum of `path`, from one pass over it. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size, checksum = 0, hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                size += len(chunk)
                checksum.update(chunk)
    except OSError as error:
        raise disk_problem("read", path, error) from error
    return FileRecord(size, checksum.hexdigest(), rank)


def file_names(folder: Path) -> list[str]:
    """All files below `folder`, as a manifest names them; the manifest itself is none of them."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != CHECKPOINT_NAME)


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
