"""A format is one line and an estimator one class: both reach backward through JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jsonschema
import numpy as np
import pytest
import torch

from fp4_plugin.activation import activate
from fp4_plugin.config import json_schema, parse_section
from fp4_plugin.core.formats import FORMATS, MiniFloat
from fp4_plugin.errors import ConfigError
from fp4_plugin.estimators import ESTIMATORS
from fp4_plugin.registry import Registry
from tests.linear.layers import gaussian, make_layer, outlier_channels, run_layer
from tests.oracles import GRIDS, linear_reference, relative_frobenius
from tests.tolerances import BACKWARD, FORWARD

# name -> ((exponent bits, mantissa bits), grid by hand, arithmetic of fprop)
TOY_FORMATS = {
    "toy_e2m0": ((2, 0), [0, 1, 2, 4], "fp4"),
    "toy_e2m1": ((2, 1), [0, 0.5, 1, 1.5, 2, 3, 4, 6], "fp4"),
    "toy_e3m2": (
        (3, 2),
        [m / 16 for m in range(4)] + [(1 + m / 4) * 2.0**e for e in range(-2, 5) for m in range(4)],
        "fp8",
    ),
}


@dataclass(frozen=True)
class ToyEstimator:
    """A constant slope where |x| is at most `limit`, 0 beyond."""

    constant: float = 2.0
    limit: float = 100.0

    def slope(self, x_scaled: torch.Tensor, fmt: MiniFloat) -> torch.Tensor:
        return self.constant * (x_scaled.abs() <= self.limit * fmt.max).float()


def without(registry: Registry, names: list[str]) -> None:
    for name in names:
        registry.unregister(name)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    formats, estimators = FORMATS.names(), ESTIMATORS.names()
    for name, ((exponent_bits, mantissa_bits), grid, _) in TOY_FORMATS.items():
        FORMATS.register(name, MiniFloat(name, exponent_bits, mantissa_bits))
        monkeypatch.setitem(GRIDS, name, np.array(grid, dtype=np.float64))
    ESTIMATORS.register("toy", ToyEstimator)
    yield
    without(FORMATS, list(TOY_FORMATS))
    without(ESTIMATORS, ["toy"])
    assert (FORMATS.names(), ESTIMATORS.names()) == (formats, estimators)


def toy_section(name: str, estimator: dict | None = None) -> dict:
    return {
        "recipe": "paper",
        "linear": {
            "weight": {"format": name, "estimator": estimator or {"name": "dge"}},
            "input": {"format": name, "outliers": None},
            "grad_output": {"format": "bf16"},
            "fprop": TOY_FORMATS[name][2],
            "dgrad": "bf16",
            "wgrad": "bf16",
        },
    }


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("name", TOY_FORMATS)
def test_a_format_of_one_line_reaches_backward_through_json(name: str) -> None:
    layer = make_layer(257, 32, toy_section(name))
    x, grad_output = outlier_channels(33, 257), gaussian(33, 32, seed=1)
    results = run_layer(layer, x, grad_output)
    reference = linear_reference(
        x.numpy(),
        layer.weight.detach().numpy(),
        grad_output.numpy(),
        formats=(name, name),
        dge=(5.0, 3.0),
    )
    assert relative_frobenius(results.output.numpy(), reference.output) < FORWARD
    for gradient in ("grad_input", "grad_weight"):
        error = relative_frobenius(getattr(results, gradient).numpy(), getattr(reference, gradient))
        assert error < BACKWARD["fp32"], gradient


@pytest.mark.usefixtures("toys")
def test_an_estimator_of_one_class_reaches_backward_through_json() -> None:
    x, grad_output = outlier_channels(33, 257), gaussian(33, 32, seed=1)
    gradients = {
        constant: run_layer(
            make_layer(257, 32, toy_section("toy_e2m1", {"name": "toy", "constant": constant})),
            x,
            grad_output,
        ).grad_weight
        for constant in (1.0, 4.0)
    }
    assert gradients[1.0].any()
    assert torch.equal(gradients[4.0], 4 * gradients[1.0])


@pytest.mark.usefixtures("toys")
def test_the_manifest_names_a_toy_estimator_as_json_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    section = toy_section("toy_e2m1", {"name": "toy", "constant": 3.0})
    (layer,) = activate(model, section).manifest()["layers"]
    assert layer["estimator"] == {"name": "toy", "constant": 3.0, "limit": 100.0}


@pytest.mark.usefixtures("toys")
def test_parameters_of_a_toy_estimator_are_checked_like_any_other() -> None:
    with pytest.raises(ConfigError, match=r"estimator\.constnat.*did you mean 'constant'"):
        parse_section(toy_section("toy_e2m1", {"name": "toy", "constnat": 1.0}))
    with pytest.raises(ConfigError, match=r"estimator\.constant"):
        parse_section(toy_section("toy_e2m1", {"name": "toy", "constant": "much"}))


@pytest.mark.usefixtures("toys")
def test_the_schema_knows_registered_toys() -> None:
    section = toy_section("toy_e2m1", {"name": "toy", "constant": 2.0})
    jsonschema.Draft202012Validator(json_schema()).validate(section)


def test_without_the_toys_their_names_are_unknown() -> None:
    section = toy_section("toy_e2m1", {"name": "toy"})
    with pytest.raises(ConfigError, match="toy"):
        parse_section(section)
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(section)
