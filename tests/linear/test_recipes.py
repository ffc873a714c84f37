"""Every recipe runs forward and backward, as itself and in a model that owns a head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fp4_plugin import convert_to_fp4
from fp4_plugin.activation import activate
from fp4_plugin.errors import ConfigError
from fp4_plugin.linear import FP4Linear
from fp4_plugin.recipes import RECIPES
from tests.linear.layers import gaussian, make_layer, outlier_channels, run_layer
from tests.oracles import linear_reference, relative_frobenius
from tests.tolerances import BACKWARD, FORWARD


def test_the_manifest_names_rules_that_decide_nothing() -> None:
    model = nn.Sequential(nn.Embedding(50, 256), nn.Linear(256, 256), nn.Linear(256, 50))
    rules = [
        {"match": "2", "recipe": "fp8"},  # the head, which stays in high precision
        {"match": "1", "recipe": "msamp"},
        {"match": "absent*", "recipe": "bf16"},
    ]
    notes = activate(model, {"layers": rules}).manifest()["notes"]
    assert [note[:9] for note in notes if "matches no layer" in note] == ["layers[0]", "layers[2]"]
    assert any("ties toward +inf" in note for note in notes)


NAMES = ["paper", "bf16", "fp8", "w4a8", "w8a4", "w4a4_ste", "w4a4_tensor", "msamp"]
QUANTISED = [name for name in NAMES if name != "bf16"]
# (input format, weight format, alpha, DGE) of the recipes that the row-wise oracle covers.
ORACLES = {
    "paper": (("e2m1", "e2m1"), 0.99, True),
    "fp8": (("e4m3", "e4m3"), None, False),
    "w4a8": (("e4m3", "e2m1"), None, None),
    "w8a4": (("e2m1", "e4m3"), None, False),
    "w4a4_ste": (("e2m1", "e2m1"), None, False),
}


class Block(nn.Module):
    """Two linears with something in between, enough to be a model."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256)
        with torch.no_grad():
            self.up.weight.copy_(gaussian(512, 256, seed=1) / 16)
            self.down.weight.copy_(gaussian(256, 512, seed=2) / 22)
            self.down.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def test_the_recipes_of_the_contract_are_registered() -> None:
    assert set(NAMES) <= set(RECIPES.names() if hasattr(RECIPES, "names") else RECIPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    plain = model().to(dtype)
    network = model().to(dtype)
    result = convert_to_fp4(network, {"recipe": name})
    assert result is network
    x = outlier_channels(24, 256).to(dtype)
    output = network(x)
    output.float().square().mean().backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()
    exact = plain(x).detach()
    error = relative_frobenius(output.detach().float().numpy(), exact.double().numpy())
    # Not identical (it is quantised), not noise (clamping without compensation is the worst).
    assert (error == 0) == (name == "bf16")
    assert error < 1.0


def test_the_bf16_recipe_leaves_every_linear_alone() -> None:
    network = convert_to_fp4(model(), {"recipe": "bf16"})
    assert {type(m) for m in network.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize("name", QUANTISED)
def test_every_other_recipe_converts_every_linear_of_the_blocks(name: str) -> None:
    network = convert_to_fp4(model(), {"recipe": name})
    assert {type(m) for m in network.modules() if isinstance(m, nn.Linear)} == {FP4Linear}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_every_recipe_takes_few_tokens(num_tokens: int, name: str) -> None:
    layer = make_layer(767, 33, {"recipe": name}, bias=True)
    grad_output = gaussian(num_tokens, 33, seed=1)
    results = run_layer(layer, outlier_channels(num_tokens, 767), grad_output)
    for tensor in vars(results).values():
        assert tensor.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_no_recipe_launders_a_non_finite_activation_or_weight(name: str, bad: float) -> None:
    layer = make_layer(256, 32, {"recipe": name})
    x, grad_output = outlier_channels(9, 256), gaussian(9, 32, seed=1)
    with_bad = x.clone()
    with_bad[4, 100] = bad
    results = run_layer(layer, with_bad, grad_output)
    assert not results.output[4].isfinite().any()
    assert not results.grad_weight.isfinite().all()
    with torch.no_grad():
        layer.weight[3, 7] = bad
    results = run_layer(layer, x, grad_output)
    assert not results.output[:, 3].isfinite().any()
    assert not results.grad_input.isfinite().all()


@pytest.mark.parametrize("name", ORACLES)
def test_recipes_agree_with_float64_of_their_forward(name: str) -> None:
    formats, alpha, uses_dge = ORACLES[name]
    layer = make_layer(768, 96, {"recipe": name})
    x, grad_output = outlier_channels(128, 768, seed=1), gaussian(128, 96, seed=2)
    results = run_layer(layer, x, grad_output)
    spec = layer.fp4.spec
    if uses_dge is None:  # an ablation arm may be with or without DGE: ask the layer
        uses_dge = type(spec.estimator).__name__ == "DGE"
    reference = linear_reference(
        x.numpy(),
        layer.weight.detach().numpy(),
        grad_output.numpy(),
        formats=formats,
        alpha=alpha,
        dge=(5.0, 3.0) if uses_dge else None,
    )
    assert relative_frobenius(results.output.numpy(), reference.output) < FORWARD
    for gradient in ("grad_input", "grad_weight"):
        error = relative_frobenius(getattr(results, gradient).numpy(), getattr(reference, gradient))
        assert error < BACKWARD["e5m2"], gradient


def test_the_ablation_arms_order_as_published_in_one_forward() -> None:
    x = outlier_channels(256, 768, seed=1)
    x[::7] *= 8  # tokens of different size
    errors = {}
    for name in QUANTISED:
        layer = make_layer(768, 96, {"recipe": name})
        exact = x.double() @ layer.weight.detach().double().t()
        error = (layer(x).detach() - exact).norm(dim=1) / exact.norm(dim=1)
        errors[name] = float(error.mean())
    assert errors["fp8"] < errors["w4a8"] < errors["w4a4_ste"]
    assert errors["paper"] < 0.5 * errors["w4a4_ste"]
    assert errors["w4a4_ste"] < 0.8 * errors["w4a4_tensor"]
    assert errors["paper"] < errors["msamp"]


def test_msamp_rounds_ties_up_with_power_of_two_scales_and_no_compensation() -> None:
    spec = make_layer(256, 32, {"recipe": "msamp"}).fp4.spec
    for operand in (spec.weight, spec.input):
        assert operand.scale == "pow2"
        assert operand.rounding == "half_up"
        assert operand.format.name == "e2m1"
    assert spec.outliers is not None
    assert spec.outliers.compensation is None


def test_every_fp4_backward_arithmetic_learns() -> None:
    arithmetic = {"grad_output": {"format": "e2m1"}, "dgrad": "fp4", "wgrad": "fp4"}
    layer = make_layer(256, 64, {"recipe": "paper", "linear": arithmetic})
    x, grad_output = outlier_channels(128, 256), gaussian(128, 64, seed=1)
    results = run_layer(layer, x, grad_output)
    reference = linear_reference(
        x.numpy(), layer.weight.detach().numpy(), grad_output.numpy(), alpha=0.99, dge=(5.0, 3.0)
    )
    # Both operands are quantised along the other axis, so this is another product: 4-bit noise.
    for gradient in ("grad_input", "grad_weight"):
        error = relative_frobenius(getattr(results, gradient).numpy(), getattr(reference, gradient))
        assert 0.05 < error < 0.35, (gradient, error)
    for num_tokens in (0, 1, 13):
        few = run_layer(layer, x[:num_tokens], grad_output[:num_tokens])
        assert few.grad_weight.isfinite().all()


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="papr.*paper"):
        convert_to_fp4(model(), {"recipe": "papr"})


def test_the_bf16_gemm_of_a_half_quantised_layer_uses_full_precision() -> None:
    section = {
        "recipe": "paper",
        "linear": {
            "weight": {"format": "bf16", "estimator": {"name": "ste"}},
            "input": {"outliers": None},
            "fprop": "bf16",
            "dgrad": "bf16",
        },
    }
    layer = make_layer(256, 32, section)
    x, grad_output = gaussian(64, 256), gaussian(64, 32, seed=1)
    results = run_layer(layer, x, grad_output)
    reference = linear_reference(
        x.numpy(), layer.weight.detach().numpy(), grad_output.numpy(), formats=("e2m1", None)
    )
    assert relative_frobenius(results.output.numpy(), reference.output) < FORWARD
    assert relative_frobenius(results.grad_input.numpy(), reference.grad_input) < BACKWARD["fp32"]
    assert np.isfinite(reference.grad_weight).all()
