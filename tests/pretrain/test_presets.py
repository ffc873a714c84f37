"""Presets: the sizes their names promise, and the paper's settings."""

from __future__ import annotations

import pytest

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.model import meta_model
from fp4_plugin.pretrain.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiny", 3.3e6), ("60m", 60e6), ("400m", 400e6), ("1.3b", 1.3e9), ("7b", 7e9), ("13b", 13e9)],
)
def test_a_preset_has_the_number_of_parameters_its_name_says(name, parameters):
    model = meta_model(PRESETS[name].llama_config())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.06)


@pytest.mark.parametrize("name", ["60m", "400m", "1.3b", "7b", "13b"])
def test_training_defaults_are_those_of_the_paper(name):
    preset = PRESETS[name]
    training = preset.training
    assert (training.betas, training.eps, training.weight_decay) == ((0.9, 0.95), 1e-8, 0.1)
    assert (training.peak_lr, training.warmup_fraction, training.min_lr_fraction) == (
        3e-4,
        0.05,
        0.1,
    )
    assert (training.gradient_clipping, preset.seq_len) == (1.0, 2048)


def test_a_misspelt_preset_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown model preset '13B'.*did you mean '13b'"):
        PRESETS["13B"]
