"""From options, JSON and preset to the exact DeepSpeed configuration."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.deepspeed_config import complete_config, twin_config
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.presets import PRESETS


def _complete(tmp_path, config, world_size=2, **options):
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    options = PretrainOptions(config=path, **options)
    return complete_config(options, PRESETS[options.preset], world_size)


def test_the_built_in_configuration_is_the_paper_under_zero_2():
    config, layout = complete_config(PretrainOptions(), PRESETS["tiny"], 2)
    assert config["fp4"] == {"recipe": "paper"}
    assert config["zero_optimization"]["stage"] == 2
    assert config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 1.0
    assert config["optimizer"] == {
        "type": "AdamW",
        "params": {
            "torch_adam": True, "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
        },
    }  # fmt: skip
    assert (layout.micro_batch, layout.grad_accum, layout.global_batch) == (4, 1, 8)


def test_a_flag_beats_the_json_and_the_json_beats_the_preset(tmp_path):
    stated = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": 0.25}},
        "zero_optimization": {"stage": 1},
        "train_batch_size": 64,
        "gradient_clipping": 2.0,
        "fp4": {"recipe": "fp8", "on_mismatch": "warn"},
        "wall_clock_breakdown": True,
    }
    config, layout = _complete(tmp_path, stated)
    params = config["optimizer"]["params"]
    assert (params["lr"], params["eps"], params["weight_decay"]) == (0.5, 0.25, 0.1)
    assert (config["gradient_clipping"], layout.global_batch) == (2.0, 64)
    assert config["wall_clock_breakdown"] is True
    config, layout = _complete(
        tmp_path, stated, lr=0.1, zero_stage=3, recipe="w4a8", micro_batch=2, grad_accum=3
    )
    assert (config["optimizer"]["params"]["lr"], config["zero_optimization"]["stage"]) == (0.1, 3)
    assert config["fp4"] == {"recipe": "w4a8", "on_mismatch": "warn"}
    assert layout.global_batch == config["train_batch_size"] == 12


def test_the_tensorboard_flag_beats_the_json_which_says_where(tmp_path):
    stated = {"tensorboard": {"enabled": False, "output_path": "mine"}}
    config, _ = _complete(tmp_path, stated, tensorboard=True)
    assert config["tensorboard"] == {"enabled": True, "output_path": "mine", "job_name": "fp4"}


@pytest.mark.parametrize("config", [{}, {"fp4": {"enabled": False}}], ids=["absent", "disabled"])
def test_without_a_section_nothing_is_converted_but_checkpoints_are_ours(tmp_path, config):
    completed, _ = _complete(tmp_path, config)
    assert completed["fp4"] == {"recipe": "bf16"}


def test_auto_counts_as_not_stated_where_we_have_a_value(tmp_path):
    stated = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }  # fmt: skip
    config, layout = _complete(tmp_path, stated)
    assert (config["optimizer"]["params"]["lr"], layout.global_batch) == (1e-3, 8)
    assert config["bf16"]["enabled"] is True


def test_auto_elsewhere_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r'zero_optimization\.stage: "auto" is filled in by'):
        _complete(tmp_path, {"zero_optimization": {"stage": "auto"}})


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_precision_that_is_stated_stays(tmp_path, kind):
    config, _ = _complete(tmp_path, {kind: {"enabled": kind == "fp16"}})
    assert config.get("bf16", {}).get("enabled") is not True


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"fp4": ', "is not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"bf16": {"a": 1, "a": 2}}', r"given twice in one JSON object: \['a'\]"),
        ('{"train_batch_size": "8"}', "\"train_batch_size\" in the DeepSpeed JSON is '8'"),
        ('{"optimizer": "AdamW"}', '"optimizer" in the DeepSpeed JSON must be an object'),
    ],
)
def test_a_bad_file_is_a_clear_error(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        _complete(tmp_path, text)


def test_a_missing_file_is_a_clear_error(tmp_path):
    options = PretrainOptions(config=tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"absent\.json: No such file"):
        complete_config(options, PRESETS["tiny"], 1)


counts = st.none() | st.integers(1, 64)


@given(st.sampled_from(PRESETS.names()), st.integers(1, 96), counts, counts)
def test_the_batch_is_what_its_factors_say(preset, world_size, micro_batch, grad_accum):
    options = PretrainOptions(preset=preset, micro_batch=micro_batch, grad_accum=grad_accum)
    config, layout = complete_config(options, PRESETS[preset], world_size)
    assert layout.global_batch == config["train_batch_size"]
    assert layout.micro_batch == (micro_batch or layout.micro_batch)
    assert layout.grad_accum == (grad_accum or layout.grad_accum)
    if not (micro_batch and grad_accum):
        assert layout.global_batch >= PRESETS[preset].training.batch_sequences


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="train_batch_size 8 is not micro batch"):
        _complete(tmp_path, {"train_batch_size": 8}, world_size=3)


def test_the_twin_differs_in_the_section_and_the_name_of_its_monitors():
    config, _ = complete_config(PretrainOptions(tensorboard=True), PRESETS["tiny"], 2)
    twin = twin_config(config)
    assert twin["fp4"] == {"recipe": "bf16"}
    assert config["fp4"] == {"recipe": "paper"}
    differing = {key for key in config if config[key] != twin[key]}
    assert differing == {"fp4", "csv_monitor", "tensorboard"}
    for monitor in ("csv_monitor", "tensorboard"):
        assert twin[monitor]["output_path"] == config[monitor]["output_path"]
