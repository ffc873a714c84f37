"""A checkpoint while it is written: aside, and in one moment there.

    save_dir/.fp4_saving.<id>/<tag>/...      files are written and flushed here, the manifest last
    save_dir/<tag>                           the folder is renamed to this
    save_dir/latest                          and named here, by a file that is replaced whole

A checkpoint of the same tag steps aside to save_dir/.fp4_replaced.<id> in between, and is deleted
when the new one is in place. A process that is killed leaves such folders behind: the next save
removes them, and brings a replaced checkpoint back whose successor never came. Whoever saves holds
a lock in its folder, by which another save to the same place knows that it is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path, PurePosixPath

from fp4_plugin.checkpoint.files import (
    disk_problem,
    flush,
    flush_tree,
    remove_tree,
    rename,
    write_text,
)
from fp4_plugin.checkpoint.manifest import CHECKPOINT_NAME, Manifest
from fp4_plugin.errors import CheckpointError, ConfigError

__all__ = ["LATEST", "REPLACED", "PendingCheckpoint", "replaced_folders"]

logger = logging.getLogger("fp4_plugin")

LATEST = "latest"
REPLACED = ".fp4_replaced."
_SAVING = ".fp4_saving."
_LOCK = ".lock"


class PendingCheckpoint:
    """Where the checkpoint `tag` of `save_dir` is written until `commit`.

    root: the folder aside. folder: what becomes save_dir/tag; files beside it in `root` move to
    save_dir. identifier: the same on every rank, unique to this save. Raises ConfigError for a tag
    that is no name in `save_dir`.
    """

    def __init__(self, save_dir: Path, tag: str, identifier: str) -> None:
        parts = PurePosixPath(tag).parts
        if not parts or tag.startswith("/") or ".." in parts or parts[0].startswith(".fp4_"):
            raise ConfigError(f"{tag!r} is no tag for a checkpoint: give the name of a folder")
        self.save_dir = Path(save_dir)
        self.tag = tag
        self.identifier = identifier
        self.root = self.save_dir / f"{_SAVING}{identifier}"
        self.folder = self.root / tag
        self.target = self.save_dir / tag
        self._lock: int | None = None

    def create(self) -> None:
        """Make the folders; every rank may. Raises CheckpointError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise disk_problem("make", self.folder, error) from error
        # A file system without locks: then nobody else may save to this place meanwhile.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def release(self) -> None:
        """Give up the lock; `commit` and `discard` do so, the other ranks call this."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_leftovers(self) -> None:
        """Tidy up after saves that were killed. One process per file system does this."""
        for replaced in self.save_dir.glob(f"{REPLACED}*"):
            if not _is_alive(self.save_dir / replaced.name.replace(REPLACED, _SAVING, 1)):
                self._restore(replaced)
                _remove(replaced)
        for root in self.save_dir.glob(f"{_SAVING}*"):
            if not _is_alive(root):
                _remove(root)

    def _restore(self, folder: Path) -> None:
        """Give a replaced checkpoint its name back, if that is free."""
        try:
            manifest = Manifest.read(folder)
        except CheckpointError:
            return
        target = None if manifest is None else self.save_dir / manifest.tag
        if target is None or target.exists():
            return
        try:
            rename(folder, target)
        except OSError as error:
            raise disk_problem("rename a checkpoint to", target, error) from error

    def commit(self, manifest: Manifest, *, name_it_latest: bool = True) -> None:
        """Write the manifest, put the folder in its place, name it in `latest`.

        The files that the manifest lists have been flushed. One process per file system does this.
        Raises CheckpointError; what was there before is untouched then, unless the message says
        that the checkpoint is in place.
        """
        manifest.write(self.folder)
        replaced = self.save_dir / f"{REPLACED}{self.identifier}"
        try:
            flush_tree(self.root)
            self._put_in_place(replaced)
        except OSError as error:
            raise disk_problem("put a checkpoint in place at", self.target, error) from error
        try:
            self._move_what_lies_beside()
            if name_it_latest:
                write_text(self.root / LATEST, self.tag)
                rename(self.root / LATEST, self.save_dir / LATEST)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint is in place at {self.target}, but not all around it: {error}"
            ) from error
        _remove(replaced)
        self.discard()

    def _put_in_place(self, replaced: Path) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        had_one = self.target.exists()
        if had_one:
            rename(self.target, replaced)
        try:
            rename(self.folder, self.target)
        except OSError:
            if had_one:
                rename(replaced, self.target)
            raise

    def _move_what_lies_beside(self) -> None:
        for path in self.root.iterdir():
            if path.is_file() and not path.name.startswith("."):
                os.replace(path, self.save_dir / path.name)
        flush(self.save_dir)

    def discard(self) -> None:
        """Remove what was written, if it is there; a failure to do so is logged."""
        _remove(self.root)
        self.release()


def _is_alive(root: Path) -> bool:
    """Whether a process is saving to the folder `root`."""
    try:
        lock = os.open(root / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def replaced_folders(save_dir: Path) -> list[Path]:
    """Checkpoints that stepped aside for one that, if it has come, has their tag."""
    return [p for p in Path(save_dir).glob(f"{REPLACED}*") if (p / CHECKPOINT_NAME).is_file()]


def _remove(folder: Path) -> None:
    error = remove_tree(folder)
    if error is not None:
        logger.warning("fp4: cannot remove %s: %s", folder, error.strerror)
