"""A small language model on real text: 16-bit states end where float32 states end."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from fp4_plugin.bench.optim.training import small_model, stdlib_text, train
from fp4_plugin.optim import FP16StateAdamW

STEPS = 200
SEEDS = (0, 1, 2)
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return stdlib_text(300_000)


@pytest.fixture(scope="module")
def reference(text) -> list[float]:
    return losses(lambda p: AdamW(p, **OPTIONS), text)


def losses(make, text) -> list[float]:
    return [train(make, text, STEPS, seed, batch=4).final_loss for seed in SEEDS]


@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
def test_losses_end_within_the_noise_of_float32_states(text, reference, exp_avg):
    found = losses(lambda p: FP16StateAdamW(p, **OPTIONS, exp_avg=exp_avg), text)
    spread = max(reference) - min(reference)
    gaps = [ours - theirs for ours, theirs in zip(found, reference, strict=True)]
    assert abs(statistics.mean(gaps)) < max(spread, 0.02), (gaps, reference)
    assert max(map(abs, gaps)) < 0.05, gaps


def test_the_model_has_learnt(text, reference):
    """Otherwise two optimisers that do nothing would agree."""
    frequencies = torch.bincount(text.long(), minlength=256) / len(text)
    unigram = float(-(frequencies * frequencies.clamp(min=1e-12).log()).sum())
    assert max(reference) < unigram - 0.5, (reference, unigram)


def test_the_model_is_a_causal_transformer_of_two_layers():
    model = small_model(seed=0)
    blocks = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    assert len(blocks) == 2
    ids = torch.randint(0, 256, (1, 32))
    changed = ids.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    with torch.no_grad():
        moved = (model(ids) - model(changed)).abs().amax(dim=-1)[0]
    assert float(moved[:20].max()) == 0.0
    assert float(moved[20:].max()) > 0
