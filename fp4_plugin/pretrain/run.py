"""What each rank of a job does: train, leave the manifest, export, train the twin, report.

A job that is resumed does the same, and finds parts of it done: of a training that is over only the
losses are loaded, one that is not goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fp4_plugin.activation import Activation, activation_of, assert_active
from fp4_plugin.checkpoint import Preemption
from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.artifacts import RunFolder
from fp4_plugin.pretrain.checkpoints import resume_requests, was_restarted
from fp4_plugin.pretrain.curves import draw_curves
from fp4_plugin.pretrain.deepspeed_config import twin_config
from fp4_plugin.pretrain.engine import Ranks, close_engine, join_process_group
from fp4_plugin.pretrain.export import ExportCheck, check_export, export_model, gather_weights
from fp4_plugin.pretrain.job import Job, prepare_job
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.phase import Phase, Preempted, require_resumable
from fp4_plugin.pretrain.quiet import set_up_logging
from fp4_plugin.pretrain.report import Comparison, summarize, write_losses, write_report
from fp4_plugin.pretrain.training import History, sequence_losses
from fp4_plugin.telemetry.manifest import MANIFEST_NAME, write_manifest

__all__ = ["run_rank"]

# Of the held-out text, to compare the export with the engine: on the CPU, so not many.
CHECKED_SEQUENCES, CHECKED_TOKENS = 4, 256
TWIN_LABEL = "bf16 twin"
SHORT_RUN_STEPS = 1000
SHORT_RUN_NOTE = (
    "A gap of about 1 % means nothing in so short a run with one seed, and FP4 below BF16 is an "
    "artefact of small batches and few steps."
)
VERSIONS_OF = ("torch", "deepspeed", "transformers")


def run_rank(options: PretrainOptions) -> None:
    """One rank of the job, from joining the others to the last file, or to a signal that stops it.

    Raises the Fp4Error that ended the run. The losses so far are on disk by then.
    """
    set_up_logging()
    job = prepare_job(options, int(os.environ["WORLD_SIZE"]))
    ranks = join_process_group(options.timeout_minutes)
    # Not before: a rank that waits for the others to come has nothing to save, and should just end.
    with Preemption() as preemption:
        try:
            _Run(job, ranks, preemption).whole()
        except BaseException:
            ranks.abandon()
            raise
        ranks.leave()


class _Run:
    """The main training, its twin and their artefacts, on this rank."""

    def __init__(self, job: Job, ranks: Ranks, preemption: Preemption) -> None:
        self._job = job
        self._ranks = ranks
        self._preemption = preemption
        self._folder = RunFolder(job.options.output)
        # Torch elastic counts per machine: one that was not at fault may not know of the restart.
        restarted = ranks.any(was_restarted(os.environ))
        self._requests = resume_requests(job.options.resume, restarted=restarted)
        self._phases: list[Phase] = []
        self._is_converted = False
        self._export_losses: dict[str, float] | None = None

    def whole(self) -> None:
        """Everything, or as much as there is time for before a signal."""
        self._ranks.on_first(self._open_folder)
        try:
            self._main()
            if self._job.options.twin:
                self._twin()
        except Preempted as reason:
            self._save_losses()
            if self._ranks.is_first:
                print(f"{reason}. To go on: the same command with --resume latest", flush=True)
        except BaseException:
            with contextlib.suppress(ConfigError):  # what ended the run is the error to show
                self._save_losses()
            raise
        else:
            self._finish()

    def _open_folder(self) -> None:
        require_resumable(self._job, self._folder.checkpoints, self._requests)
        self._folder.prepare(self._job.options.inputs, resuming=bool(self._requests))
        self._folder.write_options(self._job.options)
        text = json.dumps(self._job.shape.ds_config, indent=1)
        with self._folder.writing():
            self._folder.ds_config.write_text(text + "\n", encoding="utf-8")
        print("\n".join(self._banner()), flush=True)

    def _main(self) -> None:
        """Train as configured; leave manifest and export."""
        shape = self._job.shape
        phase = self._begin_phase(shape.label, shape.ds_config, self._folder.checkpoints)
        facts = self._facts_of_finished(phase)
        if facts is not None:
            self._is_converted, self._export_losses = facts["is_converted"], facts["export_losses"]
            return
        engine = self._train(phase)
        activation = activation_of(engine)
        self._is_converted = activation is not None
        if activation is not None:
            self._leave_manifest(phase, activation)
            if activation.config.on_mismatch == "error" and phase.trained_here > 0:
                assert_active(engine)  # DeepSpeed's first step is verified, and so is the last one
        if self._job.options.export:
            self._export(engine)
        close_engine(engine)
        phase.record_finished(
            {"is_converted": self._is_converted, "export_losses": self._export_losses}
        )
        self._requests = ()  # they were for this training; the twin's begins now

    def _twin(self) -> None:
        """The same seed and batches in plain BF16, in the same processes."""
        ds_config = twin_config(self._job.shape.ds_config)
        phase = self._begin_phase(TWIN_LABEL, ds_config, self._folder.twin_checkpoints)
        if self._facts_of_finished(phase) is None:
            close_engine(self._train(phase))
            phase.record_finished({})

    def _begin_phase(self, label: str, ds_config: dict[str, Any], folder: Path) -> Phase:
        phase = Phase(self._job, self._ranks, label, ds_config, folder)
        self._phases.append(phase)
        return phase

    def _facts_of_finished(self, phase: Phase) -> Mapping[str, Any] | None:
        """What is left of a training that an earlier start of this job has completed."""
        facts = phase.finished() if self._requests else None
        if facts is not None:
            phase.say(f"finished earlier, {len(phase.history.steps)} steps")
        return facts

    def _train(self, phase: Phase) -> Any:
        with self._folder.writing():  # DeepSpeed's monitors
            return phase.train(self._requests, self._preemption, self._keep_losses)

    def _keep_losses(self) -> None:
        """Now and then, so that a run that is killed leaves its losses too."""
        history = self._phases[-1].history
        if len(history.steps) % self._job.options.log_interval == 0:
            self._save_losses()

    def _leave_manifest(self, phase: Phase, activation: Activation) -> None:
        """The manifest of this process, or that of the checkpoint where no step was left."""
        if phase.trained_here == 0 and phase.resumed_from is not None:
            saved = phase.resumed_from.path / MANIFEST_NAME
            self._ranks.on_first(lambda: self._copy_manifest(saved))
            return
        self._ranks.on_first(lambda: self._write_manifest(activation))

    def _copy_manifest(self, saved: Path) -> None:
        with self._folder.writing():
            shutil.copyfile(saved, self._folder.manifest)

    def _write_manifest(self, activation: Activation) -> None:
        with self._folder.writing():
            stage = self._job.shape.ds_config.get("zero_optimization", {}).get("stage", 0)
            facts = {"world_size": self._ranks.world_size, "zero_stage": stage}
            write_manifest(self._folder.manifest, activation.manifest(**facts))

    def _export(self, engine: Any) -> None:
        data = self._job.plan.data.held_out
        sequences = data.read(data.evenly_spaced(CHECKED_SEQUENCES))[:, : CHECKED_TOKENS + 1]
        engine.eval()
        with torch.no_grad():
            losses = sequence_losses(engine, sequences.to(self._ranks.device))
        weights = gather_weights(engine, self._ranks)
        section = self._job.shape.ds_config["fp4"] if self._is_converted else None
        expected = ExportCheck(weights, sequences, float(losses.mean()), section)
        self._ranks.on_first(lambda: self._write_export(expected))

    def _write_export(self, expected: ExportCheck) -> None:
        folder, shape = self._folder.export, self._job.shape
        with self._folder.writing():
            export_model(folder, shape.model_config, expected.weights, self._job.tokenizer)
        plain_loss = check_export(folder, expected)
        self._export_losses = {"as_trained": expected.trained_loss, "plain": plain_loss}
        print(
            f"exported {folder}: loads in plain transformers (loss {plain_loss:.4f} on a sample; "
            f"{expected.trained_loss:.4f} computed as trained)",
            flush=True,
        )

    def _save_losses(self) -> None:
        if self._ranks.is_first and any(phase.history.steps for phase in self._phases):
            with self._folder.writing():
                write_losses(self._folder.losses, self._histories())

    def _histories(self) -> list[tuple[str, History]]:
        return [(phase.label, phase.history) for phase in self._phases]

    def _finish(self) -> None:
        """Write losses and report, print its table, and check that nothing is missing."""
        self._ranks.on_first(self._save_losses)
        self._ranks.on_first(self._report)

    def _report(self) -> None:
        options, folder = self._job.options, self._folder
        summaries = [summarize(label, history) for label, history in self._histories()]
        comparison = Comparison(summaries[0], summaries[1] if options.twin else None)
        with folder.writing():
            write_report(folder.path, comparison, self._facts())
            if options.twin:
                draw_curves(folder.curves, self._histories())
        folder.require(manifest=self._is_converted, twin=options.twin, export=options.export)
        is_short = self._job.plan.total_steps < SHORT_RUN_STEPS
        note = f"\n{SHORT_RUN_NOTE}\n" if options.twin and is_short else ""
        print(f"\n{comparison.markdown()}\n{note}\neverything is in {folder.path}", flush=True)

    def _facts(self) -> dict[str, Any]:
        shape, options = self._job.shape, self._job.options
        return {
            "preset": options.preset,
            "steps": shape.schedule.total_steps,
            "tokens_per_step": shape.tokens_per_step,
            "seed": options.seed,
            "data": str(options.data or "Python standard library"),
            "tokenizer": self._job.tokenizer.name,
            "device": str(self._ranks.device),
            "world_size": self._ranks.world_size,
            "zero_stage": shape.ds_config.get("zero_optimization", {}).get("stage", 0),
            "export_losses": self._export_losses,
            "versions": {name: metadata.version(name) for name in VERSIONS_OF},
        }

    def _banner(self) -> list[str]:
        shape, plan = self._job.shape, self._job.plan
        where = f"{self._ranks.world_size} rank(s) on {self._ranks.device.type}"
        return [
            f"{self._job.options.preset} LLaMA, recipe {shape.label}, {where}",
            f"{len(plan.data.train):,} training and {len(plan.data.held_out):,} held-out sequences "
            f"of {plan.data.train.seq_len} tokens",
            *shape.sizes().lines(),
        ]
