"""Finding a checkpoint: by tag, by `latest`, or the newest that can be trusted."""

from __future__ import annotations

import logging
from pathlib import Path

from fp4_plugin.checkpoint.files import disk_problem
from fp4_plugin.checkpoint.manifest import CHECKPOINT_NAME, Manifest
from fp4_plugin.checkpoint.pending import LATEST, replaced_folders
from fp4_plugin.checkpoint.verification import verify_files, verify_names
from fp4_plugin.errors import CheckpointError

__all__ = ["committed", "find_folder", "last_good", "read_latest"]

logger = logging.getLogger("fp4_plugin")


def committed(save_dir: Path) -> list[Path]:
    """Folders with a readable manifest and files of the right names and sizes, newest first.

    Damaged ones are logged. A checkpoint that stepped aside for a new one of its tag is among them
    unless that has come. Folders without a manifest are not: nobody knows whether they are whole.
    """
    save_dir = Path(save_dir)
    places = [p.parent for p in save_dir.glob(f"*/{CHECKPOINT_NAME}") if p.parts[-2][0] != "."]
    found: list[tuple[float, Path]] = []
    for folder in (*places, *replaced_folders(save_dir)):
        try:
            manifest = Manifest.read(folder)
            if manifest is None or (folder not in places and (save_dir / manifest.tag).exists()):
                continue
            verify_names(folder, manifest)
        except CheckpointError as error:
            logger.warning("fp4: passed over a checkpoint: %s", error)
            continue
        found.append((manifest.created, folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def last_good(save_dir: Path) -> Path | None:
    """The newest committed checkpoint in `save_dir` whose files are as written; None without one.

    Damaged newer ones are logged as warnings. Reads all of what it returns, on this process.
    """
    for folder in committed(save_dir):
        try:
            manifest = Manifest.read(folder)
            if manifest is not None:
                verify_files(folder, manifest)
                return folder
        except CheckpointError as error:
            logger.warning("fp4: passed over a checkpoint: %s", error)
    return None


def find_folder(save_dir: Path, tag: str) -> Path:
    """The folder of `tag`: save_dir/tag, or where it stepped aside to while a save was killed."""
    folder = Path(save_dir) / tag
    if folder.exists():
        return folder
    for replaced in replaced_folders(save_dir):
        try:
            manifest = Manifest.read(replaced)
        except CheckpointError:
            continue
        if manifest is not None and manifest.tag == tag:
            return replaced
    return folder


def read_latest(save_dir: Path, name: str = LATEST) -> str | None:
    """The tag that the file `name` holds; None if there is no such file, or it is empty.

    Raises CheckpointError if it cannot be read.
    """
    path = Path(save_dir) / name
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise disk_problem("read", path, error) from error
