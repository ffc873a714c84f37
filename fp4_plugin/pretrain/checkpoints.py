"""The checkpoints of one training: where they are, which one to go on from, which ones to remove.

    <folder>/global_step40/       DeepSpeed's files, verified and put in place by the engine
    <folder>/global_step40.json   the run's record, written before them
    <folder>/latest               the newest tag
    <folder>/finished.json        the record of a training that is over

A job that its launcher has started again (torchrun's `--max-restarts`, Slurm's `--requeue`) goes on
from its newest checkpoint without being told: `resume_requests`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4_plugin.checkpoint import CHECKPOINT_NAME, Manifest, committed
from fp4_plugin.checkpoint.files import remove_tree
from fp4_plugin.errors import CheckpointError
from fp4_plugin.pretrain.run_record import RunRecord

logger = logging.getLogger("fp4_plugin")

__all__ = ["LATEST", "ResumePoint", "RunCheckpoints", "resume_requests", "was_restarted"]

LATEST = "latest"
FINISHED = "finished.json"
# Counted by torch elastic and by Slurm: above 0 in every process of a job that was started again.
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def was_restarted(environment: Mapping[str, str]) -> bool:
    """Whether a launcher or scheduler started this process again. One rank may know it alone."""
    counts = [environment.get(name, "0") for name in _RESTART_COUNTS]
    return any(count.isdigit() and int(count) > 0 for count in counts)


def resume_requests(resume: str | None, *, restarted: bool) -> tuple[str, ...]:
    """What to resume, in order of preference; empty for a run that starts anew.

    A job that was started again prefers its own newest checkpoint to the one it once began with.
    """
    requests = [LATEST] * restarted + [resume] * (resume is not None)
    return tuple(dict.fromkeys(request for request in requests if request is not None))


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to load: `tag` of `folder`; of tag None the engine takes the last good one."""

    folder: Path
    tag: str | None
    record: RunRecord

    @property
    def path(self) -> Path:
        return self.folder / (self.tag or LATEST)


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one training in `folder`; `settings` are those of the run.

    keep: how many to keep, None for all. Only the rank that looks after the files calls this.
    """

    folder: Path
    settings: Mapping[str, Any]
    total_steps: int
    keep: int | None = None

    def finished(self) -> RunRecord | None:
        """The record of this training if it is over. Raises ConfigError for one of another run."""
        path = self.folder / FINISHED
        if not path.is_file():
            return None
        try:
            record = RunRecord.read(path)
        except CheckpointError as error:
            logger.warning("fp4: %s; the training goes on from a checkpoint", error)
            return None
        record.require(self.settings, self.total_steps, path)
        return record if record.steps == self.total_steps else None

    def write_finished(self, record: RunRecord) -> None:
        record.write(self.folder / FINISHED)

    def write_record(self, record: RunRecord) -> str:
        """What goes beside a checkpoint, before it; returns the tag that this must have."""
        tag = f"global_step{record.steps}"
        record.write(_record_path(self.folder, tag))
        return tag

    def find(self, requests: Sequence[str]) -> ResumePoint | None:
        """The checkpoint that the first of `requests` means that means any.

        None if all of them are "latest", and there is none yet. Raises CheckpointError for one that
        does not exist or is not complete, ConfigError for one of another run.
        """
        for request in requests:
            point = self._latest(self.folder) if request == LATEST else self._named(request)
            if point is not None:
                point.record.require(self.settings, self.total_steps, point.path)
                return point
        return None

    def _latest(self, folder: Path) -> ResumePoint | None:
        """What the engine will most likely load; whether its content is good is seen then."""
        problems = []
        for index, found in enumerate(committed(folder)):
            try:
                record = self._record_of(found)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("fp4: passed over a checkpoint: %s", problem)
            # The newest: should its content be damaged, the engine looks for another one.
            return ResumePoint(folder, None if index == 0 else found.name, record)
        if problems:
            raise CheckpointError("\n".join(problems))
        left = [path.name for path in _checkpoint_folders(folder)]
        if left:
            raise CheckpointError(
                f"none of the checkpoints in {folder} is complete: {', '.join(left)}; remove them "
                "to start from the beginning, or resume another one with --resume PATH"
            )
        return None

    def _named(self, request: str) -> ResumePoint:
        for folder in (self.folder / request, Path(request)):
            if (folder / CHECKPOINT_NAME).is_file():
                return ResumePoint(folder.parent, folder.name, self._record_of(folder))
        point = self._latest(Path(request))
        if point is not None:
            return point
        tags = ", ".join(path.name for path in _checkpoint_folders(self.folder)) or "none"
        raise CheckpointError(
            f"--resume {request}: neither a checkpoint in {self.folder} (there: {tags}), nor the "
            "path of one, nor of a folder of them"
        )

    def _record_of(self, folder: Path) -> RunRecord:
        manifest = Manifest.read(folder)
        tag = folder.name if manifest is None else manifest.tag
        return RunRecord.read(_record_path(folder.parent, tag))

    def loaded(self, folder: Path, engine_steps: int) -> ResumePoint:
        """What an engine has loaded from `folder`. Raises ConfigError or CheckpointError."""
        record = self._record_of(folder)
        record.require(self.settings, self.total_steps, folder)
        if record.steps != engine_steps:
            raise CheckpointError(
                f"{folder} is at step {engine_steps}, the record beside it at step {record.steps}: "
                "they do not belong together; resume another one"
            )
        return ResumePoint(folder.parent, folder.name, record)

    def remove_old(self, newest: Path) -> None:
        """Keep `newest` and others up to `keep`; one with files of a wrong size does not count."""
        if self.keep is None:
            return
        # By name, not by its time: the clock may have been put back since the one before.
        others = [folder for folder in committed(self.folder) if folder != newest]
        for folder in others[self.keep - 1 :]:
            with contextlib.suppress(OSError):  # the next save will try again
                # First what makes it a checkpoint: half of one is none.
                (folder / CHECKPOINT_NAME).unlink()
                remove_tree(folder)
                _record_path(self.folder, folder.name).unlink(missing_ok=True)


def _record_path(folder: Path, tag: str) -> Path:
    return folder / f"{tag}.json"


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Every folder that is, or may once have been, a checkpoint; hidden ones are half written."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
