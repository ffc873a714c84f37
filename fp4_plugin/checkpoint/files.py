"""Files that are there whole or not at all, also after a power failure.

A file is written beside its name, flushed to the disk, renamed, and the folder is flushed: whoever
reads sees the old content or the new one. `disk_problem` says what a failure means for a person.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fp4_plugin.errors import CheckpointError

__all__ = [
    "disk_problem",
    "flush",
    "flush_tree",
    "remove_tree",
    "rename",
    "write_json",
    "write_safetensors",
    "write_text",
]

_ASIDE = ".tmp"
# An errno -> what a person can do about it.
_REMEDIES = {
    errno.ENOSPC: "free some space there, or save to another disk",
    errno.EDQUOT: "remove files, or save elsewhere",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save to another disk",
    errno.EROFS: "save elsewhere, or mount it writable",
    errno.EACCES: "give this user the right to write there, or save elsewhere",
    errno.EPERM: "give this user the right to write there, or save elsewhere",
    errno.ENOTDIR: "a file is where a folder has to be: remove it, or save elsewhere",
    errno.EEXIST: "a file is where a folder has to be: remove it, or save elsewhere",
    errno.EIO: "the disk or the network file system fails: see the log of the machine",
    errno.ESTALE: "the network file system lost the folder: mount it again",
}
# What torch.save says when the disk took less than it was given, and how much "full" leaves free.
_SHORT_WRITE = ("file write failed", "unexpected pos")
_FULL_BYTES = 1 << 20


def disk_problem(action: str, path: str | Path, error: Exception) -> CheckpointError:
    """A CheckpointError for `error`: what could not be done (`action`) to `path`, why, a remedy."""
    number = getattr(error, "errno", None) or _errno_behind(str(error), Path(path))
    reason = f"{type(error).__name__}: {error}" if number is None else os.strerror(number)
    remedy = f"; {_REMEDIES[number]}" if number in _REMEDIES else ""
    problem = CheckpointError(f"cannot {action} {path}: {reason}{remedy}")
    problem.__cause__ = error
    return problem


def _errno_behind(text: str, path: Path) -> int | None:
    """torch and safetensors say in words of their own that a file could not be written."""
    for number in _REMEDIES:
        if f"os error {number})" in text:
            return number
    if not any(words in text for words in _SHORT_WRITE):
        return None
    try:
        if shutil.disk_usage(path.parent).free < _FULL_BYTES:
            return errno.ENOSPC
    except OSError as error:
        return error.errno
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return errno.EDQUOT if limit == resource.RLIM_INFINITY else errno.EFBIG


@contextlib.contextmanager
def _into_place(path: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end of the block becomes `path`, durably."""
    aside = path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        flush(aside)
        rename(aside, path)
    except Exception as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(error, CheckpointError):
            raise
        raise disk_problem("write", path, error) from error


def write_text(path: str | Path, text: str) -> None:
    """Replace the file `path` by `text` (UTF-8). Raises CheckpointError that names the file."""
    with _into_place(Path(path)) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | Path, record: Mapping[str, Any]) -> None:
    """Replace the file `path` by `record` as JSON. Raises CheckpointError that names the file."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Replace the file `path` by `tensors` (any device) and strings.

    Raises CheckpointError that names the file.
    """
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with _into_place(Path(path)) as aside:
        save_file(whole, aside, metadata=dict(metadata or {}))


def rename(source: Path, target: Path) -> None:
    """`os.replace` that survives a power failure; both are on one file system."""
    os.replace(source, target)
    for folder in dict.fromkeys((target.parent, source.parent)):
        flush(folder)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot flush a folder; others are a real failure.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush `folder` and all folders in it, inner ones first; files are left to their writers."""
    inner = sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True)
    for path in (*inner, folder):
        flush(path)


def remove_tree(folder: Path) -> OSError | None:
    """Remove `folder` if it is there; what prevents that is returned, not raised."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue  # another process removes it too
        except OSError as error:
            return error
    return None
