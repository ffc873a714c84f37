"""Is there room for a checkpoint? Asked before the first byte is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from fp4_plugin.checkpoint.files import disk_problem
from fp4_plugin.errors import CheckpointError

__all__ = ["require_space"]

# What formats add to the bytes of tensors, and what others may write meanwhile.
_MARGIN_FRACTION = 0.02
_MARGIN_BYTES = 64 * 1024


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError unless the file system of `folder` has `needed_bytes` and a margin.

    needed_bytes: of all ranks that write to it. Quotas are not seen: they show when writing.
    """
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise disk_problem("ask for the free space of", folder, error) from error
    wanted_bytes = int(needed_bytes * (1 + _MARGIN_FRACTION)) + _MARGIN_BYTES
    if free_bytes < wanted_bytes:
        raise CheckpointError(
            f"not enough space for a checkpoint in {folder}: it takes about "
            f"{_readable(wanted_bytes)}, {_readable(free_bytes)} are free; remove old checkpoints, "
            f"or save to another disk. Nothing was written"
        )


def _readable(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
