"""The loop and the evaluation, on a stand-in for the engine that keeps DeepSpeed's contract."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fp4_plugin.pretrain.dataset import TokenSequences, TrainingData
from fp4_plugin.pretrain.engine import Ranks
from fp4_plugin.pretrain.progress import Progress
from fp4_plugin.pretrain.sample_order import BatchLayout
from fp4_plugin.pretrain.training import (
    MAX_SKIPPED_STEPS,
    MAX_SKIPPED_STEPS_FP16,
    DivergenceError,
    History,
    Trainer,
    TrainingPlan,
    sequence_losses,
)

VOCAB, SEQ_LEN = 16, 8


class OneRank(Ranks):
    """A rank without a process group."""

    def mean(self, values):
        return values / self.world_size


class Engine(nn.Module):
    """Embedding and head, SGD, one optimiser step every `grad_accum` backward passes."""

    def __init__(self, grad_accum=1, skips=()):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator))
        self.optimizer = torch.optim.SGD([self.table], lr=1.0)
        self.monitor = SimpleNamespace(enabled=True, write_events=self._record)
        self.events, self.skipped_steps, self.global_samples = [], 0, 0
        self._micro_steps, self._grad_accum, self._skips = 0, grad_accum, skips

    def _record(self, events):
        self.events += [(name, value) for name, value, _ in events]

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.table[input_ids])

    def backward(self, loss):
        (loss / self._grad_accum).backward()

    def step(self):
        self._micro_steps += 1
        if self._micro_steps % self._grad_accum:
            return
        if self._micro_steps // self._grad_accum - 1 in self._skips:
            self.skipped_steps += 1
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def fp16_enabled(self):
        return False

    def get_lr(self):
        return [1.0]


def _sequences(seed, count=40):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, count * SEQ_LEN + 1)
    return TokenSequences(tokens, SEQ_LEN, VOCAB, "text")


def _trainer(
    engine,
    micro_batch=4,
    grad_accum=1,
    total_steps=3,
    eval_interval=None,
    rank=0,
    world=1,
    history=None,
):
    plan = TrainingPlan(
        TrainingData(_sequences(0), _sequences(1, 11)),
        BatchLayout(micro_batch, grad_accum, world),
        total_steps,
        seed=0,
        eval_interval=eval_interval,
        eval_sequences=99,
    )
    ranks = OneRank(rank, world, torch.device("cpu"))
    progress = Progress("test", total_steps, 1, visible=False)
    return Trainer(engine, plan, ranks, progress, history=history)


def test_accumulation_over_four_micro_batches_equals_one_batch_four_times_as_large():
    engines = Engine(), Engine(grad_accum=4)
    histories = []
    for engine, (micro, accum) in zip(engines, ((8, 1), (2, 4)), strict=True):
        trainer = _trainer(engine, micro, accum)
        trainer.run()
        histories.append([record.loss for record in trainer.history.steps])
    torch.testing.assert_close(engines[0].table, engines[1].table, rtol=1e-6, atol=1e-6)
    assert histories[0] == pytest.approx(histories[1], rel=1e-6)


def test_the_loss_is_cross_entropy_of_the_next_token():
    engine, sequences = Engine(), _sequences(0).read(np.arange(3))
    logits = engine.table[sequences[:, :-1]]
    expected = torch.stack(
        [
            nn.functional.cross_entropy(row, ids[1:])
            for row, ids in zip(logits, sequences, strict=True)
        ]
    )
    torch.testing.assert_close(sequence_losses(engine, sequences), expected)


def _losses(engine, sequences, indices):
    with torch.no_grad():
        return sequence_losses(engine, sequences.read(indices))


@pytest.mark.parametrize("micro_batch", [1, 4, 11, 32])
def test_the_held_out_loss_does_not_depend_on_the_batch(micro_batch):
    engine = Engine()
    expected = float(_losses(engine, _sequences(1, 11), np.arange(11)).mean())
    assert _trainer(engine, micro_batch).evaluate() == pytest.approx(expected, rel=1e-6)
    assert engine.training


def test_every_held_out_sequence_is_counted_by_exactly_one_rank():
    class Summing(OneRank):
        sums = torch.zeros(2, dtype=torch.float64)

        def mean(self, values):
            Summing.sums = Summing.sums + values
            return torch.ones(2)

    engine = Engine()
    for rank in range(4):
        trainer = _trainer(engine, micro_batch=2, rank=rank, world=4)
        trainer._ranks = Summing(rank, 4, torch.device("cpu"))
        trainer.evaluate()
    expected = float(_losses(engine, _sequences(1, 11), np.arange(11)).sum())
    assert Summing.sums.tolist() == pytest.approx([expected, 11], rel=1e-6)


def test_evaluation_comes_every_interval_and_at_the_end_and_goes_to_the_monitor():
    engine = Engine()
    trainer = _trainer(engine, total_steps=5, eval_interval=2)
    trainer.run()
    assert [steps for steps, _ in trainer.history.held_out] == [2, 4, 5]
    names = [name for name, _ in engine.events]
    assert (names.count("Train/loss"), names.count("Eval/held_out_loss")) == (5, 3)


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step():
    engine = Engine()
    trainer = _trainer(engine, total_steps=9)
    with torch.no_grad():
        engine.table[:, 3] = float("nan")
    with pytest.raises(DivergenceError, match="training loss is nan at step 1"):
        trainer.run()
    assert len(trainer.history.steps) == 1


class OtherRankLeaves(OneRank):
    """Two ranks, of which the other one was asked to leave in its `after`-th step."""

    steps, after = 0, 2

    def mean(self, values):
        type(self).steps += 1
        other = torch.tensor([float(values[0]), float(self.steps == self.after)])
        return (values + other) / 2


def test_ranks_agree_to_leave_in_the_reduction_of_the_loss():
    OtherRankLeaves.steps = 0
    trainer = _trainer(Engine(), total_steps=4, world=1)
    trainer._ranks = OtherRankLeaves(0, 2, torch.device("cpu"))
    trainer.evaluate = lambda: 1.0
    left = []
    trainer.run(lambda: left.append(trainer.is_leaving))
    assert left == [False, True, False, False]
    assert OtherRankLeaves.steps == 4  # one message per step, not two


def test_an_evaluation_that_leaving_put_off_comes_first_in_the_next_process():
    class Leave(Exception):
        pass

    def leave():
        if trainer.is_leaving:
            raise Leave

    whole = _trainer(Engine(), total_steps=5, eval_interval=2)
    whole.run()
    engine = Engine()
    trainer = _trainer(engine, total_steps=5, eval_interval=2)
    trainer._wants_to_leave = lambda: len(trainer.history.steps) == 1
    with pytest.raises(Leave):
        trainer.run(leave)
    assert (len(trainer.history.steps), trainer.history.held_out) == (2, [])
    again = _trainer(engine, total_steps=5, eval_interval=2, history=trainer.history)
    again.run()
    assert again.history.held_out == whole.history.held_out
    assert [r.loss for r in again.history.steps] == [r.loss for r in whole.history.steps]
    assert [r.step for r in again.history.steps] == [1, 2, 3, 4, 5]


def test_a_finished_history_trains_nothing():
    trainer = _trainer(Engine(), total_steps=2)
    trainer.run()
    engine = Engine()
    before = engine.table.clone()
    _trainer(engine, total_steps=2, history=trainer.history).run()
    assert torch.equal(engine.table, before)
    assert engine.events == []


def test_skipped_steps_in_a_row_are_counted_over_a_resumption():
    history = History(skipped_in_a_row=MAX_SKIPPED_STEPS - 1)
    with pytest.raises(DivergenceError, match=f"{MAX_SKIPPED_STEPS} optimiser steps in a row"):
        _trainer(Engine(skips=(0,)), total_steps=9, history=history).run()


def test_skipped_steps_are_counted():
    trainer = _trainer(Engine(skips=(0, 2)), total_steps=5)
    trainer.run()
    assert trainer.history.skipped_steps == 2


@pytest.mark.parametrize(
    ("is_fp16", "total_steps", "stops_after"),
    [
        (False, 99, MAX_SKIPPED_STEPS),
        (True, 99, MAX_SKIPPED_STEPS_FP16),
        # A short run that learnt nothing is no success either.
        (True, 4, 4),
        (False, 1, 1),
    ],
)
def test_too_many_skipped_steps_in_a_row_stop_the_run(is_fp16, total_steps, stops_after):
    engine = Engine(skips=range(99))
    engine.fp16_enabled = lambda: is_fp16
    with pytest.raises(DivergenceError, match=f"{stops_after} optimiser steps in a row"):
        _trainer(engine, total_steps=total_steps).run()
