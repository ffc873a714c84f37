"""What stays the same object when a linear becomes an FP4Linear."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp4_plugin import convert_to_fp4
from fp4_plugin.errors import ConfigError
from fp4_plugin.linear import FP4Linear
from tests.linear.layers import (
    gaussian,
    make_layer,
    make_section,
    outlier_channels,
    run_layer,
    same_results,
)

PAPER = make_section()


@pytest.mark.parametrize("bias", [False, True])
def test_from_float_keeps_parameters_keys_and_training_state(bias: bool) -> None:
    linear = nn.Linear(256, 32, bias=bias).eval()
    weight, keys = linear.weight, list(linear.state_dict())
    layer = FP4Linear.from_float(linear, PAPER)
    assert isinstance(layer, nn.Linear)
    assert isinstance(layer, FP4Linear)
    assert layer.weight is weight
    assert list(layer.state_dict()) == keys
    assert not layer.training
    assert (layer.in_features, layer.out_features) == (256, 32)


def test_a_state_dict_goes_both_ways_between_a_plain_and_an_fp4_linear() -> None:
    layer = make_layer(256, 32, PAPER, bias=True)
    plain = nn.Linear(256, 32)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight)
    back = FP4Linear.from_float(nn.Linear(256, 32), PAPER)
    back.load_state_dict(plain.state_dict())
    x = outlier_channels(5, 256)
    assert torch.equal(back(x), layer(x))


def test_a_deep_copy_computes_the_same_with_parameters_of_its_own() -> None:
    layer = make_layer(256, 32, PAPER, bias=True)
    x, grad_output = outlier_channels(5, 256), gaussian(5, 32, seed=1)
    expected = run_layer(layer, x, grad_output)
    twin = copy.deepcopy(layer)
    assert isinstance(twin, FP4Linear)
    assert same_results(run_layer(twin, x, grad_output), expected)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(layer(x).detach(), expected.output)


def test_a_deep_copy_counts_its_own_calls() -> None:
    layer = make_layer(256, 32, PAPER)
    layer(outlier_channels(5, 256))
    twin = copy.deepcopy(layer)
    before = layer.fp4.record.tokens
    twin(outlier_channels(7, 256))
    assert layer.fp4.record.tokens == before


def test_a_layer_can_be_pickled_whole(tmp_path) -> None:
    layer = make_layer(256, 32, PAPER, bias=True)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    x = outlier_channels(5, 256)
    assert torch.equal(loaded(x), layer(x))


def test_hooks_on_the_linear_survive_conversion() -> None:
    model, seen = nn.Sequential(nn.Linear(256, 32)), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    convert_to_fp4(model, PAPER)(outlier_channels(3, 256))
    assert isinstance(model[0], FP4Linear)
    assert seen == [1]


def test_converting_a_model_keeps_modules_parameters_and_keys_in_place() -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 32)))
    modules, parameters = list(model.modules()), list(model.parameters())
    values = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert convert_to_fp4(model, PAPER) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in values.items())
    model(outlier_channels(3, 256)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, values["0.weight"])


def test_a_copy_of_a_converted_model_is_no_bf16_twin() -> None:
    model = convert_to_fp4(nn.Sequential(nn.Linear(256, 32)), PAPER)
    with pytest.raises(ConfigError, match="0 is an FP4 layer already"):
        convert_to_fp4(copy.deepcopy(model), {"recipe": "bf16"})


def test_printing_a_layer_shows_what_is_quantised() -> None:
    text = repr(make_layer(256, 32, PAPER))
    for part in ("256", "32", "e2m1", "e5m2", "0.99"):
        assert part in text


def test_from_float_does_not_change_the_section_it_is_given() -> None:
    section = make_section()
    twin = copy.deepcopy(section)
    FP4Linear.from_float(nn.Linear(256, 32), section)
    assert section == twin
