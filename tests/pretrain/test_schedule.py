"""Warm-up and cosine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4_plugin.pretrain.schedule import WarmupCosine


@given(st.integers(1, 5000), st.integers(1, 500), st.floats(0.0, 1.0))
def test_the_rate_rises_to_the_peak_and_then_never_rises_again(total, warmup, minimum):
    schedule = WarmupCosine(total, warmup, minimum)
    factors = [schedule.factor(step) for step in range(total + 5)]
    assert all(0.0 < factor <= 1.0 for factor in factors[:warmup])
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(factor >= minimum - 1e-12 for factor in factors[warmup:])


def test_the_paper_schedule_over_100_steps():
    schedule = WarmupCosine(100, 5, 0.1)
    assert [schedule.factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule.factor(5) == 1.0
    assert schedule.factor(52) == pytest.approx(0.55)
    assert schedule.factor(99) == schedule.factor(10_000) == pytest.approx(0.1)


def test_the_scheduler_sets_the_rate_of_the_first_step_already():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = WarmupCosine(10, 4, 0.1).scheduler()(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5, 1.0, 1.5, 2.0]
