"""What an accepted `fp4` section means: precedence, merging, resolving, hashing."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from fp4_plugin.config import Fp4Config, find_section, parse_section
from fp4_plugin.errors import ConfigError
from fp4_plugin.estimators import DGE, STE
from fp4_plugin.recipes import RECIPES
from tests.config_sections import FULL, RECIPE_NAMES, VALID


def test_the_default_is_the_paper() -> None:
    spec = parse_section({}).linear_spec("model.layers.0.self_attn.q_proj")
    assert spec.weight.format.name == spec.input.format.name == "e2m1"
    assert spec.weight.granularity == spec.input.granularity == "row"
    assert spec.grad_output.format.name == "e5m2"
    assert (spec.fprop, spec.dgrad, spec.wgrad) == ("fp4", "fp8", "fp8")
    assert spec.estimator == DGE(k=5.0, max_slope=3.0, renormalize=False)
    assert spec.outliers.alpha == 0.99
    assert spec.outliers.compensation == "sparse"
    assert spec.outliers.scope == "row"
    assert spec == parse_section({"recipe": "paper"}).linear_spec("")
    assert spec == parse_section(FULL).linear_spec("")


def test_the_recipes_say_what_they_are() -> None:
    formats = {
        "fp8": ("e4m3", "e4m3", "fp8"),
        "w4a8": ("e2m1", "e4m3", "fp8"),
        "w8a4": ("e4m3", "e2m1", "fp8"),
        "w4a4_ste": ("e2m1", "e2m1", "fp4"),
        "w4a4_tensor": ("e2m1", "e2m1", "fp4"),
        "msamp": ("e2m1", "e2m1", "fp4"),
    }
    for name, (weight, activation, fprop) in formats.items():
        spec = parse_section({"recipe": name}).linear_spec("")
        assert (spec.weight.format.name, spec.input.format.name) == (weight, activation), name
        assert spec.fprop == fprop
        granularity = "tensor" if name == "w4a4_tensor" else "row"
        assert spec.weight.granularity == spec.input.granularity == granularity
        assert (spec.outliers is not None) == (name == "msamp")
    assert parse_section({"recipe": "w4a4_ste"}).linear_spec("").estimator == STE()
    assert parse_section({"recipe": "bf16"}).linear_spec("") is None
    assert set(RECIPE_NAMES) <= set(RECIPES.names())


@pytest.mark.parametrize(
    "section", [{"enabled": False}, {"recipe": "bf16"}, {"linear": None}], ids=str
)
def test_a_section_can_leave_every_layer_alone(section: dict[str, Any]) -> None:
    assert parse_section(section).linear_spec("model.layers.0.mlp.up_proj") is None


def test_objects_merge_by_key_over_the_recipe() -> None:
    section = {
        "recipe": "paper",
        "linear": {
            "weight": {"estimator": {"k": 3}},
            "input": {"outliers": {"alpha": 0.97}},
            "grad_output": {"format": "e4m3"},
        },
    }
    spec = parse_section(section).linear_spec("")
    assert spec.estimator == DGE(k=3.0, max_slope=3.0)
    assert spec.outliers.alpha == 0.97
    assert spec.outliers.compensation == "sparse"
    assert spec.grad_output.format.name == "e4m3"
    assert spec.weight.format.name == "e2m1"


def test_an_estimator_of_another_name_does_not_inherit_parameters() -> None:
    section = {"recipe": "paper", "linear": {"weight": {"estimator": {"name": "ste"}}}}
    assert parse_section(section).linear_spec("").estimator == STE()
    section = {"recipe": "w4a4_ste", "linear": {"weight": {"estimator": {"name": "dge"}}}}
    assert parse_section(section).linear_spec("").estimator == DGE()


def test_null_switches_outliers_off_and_an_object_switches_them_on() -> None:
    off = parse_section({"recipe": "paper", "linear": {"input": {"outliers": None}}})
    assert off.linear_spec("").outliers is None
    on = parse_section({"recipe": "w4a4_ste", "linear": {"input": {"outliers": {"alpha": 0.97}}}})
    assert on.linear_spec("").outliers.alpha == 0.97
    assert on.linear_spec("").outliers.compensation == "sparse"


def test_layers_override_the_section_and_the_last_rule_wins() -> None:
    config = parse_section(
        {
            "recipe": "paper",
            "linear": {"grad_output": {"format": "e4m3"}},
            "layers": [
                {"match": "*.layers.0.*", "recipe": "bf16"},
                {"match": "*.down_proj", "linear": {"wgrad": "bf16"}},
                {"match": "*.layers.0.*.q_proj", "recipe": "w4a4_ste"},
                {"match": "*.layers.1.*", "linear": {"input": {"outliers": {"alpha": 0.97}}}},
            ],
        }
    )
    assert config.linear_spec("model.layers.0.self_attn.k_proj") is None
    assert config.linear_spec("model.layers.0.self_attn.q_proj").estimator == STE()
    merged = config.linear_spec("model.layers.1.mlp.down_proj")
    assert merged.wgrad == "bf16"
    assert merged.outliers.alpha == 0.97
    assert merged.grad_output.format.name == "e4m3"
    plain = config.linear_spec("model.layers.2.mlp.up_proj")
    assert plain.wgrad == "fp8"
    assert plain.outliers.alpha == 0.99
    swapped = parse_section(
        {"layers": [{"match": "*q", "recipe": "fp8"}, {"match": "*", "recipe": "bf16"}]}
    )
    assert swapped.linear_spec("x.q") is None


def test_a_recipe_in_a_rule_replaces_what_the_section_said() -> None:
    config = parse_section(
        {
            "recipe": "paper",
            "linear": {"grad_output": {"format": "e4m3"}},
            "layers": [{"match": "*.q", "recipe": "w4a4_ste"}],
        }
    )
    # layers stand above the section, so the recipe of the rule is taken whole.
    assert config.linear_spec("a.q").grad_output.format.name == "e5m2"
    assert config.linear_spec("a.k").grad_output.format.name == "e4m3"


def test_patterns_match_the_dotted_name_and_its_case() -> None:
    config = parse_section({"layers": [{"match": "*.Q_proj", "recipe": "bf16"}]})
    assert config.linear_spec("model.q_proj") is not None
    assert config.linear_spec("model.Q_proj") is None
    assert config.linear_spec("Q_proj") is not None  # the pattern asks for a dot


def test_a_rule_can_bring_a_layer_back_into_fp4() -> None:
    config = parse_section(
        {"recipe": "bf16", "layers": [{"match": "*.up_proj", "recipe": "paper"}]}
    )
    assert config.linear_spec("a.down_proj") is None
    assert config.linear_spec("a.up_proj") == parse_section({}).linear_spec("")


@pytest.mark.parametrize("name", VALID)
def test_the_resolved_section_is_plain_json_and_means_the_same(name: str) -> None:
    config = parse_section(VALID[name])
    resolved = json.loads(json.dumps(config.resolved()))
    assert resolved == config.resolved()
    again = parse_section(resolved)
    assert again.hash() == config.hash()
    for layer in ("", "model.layers.31.mlp.up_proj", "a", "b"):
        assert again.linear_spec(layer) == config.linear_spec(layer)


def test_equal_meaning_gives_equal_hashes_and_any_change_another() -> None:
    base = parse_section({}).hash()
    assert parse_section({"recipe": "paper"}).hash() == base
    assert parse_section({"linear": {"fprop": "fp4"}, "enabled": True}).hash() == base
    assert parse_section({"enabled": True, "linear": {"fprop": "fp4"}}).hash() == base
    k_as_float = parse_section({"linear": {"weight": {"estimator": {"k": 5.0}}}}).hash()
    assert (
        parse_section({"linear": {"weight": {"estimator": {"k": 5}}}}).hash() == k_as_float == base
    )
    others = [parse_section(section).hash() for name, section in VALID.items()]
    changed = {parse_section({"linear": {"input": {"outliers": {"alpha": 0.98}}}}).hash()}
    assert len(set(others) | changed | {base}) > len(VALID) - 4


def test_a_config_is_not_affected_by_later_changes_of_its_source() -> None:
    section = copy.deepcopy(FULL)
    config = parse_section(section)
    before = config.hash()
    section["linear"]["input"]["outliers"]["alpha"] = 0.6
    section["layers"].clear()
    assert config.hash() == before
    assert config.linear_spec("m.layers.31.q") is None


@pytest.mark.parametrize("section", [{}, {"layers": [{"match": "*", "recipe": "paper"}]}], ids=str)
def test_changing_what_a_config_returns_changes_neither_config_nor_recipe(
    section: dict[str, Any],
) -> None:
    config = parse_section(section)
    before = config.hash(), config.linear_spec("")
    config.resolved()["linear"]["input"]["outliers"]["alpha"] = 0.6
    settings = config.linear_settings("")
    assert settings is not None
    outliers = settings["input"]["outliers"]
    settings["input"]["outliers"] = None
    try:
        assert (config.hash(), config.linear_spec("")) == before
        assert parse_section(section).linear_spec("").outliers.alpha == 0.99
    finally:
        settings["input"]["outliers"] = outliers


def test_parsing_a_parsed_config_gives_it_back() -> None:
    config = parse_section(FULL)
    assert isinstance(config, Fp4Config)
    assert parse_section(config) is config


def test_the_section_is_found_under_its_exact_name() -> None:
    section = {"recipe": "paper"}
    assert find_section({"train_batch_size": 8, "fp4": section}) == section
    assert find_section({"train_batch_size": 8, "bf16": {"enabled": True}}) is None


@pytest.mark.parametrize(
    "key", ["FP4", "Fp4", "fp_4", "fp-4", "fp4 ", " fp4", "f4p", "fp44", "pf4"]
)
def test_a_near_miss_at_the_top_level_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="fp4"):
        find_section({"train_batch_size": 8, key: {"recipe": "paper"}})


def test_no_key_of_deepspeed_is_taken_for_a_near_miss() -> None:
    keys = [
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "amp", "fp8", "zero_optimization",
        "gradient_clipping", "prescale_gradients", "steps_per_print", "wall_clock_breakdown",
        "flops_profiler", "activation_checkpointing", "monitor_config", "csv_monitor", "aio",
        "data_types", "comms_logger", "autotuning", "elasticity", "compression_training",
        "pipeline", "sparse_attention", "checkpoint", "tensor_parallel", "nebula", "compile",
    ]  # fmt: skip
    assert find_section({key: {} for key in keys}) is None


@pytest.mark.parametrize("value", ["paper", True, ["paper"], 4], ids=repr)
def test_a_section_of_another_type_is_refused_where_it_is_found(value: Any) -> None:
    with pytest.raises(ConfigError, match="fp4"):
        find_section({"fp4": value})
