"""The training loop and the held-out evaluation: one engine, from the first step to the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from fp4_plugin.errors import Fp4Error
from fp4_plugin.pretrain.dataset import TrainingData
from fp4_plugin.pretrain.engine import Ranks
from fp4_plugin.pretrain.progress import Progress
from fp4_plugin.pretrain.sample_order import BatchLayout, SampleOrder

__all__ = ["DivergenceError", "History", "StepRecord", "Trainer", "TrainingPlan", "sequence_losses"]

# Steps in a row that may change no weight. A dynamic loss scale needs about 16 to come down from
# where it starts; without one, a gradient that is not finite will not mend itself.
MAX_SKIPPED_STEPS_FP16 = 25
MAX_SKIPPED_STEPS = 3


class DivergenceError(Fp4Error, RuntimeError):
    """The loss, or the gradient of every step, stopped being finite."""


@dataclass(frozen=True)
class TrainingPlan:
    """What to train on and for how long; the same object serves a run and its twin."""

    data: TrainingData
    layout: BatchLayout
    total_steps: int
    seed: int
    eval_interval: int | None
    eval_sequences: int


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step: `step` from 1, mean loss over its tokens and ranks in nats."""

    step: int
    loss: float
    lr: float
    seconds: float


@dataclass
class History:
    """The course of one run. `held_out` holds (steps done, loss in nats per token)."""

    steps: list[StepRecord] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


def sequence_losses(model: Any, sequences: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy of each sequence. sequences: (B, L + 1) ids -> (B,) float32."""
    inputs, targets = sequences[:, :-1], sequences[:, 1:]
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(dim=1)


class Trainer:
    """Runs `plan` on a DeepSpeed `engine`; every rank calls the same methods in the same order.

    history: of the steps that the engine has done already. wants_to_leave: whether this process was
    asked to; `is_leaving` is what the ranks agreed on at the end of the last step.
    """

    def __init__(
        self,
        engine: Any,
        plan: TrainingPlan,
        ranks: Ranks,
        progress: Progress,
        *,
        history: History | None = None,
        wants_to_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self.history = history or History()
        self.is_leaving = False
        self._engine = engine
        self._plan = plan
        self._ranks = ranks
        self._progress = progress
        self._wants_to_leave = wants_to_leave
        self._order = SampleOrder(len(plan.data.train), plan.seed)

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """The steps that are left, and the evaluations; after_step comes last in each step.

        Goes on whatever the ranks agreed on: it is for `after_step` to raise. An evaluation due
        after a step in which they agreed to leave is put off to the next call, in another process.
        Raises DivergenceError on a loss that is not finite.
        """
        self._evaluate_if_due()
        while len(self.history.steps) < self._plan.total_steps:
            self._train_step(len(self.history.steps))
            if not self.is_leaving:
                self._evaluate_if_due()
            after_step()

    def _train_step(self, step: int) -> None:
        started, lr = time.perf_counter(), self._engine.get_lr()[0]
        loss = self._optimizer_step(step)
        record = StepRecord(step + 1, loss, lr, time.perf_counter() - started)
        self.history.steps.append(record)
        self._progress.step(record)
        self._write_event("Train/loss", loss)
        if not math.isfinite(loss):
            raise DivergenceError(f"the training loss is {loss} at step {step + 1}; stopping")
        self._check_skipped(step)

    def _optimizer_step(self, step: int) -> float:
        """All micro steps of one optimiser step; their loss averaged over them and the ranks."""
        total = torch.zeros((), device=self._ranks.device)
        for micro_step in range(self._plan.layout.grad_accum):
            loss = sequence_losses(self._engine, self._batch(step, micro_step)).mean()
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach()
        # One reduction for both: agreeing costs no message of its own.
        leave = total.new_tensor(float(self._wants_to_leave()))
        values = torch.stack([total / self._plan.layout.grad_accum, leave])
        mean_loss, leaving_fraction = self._ranks.mean(values).tolist()
        self.is_leaving = leaving_fraction > 0
        return float(mean_loss)

    def _batch(self, step: int, micro_step: int) -> torch.Tensor:
        samples = self._plan.layout.samples(step, micro_step, self._ranks.rank)
        indices = self._order.sequences(samples)
        return self._plan.data.train.read(indices).to(self._ranks.device)

    def _check_skipped(self, step: int) -> None:
        """DeepSpeed drops a step whose gradient is not finite without a word: say it, and stop."""
        history = self.history
        if self._engine.skipped_steps == history.skipped_steps:
            history.skipped_in_a_row = 0
            return
        history.skipped_steps = self._engine.skipped_steps
        history.skipped_in_a_row += 1
        self._progress.note(f"step {step + 1} changed no weight: its gradient is not finite")
        is_fp16 = self._engine.fp16_enabled()
        limit = MAX_SKIPPED_STEPS_FP16 if is_fp16 else MAX_SKIPPED_STEPS
        if history.skipped_in_a_row >= min(limit, self._plan.total_steps):
            raise DivergenceError(
                f"{history.skipped_in_a_row} optimiser steps in a row were skipped up to step "
                f"{step + 1}: the gradients are not finite"
            )

    def _evaluate_if_due(self) -> None:
        """Evaluate at every interval and at the end, unless the history has it already."""
        done, interval = len(self.history.steps), self._plan.eval_interval
        is_due = done == self._plan.total_steps or (interval is not None and done % interval == 0)
        is_recorded = bool(self.history.held_out) and self.history.held_out[-1][0] == done
        if done > 0 and is_due and not is_recorded:
            self._record_held_out(done)

    def _record_held_out(self, steps_done: int) -> None:
        loss = self.evaluate()
        self.history.held_out.append((steps_done, loss))
        self._progress.held_out(steps_done, loss)
        self._write_event("Eval/held_out_loss", loss)
        if not math.isfinite(loss):
            raise DivergenceError(f"the held-out loss is {loss} after step {steps_done}; stopping")

    def _write_event(self, name: str, value: float) -> None:
        """A number for DeepSpeed's monitors (CSV, TensorBoard); DeepSpeed itself logs no loss."""
        if self._ranks.is_first and self._engine.monitor.enabled:
            self._engine.monitor.write_events([(name, value, self._engine.global_samples)])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Nats per token over evenly spaced held-out sequences; the same for any number of ranks.

        All ranks run equally many forward passes (ZeRO-3 gathers weights in each): a rank that has
        run out of sequences repeats the first one with weight 0.
        """
        data = self._plan.data.held_out
        indices = data.evenly_spaced(self._plan.eval_sequences)
        micro = self._plan.layout.micro_batch
        sum_and_count = torch.zeros(2, dtype=torch.float64)
        self._engine.eval()
        for start in range(0, len(indices), micro * self._ranks.world_size):
            mine = indices[start + self._ranks.rank * micro :][:micro]
            sequences = data.read(mine if len(mine) else indices[:1]).to(self._ranks.device)
            losses = sequence_losses(self._engine, sequences)[: len(mine)]
            sum_and_count += torch.tensor([float(losses.sum()), len(mine)], dtype=torch.float64)
        self._engine.train()
        mean = self._ranks.mean(sum_and_count.to(self._ranks.device)).cpu()
        return float(mean[0] / mean[1])
