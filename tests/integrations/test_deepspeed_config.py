"""Which DeepSpeed settings are refused beside the section, and where a configuration is found."""

from __future__ import annotations

from argparse import Namespace

import pytest

from fp4_plugin.errors import ConfigError
from fp4_plugin.integrations.deepspeed.ds_config import (
    CONFLICTS,
    refuse_conflicts,
    resolve_config,
)

CONFIG = {"train_batch_size": 8}


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("key", CONFLICTS)
def test_a_conflicting_feature_is_refused_with_its_reason(key):
    with pytest.raises(ConfigError) as error:
        refuse_conflicts(nested(key, True))
    assert f'"{key}": True' in str(error.value)
    assert CONFLICTS[key] in str(error.value)


@pytest.mark.parametrize("key", CONFLICTS)
def test_a_feature_that_is_off_is_no_conflict(key):
    refuse_conflicts(nested(key, False))
    refuse_conflicts(nested(key.partition(".")[0], {}))


def test_all_conflicts_are_named_at_once():
    both = {"compile": {"deepcompile": True}, "hybrid_engine": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"(?s)compile\.deepcompile.*hybrid_engine\.enabled"):
        refuse_conflicts(both)


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
