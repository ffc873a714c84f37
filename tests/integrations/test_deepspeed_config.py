"""Which DeepSpeed settings are refused beside the section, and where a configuration is found."""

from __future__ import annotations

from argparse import Namespace

import pytest

from fp4_plugin.config import parse_section
from fp4_plugin.errors import ConfigError
from fp4_plugin.integrations.deepspeed.ds_config import (
    COMMUNICATION_CONFLICTS,
    CONFLICTS,
    refuse_conflicts,
    resolve_config,
)

CONFIG = {"train_batch_size": 8}
PAPER = parse_section({"recipe": "paper"})
EXACT = parse_section({"gradient_communication": None})
ALL_CONFLICTS = {**CONFLICTS, **COMMUNICATION_CONFLICTS}


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("key", ALL_CONFLICTS)
def test_a_conflicting_feature_is_refused_with_its_reason(key):
    with pytest.raises(ConfigError) as error:
        refuse_conflicts(nested(key, True), PAPER)
    assert f'"{key}": True' in str(error.value)
    assert ALL_CONFLICTS[key] in str(error.value)


@pytest.mark.parametrize("key", ALL_CONFLICTS)
def test_a_feature_that_is_off_is_no_conflict(key):
    refuse_conflicts(nested(key, False), PAPER)
    refuse_conflicts(nested(key.partition(".")[0], {}), PAPER)


@pytest.mark.parametrize("key", COMMUNICATION_CONFLICTS)
def test_settings_of_gradient_communication_conflict_only_while_it_is_on(key):
    refuse_conflicts(nested(key, True), EXACT)
    refuse_conflicts(nested(key, True), parse_section({"enabled": False}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_error_feedback_is_refused_where_it_would_cost_a_copy_of_the_gradients(stage):
    config = parse_section({"gradient_communication": {"error_feedback": True}})
    if stage < 2:
        refuse_conflicts(nested("zero_optimization.stage", stage), config)
        return
    with pytest.raises(ConfigError, match=rf'zero_optimization\.stage": {stage}.*error_feedback'):
        refuse_conflicts(nested("zero_optimization.stage", stage), config)


def test_all_conflicts_are_named_at_once():
    both = {"compile": {"deepcompile": True}, "hybrid_engine": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"(?s)compile\.deepcompile.*hybrid_engine\.enabled"):
        refuse_conflicts(both, PAPER)


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": CONFIG},
        {"config_params": CONFIG},
        {"config": CONFIG, "config_params": {"other": 1}},
        {"args": Namespace(deepspeed_config=CONFIG)},
        {"args": Namespace(deepscale_config=CONFIG, deepspeed_config=None)},
        {"args": Namespace(deepspeed_config=None), "config": CONFIG},
        {"args": {"not": "a namespace"}, "config": CONFIG},
    ],
    ids=["config", "config_params", "both", "args", "deepscale", "empty args", "other args"],
)
def test_the_configuration_is_found_where_deepspeed_finds_it(arguments):
    assert resolve_config(arguments) is CONFIG


@pytest.mark.parametrize(
    "arguments",
    [{}, {"config": None}, {"config": CONFIG, "args": Namespace(deepspeed_config=CONFIG)}],
    ids=["none", "null", "two"],
)
def test_none_or_two_configurations_are_left_to_deepspeed_to_refuse(arguments):
    assert resolve_config(arguments) is None
