"""One training of a job, the main one or its twin, from where its checkpoints stand to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4_plugin.checkpoint import Preemption
from fp4_plugin.errors import CheckpointError
from fp4_plugin.pretrain.checkpoints import ResumePoint, RunCheckpoints
from fp4_plugin.pretrain.engine import Ranks, create_engine
from fp4_plugin.pretrain.job import Job
from fp4_plugin.pretrain.progress import Progress
from fp4_plugin.pretrain.run_record import RunRecord, run_settings
from fp4_plugin.pretrain.training import History, Trainer

__all__ = ["Phase", "Preempted", "require_resumable"]


def require_resumable(job: Job, folder: Path, requests: Sequence[str]) -> None:
    """Raise ConfigError or CheckpointError if the main training cannot go on as requested.

    folder: of its checkpoints. For one process, before others are started or files replaced.
    """
    checkpoints = _checkpoints(job, job.shape.label, job.shape.ds_config, folder)
    if requests and checkpoints.finished() is None:
        checkpoints.find(requests)


def _checkpoints(
    job: Job, label: str, ds_config: Mapping[str, Any], folder: Path
) -> RunCheckpoints:
    settings = run_settings(job, label, ds_config)
    return RunCheckpoints(folder, settings, job.plan.total_steps, job.options.keep)


class Preempted(Exception):
    """All ranks agreed to leave before the training was over; says what is on disk."""


class Phase:
    """The training `label` with `ds_config`; its checkpoints are in `folder`.

    history: of all steps, also of those that an earlier process has done. resumed_from: the
    checkpoint that was loaded, None for a training from the start. Methods are collective.
    """

    def __init__(
        self, job: Job, ranks: Ranks, label: str, ds_config: dict[str, Any], folder: Path
    ) -> None:
        self.label = label
        self.history = History()
        self.resumed_from: ResumePoint | None = None
        self._steps_before = 0
        self._job = job
        self._ranks = ranks
        self._ds_config = ds_config
        self._checkpoints = _checkpoints(job, label, ds_config, folder)

    @property
    def trained_here(self) -> int:
        """Optimiser steps that this process has done."""
        return len(self.history.steps) - self._steps_before

    def finished(self) -> Mapping[str, Any] | None:
        """What `record_finished` was given, if this training is over: its history is here then."""
        record = self._ranks.on_first(self._checkpoints.finished)
        if record is None:
            return None
        self.history = record.history
        return record.facts

    def record_finished(self, facts: Mapping[str, Any]) -> None:
        """Note that the training and what belongs to it are done, for a job that is resumed."""
        record = self._record(facts)
        self._ranks.on_first(lambda: self._checkpoints.write_finished(record))

    def _record(self, facts: Mapping[str, Any]) -> RunRecord:
        return RunRecord(self._checkpoints.settings, self.history, facts)

    def train(
        self,
        requests: Sequence[str],
        preemption: Preemption,
        after_step: Callable[[], None],
    ) -> Any:
        """Train to the end and return the engine. requests: what to resume, see `resume_requests`.

        Saves as the options say. Raises Preempted when a rank was asked to leave, with a checkpoint
        of all steps done; ConfigError or CheckpointError, before the engine is made if possible,
        for a checkpoint that cannot be resumed.
        """
        engine = self._engine(requests)
        progress = Progress(
            self.label,
            self._job.plan.total_steps,
            self._job.options.log_interval,
            visible=self._ranks.is_first,
            steps_done=len(self.history.steps),
        )
        trainer = Trainer(
            engine,
            self._job.plan,
            self._ranks,
            progress,
            history=self.history,
            wants_to_leave=lambda: preemption.requested,
        )

        def finish_step() -> None:
            after_step()
            self._save_if_due(engine, trainer.is_leaving, preemption)

        try:
            self._leave_if_asked(preemption)
            trainer.run(finish_step)
        finally:
            progress.close()
        return engine

    def _engine(self, requests: Sequence[str]) -> Any:
        """A new engine, or one that stands where `requests` say."""
        point = self._ranks.on_first(lambda: self._checkpoints.find(requests))
        shape, options = self._job.shape, self._job.options
        engine = create_engine(shape.model_config, self._ds_config, shape.schedule, options.seed)
        if options.activation_checkpointing:
            engine.module.gradient_checkpointing_enable()
        if point is not None:
            self._load(engine, point)
        elif requests:
            self.say("no checkpoint yet, starting from the beginning")
        return engine

    def _load(self, engine: Any, point: ResumePoint) -> None:
        """Load `point`, or an older one if it is damaged, and the history that belongs to it."""
        path, _ = engine.load_checkpoint(str(point.folder), tag=point.tag)
        if path is None:
            raise CheckpointError(f"DeepSpeed found no checkpoint in {point.folder}")
        folder, steps = Path(path).parent, engine.global_steps
        self.resumed_from = self._ranks.on_first(lambda: self._checkpoints.loaded(folder, steps))
        self.history = self.resumed_from.record.history
        self._steps_before = len(self.history.steps)
        self.say(f"resumed from {folder}, {self._steps_before} steps done")

    def say(self, message: str) -> None:
        """A line on rank 0."""
        if self._ranks.is_first:
            print(f"{self.label}: {message}", flush=True)

    def _leave_if_asked(self, preemption: Preemption) -> None:
        """Before the first step: nothing has changed since the last checkpoint."""
        if self._ranks.any(preemption.requested):
            raise Preempted(f"{self.label}: asked to leave before the first step")

    def _save_if_due(self, engine: Any, is_leaving: bool, preemption: Preemption) -> None:
        done, total_steps = len(self.history.steps), self._job.plan.total_steps
        interval = self._job.options.save_interval
        is_due = interval is not None and (done % interval == 0 or done == total_steps)
        if not is_due and not is_leaving:
            return
        folder = self._save(engine)
        if is_leaving:
            reason = preemption.received or "a signal to another rank"
            where = f"saved {folder} after {done} of {total_steps} steps"
            raise Preempted(f"{self.label}: {reason}: {where}")

    def _save(self, engine: Any) -> Path:
        """A checkpoint of all ranks, then without the old ones. Raises CheckpointError on all."""
        checkpoints, record = self._checkpoints, self._record({})
        tag = self._ranks.on_first(lambda: checkpoints.write_record(record))
        engine.save_checkpoint(str(checkpoints.folder), tag=tag)
        folder = checkpoints.folder / tag
        self._ranks.on_first(lambda: checkpoints.remove_old(folder))
        return folder
