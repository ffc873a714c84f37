"""Arms are valid and distinct; keys follow the settings; nonsense is refused before any run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp4_plugin.bench.ablation.arms import ARMS, CONTROLS, DEFAULT_ARMS
from fp4_plugin.bench.ablation.settings import StudyOptions
from fp4_plugin.config import parse_section
from fp4_plugin.errors import ConfigError
from tests.bench.studies import tiny_options


def _spec(arm):
    return parse_section(ARMS[arm].section).linear_spec("")


def test_no_two_arms_are_the_same():
    identities = [repr(ARMS[arm].identity()) for arm in ARMS]
    assert len(set(identities)) == len(identities)


def test_controls_quantise_nothing():
    assert [_spec(arm) for arm in CONTROLS] == [None] * 3


def test_arms_differ_from_the_paper_in_one_thing():
    paper = _spec("paper")
    assert _spec("occ_without_dge") == replace(paper, estimator=_spec("w4a4_ste").estimator)
    assert _spec("dge_without_occ") == replace(paper, outliers=None)
    clamped = replace(paper.outliers, compensation=None)
    assert _spec("clamp_only") == replace(paper, outliers=clamped)


def test_controls_are_part_of_every_study(tmp_path):
    options = tiny_options(tmp_path, arms=("w4a8", "bf16"))
    assert options.all_arms == ("bf16", "bf16_perturbed", "bf16_dge_slope", "w4a8")


def test_default_study_keeps_the_rules_of_a_parity_statement():
    options = StudyOptions()
    assert options.arms == DEFAULT_ARMS
    assert len(options.seeds) >= 3
    assert len(options.learning_rates) >= 4
    assert options.batch_sequences * options.shape().seq_len >= 16 * 256
    assert options.shape().hidden_size > 100  # or OCC at alpha .99 clamps nothing


@pytest.mark.parametrize(
    "change",
    [
        {"arm": "w4a8"}, {"seed": 1}, {"learning_rate": 2e-3}, {"steps": 3}, {"batch_sequences": 3},
        {"held_out_sequences": 5}, {"corpus": "other"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_key_changes_with_every_setting(tmp_path, change):
    settings = tiny_options(tmp_path).run("paper", 0, 1e-3, "corpus")
    assert replace(settings).key() == settings.key()
    assert replace(settings, **change).key() != settings.key()


def test_key_changes_with_the_training_defaults(tmp_path):
    settings = tiny_options(tmp_path).run("paper", 0, 1e-3, "corpus")
    training = replace(settings.model.training, weight_decay=0.0)
    changed = replace(settings, model=replace(settings.model, training=training))
    assert changed.key() != settings.key()


def test_hidden_and_layers_change_a_preset(tmp_path):
    shape = tiny_options(tmp_path, preset="tiny", hidden_size=128, num_layers=3).shape()
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers) == (128, 344, 3)
    assert (shape.num_heads, shape.seq_len, shape.vocab_size) == (2, 32, 320)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ("papr",)}, "did you mean 'paper'"),
        ({"arms": ("paper", "paper")}, "--arms paper paper"),
        ({"seeds": ()}, "--seeds"),
        ({"seeds": (-1,)}, "--seeds -1"),
        ({"learning_rates": (0.0, 1e-3)}, "--learning-rates 0.0"),
        ({"learning_rates": (float("nan"),)}, "--learning-rates nan"),
        ({"steps": 0}, "steps 0"),
        ({"jobs": -1}, "jobs -1"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        tiny_options(tmp_path, **change)


def test_a_hidden_size_without_whole_heads_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="multiple of 32"):
        tiny_options(tmp_path, hidden_size=40).shape()
