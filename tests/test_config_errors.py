"""What the `fp4` section refuses, in model and schema alike, and how the error reads."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_plugin.config import find_section, json_schema, parse_section
from fp4_plugin.errors import ConfigError
from tests.config_sections import CONTRADICTIONS, INVALID, RECIPE_NAMES, VALID

SCHEMA = jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize("name", VALID)
def test_a_valid_section_is_accepted_by_model_and_schema(name: str) -> None:
    section = copy.deepcopy(VALID[name])
    parse_section(section)
    SCHEMA.validate(section)
    assert section == VALID[name]  # parsing changes nothing in what it is given


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_section_is_refused_with_path_value_and_nearest_name(name: str) -> None:
    section, fragments = INVALID[name]
    with pytest.raises(ConfigError) as error:
        parse_section(section)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize("name", INVALID)
def test_the_schema_refuses_what_the_model_refuses(name: str) -> None:
    assert not SCHEMA.is_valid(INVALID[name][0])


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_the_names_of_its_keys(name: str) -> None:
    section, fragments = CONTRADICTIONS[name]
    with pytest.raises(ConfigError) as error:
        parse_section(section)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_the_schema_is_itself_valid_and_plain_json() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json.loads(json.dumps(json_schema())) == json_schema()


@pytest.mark.parametrize("section", [None, [], "paper", 4, True], ids=repr)
def test_a_section_that_is_no_object_is_a_config_error(section: Any) -> None:
    with pytest.raises(ConfigError):
        parse_section(section)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("auto", "fp4"),
        ({"enabled": "auto"}, "fp4.enabled"),
        ({"recipe": "auto"}, "fp4.recipe"),
        ({"linear": "auto"}, "fp4.linear"),
        ({"linear": {"weight": {"format": "auto"}}}, "fp4.linear.weight.format"),
        ({"linear": {"input": {"outliers": "auto"}}}, "fp4.linear.input.outliers"),
        ({"linear": {"input": {"outliers": {"alpha": "auto"}}}}, "input.outliers.alpha"),
        ({"linear": {"weight": {"estimator": {"k": "auto"}}}}, "weight.estimator.k"),
        ({"layers": [{"match": "*", "recipe": "auto"}]}, "fp4.layers[0].recipe"),
        ({"layers": "auto"}, "fp4.layers"),
    ],
    ids=str,
)
def test_auto_is_never_a_value(section: Any, path: str) -> None:
    with pytest.raises(ConfigError, match="auto") as error:
        parse_section(section)
    assert path in str(error.value)


def _fuzzed(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Sections of known and a few unknown keys, every value either plausible or junk."""

    def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        junk = {"fromat": values}
        objects = st.fixed_dictionaries({}, optional={**fields, **junk})
        plain = st.fixed_dictionaries({}, optional=fields)
        return st.one_of(*[plain] * 7, objects, values)

    def key(*allowed: Any) -> st.SearchStrategy[Any]:
        return st.one_of(*[st.sampled_from(allowed)] * 11, values)

    arithmetic = key("fp4", "fp8", "bf16")
    operand = {
        "format": key("e2m1", "e4m3", "e5m2", "bf16"),
        "granularity": key("row", "tensor"),
        "rounding": key("nearest", "half_up"),
        "scale": key("absmax", "pow2"),
    }
    estimator = some_of({"name": key("dge", "ste"), "k": key(3, 5.0), "max_slope": key(3.0)})
    outliers = {"alpha": key(0.97, 0.99), "compensation": key("sparse", None), "scope": key("row")}
    linear = some_of(
        {
            "weight": some_of({**operand, "estimator": estimator}),
            "input": some_of({**operand, "outliers": some_of(outliers)}),
            "grad_output": some_of(operand),
            "fprop": arithmetic,
            "dgrad": arithmetic,
            "wgrad": arithmetic,
        }
    )
    recipe = st.sampled_from([*RECIPE_NAMES, *RECIPE_NAMES, None, 3])
    match = {"match": key("*.q", "*")}
    rule = st.one_of(
        st.fixed_dictionaries({**match, "recipe": recipe}),
        st.fixed_dictionaries({**match, "linear": linear}),
        some_of({**match, "recipe": recipe, "linear": linear}),
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "enabled": key(True, False),
            "recipe": recipe,
            "linear": linear,
            "layers": st.lists(rule, max_size=2),
            "on_mismatch": key("error", "warn"),
        },
    )


_JUNK = st.sampled_from([None, True, 0, 1, 3, 0.99, -1.5, "row", "fp4", "e2m1", "bf16", "", {}, []])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(_fuzzed(_JUNK))
def test_whatever_the_model_accepts_the_schema_accepts_and_nothing_else_is_raised(
    section: dict[str, Any],
) -> None:
    try:
        config = parse_section(copy.deepcopy(section))
    except ConfigError:
        return
    SCHEMA.validate(section)
    config.linear_spec("model.q")
    assert parse_section(config.resolved()).hash() == config.hash()


def test_a_rule_can_switch_its_layers_off_as_the_section_can() -> None:
    section = {"layers": [{"match": "*.q", "linear": None}]}
    try:
        config = parse_section(section)
    except ConfigError:
        assert not SCHEMA.is_valid(section)
    else:
        assert SCHEMA.is_valid(section)
        assert config.linear_spec("a.q") is None


@pytest.mark.parametrize(
    "key", ["FP4", "fp_4", "fp44", "f4p", "fp4_plugin", "fp4_config", "FP4-Training", "nvfp4"]
)
def test_a_key_that_would_be_ignored_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="looks like 'fp4'"):
        find_section({"bf16": {"enabled": True}, key: {"recipe": "paper"}})


@pytest.mark.parametrize("key", ["fp16", "bf16", "fp8", "fp6", "train_batch_size", "f"])
def test_keys_of_deepspeed_are_no_near_misses(key: str) -> None:
    assert find_section({key: {}}) is None


def test_a_whole_configuration_is_told_from_the_section() -> None:
    with pytest.raises(ConfigError, match='pass what is under "fp4"'):
        parse_section({"bf16": {"enabled": True}, "fp4": {"recipe": "paper"}})


def test_an_unknown_format_lists_exactly_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as error:
        parse_section({"linear": {"weight": {"format": "e2m2"}}})
    assert "['e2m1', 'e1m2', 'e3m0', 'e4m3', 'e5m2', 'bf16']" in str(error.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"linear": {"weight": None}}, "fp4.linear.weight: expected an object; got null"),
        ({"enabled": "yes"}, 'fp4.enabled: expected true or false; got "yes"'),
        ({"layers": {}}, "fp4.layers: expected a list; got {}"),
        ({"recipe": None}, "fp4.recipe: expected a string; got null"),
    ],
)
def test_a_wrong_type_is_told_in_terms_of_json(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_section(section)
    assert str(error.value) == message


def test_several_mistakes_are_all_named_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        parse_section({"recpie": "paper", "linear": {"wieght": {}}})
    assert "fp4.recpie" in str(error.value)
    assert "fp4.linear.wieght" in str(error.value)


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="recpie"):
        parse_section({"recpie": "paper"})


@pytest.mark.parametrize("key", ["gradient_communication", "linear", "recipe", "layers"])
def test_a_key_of_the_section_beside_it_is_refused(key):
    with pytest.raises(ConfigError, match=f"'{key}' stands beside 'fp4'"):
        find_section({"fp4": {}, key: None})
