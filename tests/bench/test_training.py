"""One run: what seeds fix, what the controls do to weights and gradients, how a run may fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp4_plugin.bench.ablation import training
from fp4_plugin.bench.ablation.arms import PERTURBATION
from fp4_plugin.bench.ablation.corpus import corpus_source, open_data
from fp4_plugin.bench.ablation.training import (
    SlopeControl,
    build_master,
    compute_copy,
    perturb_weights,
    train,
)
from fp4_plugin.core.formats import E2M1
from fp4_plugin.estimators import DGE
from fp4_plugin.pretrain.training import sequence_losses
from tests.bench.studies import tiny_options

LINEAR = "model.layers.0.mlp.up_proj"


@pytest.fixture
def tiny(tmp_path):
    """(settings by arm, data)"""
    options = tiny_options(tmp_path)
    data = open_data(corpus_source(options), options.shape())
    return (lambda arm, **changes: replace(options.run(arm, 0, 1e-2, "c"), **changes)), data


def test_runs_are_bit_equal_and_leave_the_thread_count_alone(tiny):
    settings, data = tiny
    threads = torch.get_num_threads()
    first, second = (train(settings("paper"), data) for _ in range(2))
    assert first.held_out_loss == second.held_out_loss
    assert first.train_losses == second.train_losses
    assert len(first.train_losses) == 2
    assert torch.get_num_threads() == threads


def test_arms_of_one_seed_start_from_the_same_weights_and_batch(tiny):
    settings, data = tiny
    first = {arm: train(settings(arm), data).train_losses[0] for arm in ("bf16", "bf16_dge_slope")}
    assert first["bf16"] == first["bf16_dge_slope"]
    assert train(settings("bf16", seed=1), data).train_losses[0] != first["bf16"]
    # Quantised from the first step on, of the same weights: close and not equal.
    paper = train(settings("paper"), data).train_losses[0]
    assert paper != first["bf16"]
    assert paper == pytest.approx(first["bf16"], abs=0.05)


def test_perturbation_has_the_size_it_says(tiny):
    settings, _ = tiny
    plain, perturbed = (build_master(settings("bf16").model, seed=0) for _ in range(2))
    perturb_weights(perturbed, PERTURBATION, seed=0)
    with torch.no_grad():
        ratios = [
            (after / before - 1)[before != 0].flatten()
            for before, after in zip(plain.parameters(), perturbed.parameters(), strict=True)
        ]
    relative = torch.cat(ratios)
    assert float(relative.std()) == pytest.approx(PERTURBATION, rel=0.02)
    assert abs(relative.mean()) < 4 * PERTURBATION / math.sqrt(len(relative))
    assert all((ratio != 0).any() for ratio in ratios)


def test_no_perturbation_changes_no_bit(tiny):
    settings, _ = tiny
    plain, same = (build_master(settings("bf16").model, seed=0) for _ in range(2))
    perturb_weights(same, 0.0, seed=0)
    assert all(map(torch.equal, plain.parameters(), same.parameters()))


def test_slope_control_multiplies_weight_gradients_by_the_slope_of_the_bf16_weights(tiny):
    settings, _ = tiny
    master = build_master(settings("bf16").model, seed=0)
    compute = compute_copy(master)
    gradients = {name: torch.randn_like(p) for name, p in master.named_parameters()}
    for name, parameter in master.named_parameters():
        parameter.grad = gradients[name].clone()
    SlopeControl(compute, "paper").apply(master)

    weight = compute.get_parameter(f"{LINEAR}.weight").detach().double()
    scaled = weight * 6 / weight.abs().amax(dim=1, keepdim=True)
    slope = _slope_by_table(scaled)
    expected = gradients[f"{LINEAR}.weight"].double() * slope
    actual = master.get_parameter(f"{LINEAR}.weight").grad.double()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)
    assert slope.std() > 0.3  # the slope is not a constant that a test could miss


def _slope_by_table(x: torch.Tensor) -> torch.Tensor:
    """DGE's slope with k = 5, cap 3 from its formula, interval by interval, in float64."""
    magnitude, slope = x.abs(), torch.full_like(x, torch.nan)
    for low, high in zip(E2M1.grid, E2M1.grid[1:], strict=False):
        inside = (magnitude >= low) & (magnitude <= high * (1 + 1e-12))
        t = (2 * (magnitude - low) / (high - low) - 1).abs()
        slope = torch.where(inside, (t ** (1 / 5 - 1) / 5).clamp(max=3.0), slope)
    return slope


def test_slope_control_leaves_head_embedding_and_norms_alone(tiny):
    settings, _ = tiny
    master = build_master(settings("bf16").model, seed=0)
    for parameter in master.parameters():
        parameter.grad = torch.ones_like(parameter)
    SlopeControl(compute_copy(master), "paper").apply(master)
    changed = {name for name, p in master.named_parameters() if not bool((p.grad == 1).all())}
    assert changed == {name for name, _ in master.named_parameters() if "_proj." in name}
    assert len(changed) == 7


def test_slope_control_arm_trains_on_the_multiplied_gradients(tiny, monkeypatch):
    settings, data = tiny
    applied = []
    original = SlopeControl.apply
    monkeypatch.setattr(SlopeControl, "apply", lambda *args: applied.append(original(*args)))
    control = train(settings("bf16_dge_slope"), data)
    assert len(applied) == 2
    plain = train(settings("bf16"), data)
    assert len(applied) == 2
    assert control.train_losses[1] != plain.train_losses[1]
    # A slope of 1 everywhere gives BF16 back, bit for bit: nothing else sets the arm apart.
    monkeypatch.setattr(DGE, "slope", lambda self, x, fmt: torch.ones_like(x))
    assert train(settings("bf16_dge_slope"), data).train_losses == plain.train_losses


def test_masters_collect_updates_that_a_bf16_weight_would_swallow(tiny):
    settings, data = tiny
    replica = training._Replica(settings("bf16", learning_rate=1e-6, steps=4))
    before = replica.master.get_parameter(f"{LINEAR}.weight").detach().clone()
    replica.step(data.train.read(data.train.evenly_spaced(2)))
    after = replica.master.get_parameter(f"{LINEAR}.weight").detach()
    low = replica.compute.get_parameter(f"{LINEAR}.weight").detach()
    assert low.dtype == torch.bfloat16
    assert (after != before).float().mean() > 0.9
    assert torch.equal(low, after.to(torch.bfloat16))
    assert (low != before.to(torch.bfloat16)).float().mean() < 0.1


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tiny, monkeypatch):
    settings, data = tiny
    losses = iter([1.0, math.nan])

    def failing(model, sequences):
        return sequence_losses(model, sequences) * next(losses)

    monkeypatch.setattr(training, "sequence_losses", failing)
    result = train(settings("paper"), data)
    assert result.has_diverged
    assert result.held_out_loss is None
    assert len(result.train_losses) == 1


def test_weights_that_overflow_end_as_diverged_and_raise_nothing(tiny):
    settings, data = tiny
    result = train(settings("paper", learning_rate=1e30, steps=3), data)
    assert result.has_diverged
    assert all(map(math.isfinite, result.train_losses))


def test_a_layer_that_does_not_run_as_planned_is_an_error(tiny, monkeypatch):
    settings, data = tiny
    monkeypatch.setattr(
        "fp4_plugin.linear.module.FP4Linear.forward",
        lambda self, x: torch.nn.functional.linear(x, self.weight),
    )
    with pytest.raises(RuntimeError, match="has run"):
        train(settings("paper"), data)
