"""The layer and its gradients against float64 of the same forward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.linear.layers import (
    BACKWARDS,
    Results,
    gaussian,
    make_layer,
    make_section,
    outlier_channels,
    run_layer,
)
from tests.oracles import (
    GRIDS,
    LinearReference,
    dequantize,
    linear_reference,
    load_vectors,
    quantize_rows,
    relative_frobenius,
)
from tests.tolerances import BACKWARD, FORWARD, LINEAR_VECTOR, OUTLIER_FORWARD_ERROR

T, K, N = 512, 768, 384
DGE = {"dge": (5.0, 3.0), "ste": None}
DATA = {"gaussian": gaussian, "outliers": outlier_channels}


def reference_of(
    x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor, **options: object
) -> LinearReference:
    arrays = [tensor.detach().float().numpy() for tensor in (x, weight, grad_output)]
    return linear_reference(*arrays, **options)


def check_gradients(results: Results, reference: LinearReference, bound: float) -> None:
    for name in ("grad_input", "grad_weight"):
        error = relative_frobenius(getattr(results, name).float().numpy(), getattr(reference, name))
        assert error < bound, (name, error, bound)


@pytest.mark.parametrize("expected", load_vectors("linear")["expected"], ids=lambda e: e["name"])
def test_every_linear_vector(expected: dict) -> None:
    cases = load_vectors("linear")
    x, weight, grad_output = (
        torch.tensor(cases[name], dtype=torch.float32) for name in ("x", "weight", "grad_output")
    )
    section = make_section(
        estimator=expected["estimator"], alpha=expected["alpha"], backward="bf16"
    )
    layer = make_layer(x.shape[1], weight.shape[0], section)
    with torch.no_grad():
        layer.weight.copy_(weight)
    results = run_layer(layer, x, grad_output)
    for name in ("output", "grad_input", "grad_weight"):
        right = np.array(expected[name])
        difference = np.abs(getattr(results, name).double().numpy() - right).max()
        assert difference <= LINEAR_VECTOR * np.abs(right).max(), name


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("alpha", [None, 0.99, 0.97])
@pytest.mark.parametrize("estimator", DGE)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_fp32_layer_against_float64(
    backward: str, estimator: str, alpha: float | None, data: str
) -> None:
    section = make_section(estimator=estimator, alpha=alpha, backward=backward)
    layer = make_layer(K, N, section)
    x, grad_output = DATA[data](T, K, seed=1), gaussian(T, N, seed=2)
    results = run_layer(layer, x, grad_output)
    reference = reference_of(x, layer.weight, grad_output, alpha=alpha, dge=DGE[estimator])
    assert (reference.num_clamped > 0) == (alpha is not None)
    assert relative_frobenius(results.output.numpy(), reference.output) < FORWARD
    check_gradients(results, reference, BACKWARD["fp32" if backward == "bf16" else backward])


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("alpha", [None, 0.99])
@pytest.mark.parametrize("estimator", DGE)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_bf16_layer_against_float64(
    backward: str, estimator: str, alpha: float | None, data: str
) -> None:
    section = make_section(estimator=estimator, alpha=alpha, backward=backward)
    layer = make_layer(K, N, section, dtype=torch.bfloat16)
    x, grad_output = DATA[data](T, K, seed=1).bfloat16(), gaussian(T, N, seed=2).bfloat16()
    results = run_layer(layer, x, grad_output)
    assert results.output.dtype == results.grad_input.dtype == torch.bfloat16
    assert results.grad_weight.dtype == torch.bfloat16
    reference = reference_of(x, layer.weight, grad_output, alpha=alpha, dge=DGE[estimator])
    assert relative_frobenius(results.output.float().numpy(), reference.output) < BACKWARD["bf16"]
    check_gradients(results, reference, BACKWARD[backward])


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_the_residual_reaches_the_weight_gradient_unquantised_and_without_slope(scope: str) -> None:
    # E5M2's noise hides a missing residual term in a whole matrix, so one column is looked at.
    section = make_section(alpha=0.99, backward="e5m2", scope=scope)
    layer = make_layer(K, N, section)
    x, grad_output = gaussian(T, K, seed=1), gaussian(T, N, seed=2)
    x[:, 5] = 0.0
    x[7, 5] = 1e4  # the one entry of its column, clamped: the residual is all of its gradient
    results = run_layer(layer, x, grad_output)
    column = results.grad_weight[:, 5].double()
    expected = grad_output[7].double() * 1e4
    assert float((column - expected).norm() / expected.norm()) < 1e-3


def test_bf16_gradients_of_outlier_data_need_the_residual_term() -> None:
    section = make_section(alpha=0.99, backward="bf16")
    layer = make_layer(K, N, section)
    x, grad_output = outlier_channels(T, K, seed=1), gaussian(T, N, seed=2)
    results = run_layer(layer, x, grad_output)
    without = make_layer(K, N, make_section(alpha=0.99, backward="bf16", compensation=None))
    clamped = run_layer(without, x, grad_output)
    reference = reference_of(
        x, layer.weight, grad_output, alpha=0.99, dge=(5.0, 3.0), compensate=False
    )
    check_gradients(clamped, reference, BACKWARD["fp32"])
    assert relative_frobenius(clamped.output.numpy(), reference.output) < FORWARD
    assert relative_frobenius(results.grad_weight.numpy(), reference.grad_weight) > 0.1


def test_tensor_scope_clamps_with_the_thresholds_of_the_whole_input() -> None:
    section = make_section(alpha=0.99, backward="bf16", scope="tensor", estimator="ste")
    layer = make_layer(64, 32, section)
    # Rows wholly beyond the thresholds on either side of an input that is not centred.
    x = gaussian(256, 64, seed=3) - 6
    x[0], x[1] = -0.5, x[1] - 40
    x[2] = 30.0
    grad_output = gaussian(256, 32, seed=2)
    results = run_layer(layer, x, grad_output)
    flat = np.sort(x.numpy().ravel())
    index = int(np.floor(0.99 * flat.size))
    clamped = np.clip(x.numpy(), flat[flat.size - 1 - index], flat[index])
    residual = x.numpy().astype(np.float64) - clamped
    weight = layer.weight.detach().numpy()
    values = [quantize_rows(matrix, GRIDS["e2m1"]) for matrix in (clamped, weight)]
    x_lp, w_lp = (
        dequantize(q.codes, GRIDS["e2m1"]).astype(np.float64) * q.scale_inv for q in values
    )
    output = x_lp @ w_lp.T + residual @ weight.astype(np.float64).T
    grad_weight = grad_output.double().numpy().T @ (x_lp + residual)
    assert relative_frobenius(results.output.numpy(), output) < FORWARD
    assert relative_frobenius(results.grad_weight.numpy(), grad_weight) < BACKWARD["fp32"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [64, 767, 1024])
@pytest.mark.parametrize("bias", [False, True])
def test_the_epilogue_is_bit_for_bit_the_one_of_the_contract(
    bias: bool, k: int, dtype: torch.dtype
) -> None:
    layer = make_layer(k, 48, make_section(alpha=None), bias=bias, dtype=dtype)
    x = gaussian(33, k, seed=1).to(dtype)
    x_lp, w_lp = (
        quantize_rows(matrix.detach().float().numpy(), GRIDS["e2m1"])
        for matrix in (x, layer.weight)
    )
    # f32(f32(acc * scale_x) * scale_w) + bias, one cast; acc is exact in float64.
    acc = dequantize(x_lp.codes, GRIDS["e2m1"]).astype(np.float64)
    acc = acc @ dequantize(w_lp.codes, GRIDS["e2m1"]).astype(np.float64).T
    expected = (acc.astype(np.float32) * x_lp.scale_inv) * w_lp.scale_inv.T
    if bias:
        expected = expected + layer.bias.detach().float().numpy()
    assert torch.equal(layer(x).detach(), torch.from_numpy(expected).to(dtype))


def test_autograd_check_of_the_bias_and_the_straight_through_input() -> None:
    layer = make_layer(256, 32, make_section(estimator="ste", backward="bf16"), bias=True)
    x, grad_output = outlier_channels(19, 256), gaussian(19, 32, seed=1)
    results = run_layer(layer, x, grad_output)
    reference = reference_of(x, layer.weight, grad_output, alpha=0.99)
    assert relative_frobenius(results.grad_bias.numpy(), reference.grad_bias) < BACKWARD["fp32"]
    # Clamped elements get the same gradient as any other.
    check_gradients(results, reference, BACKWARD["fp32"])


def forward_error(section: dict, x: torch.Tensor) -> float:
    layer = make_layer(K, N, section)
    exact = x.double().numpy() @ layer.weight.detach().double().numpy().T
    return relative_frobenius(layer(x).detach().numpy(), exact)


def test_compensation_beats_clamping_alone_which_is_worse_than_nothing() -> None:
    x = outlier_channels(T, K, seed=1)
    errors = {
        "none": forward_error(make_section(alpha=None), x),
        "clamp": forward_error(make_section(alpha=0.99, compensation=None), x),
        "sparse": forward_error(make_section(alpha=0.99), x),
    }
    for name, measured in OUTLIER_FORWARD_ERROR.items():
        assert errors[name] == pytest.approx(measured, rel=0.25), (name, errors)
    assert errors["sparse"] < 0.5 * errors["none"] < errors["clamp"]


@pytest.mark.parametrize("data", [outlier_channels, "rows"], ids=["channels", "rows"])
def test_one_scale_per_tensor_is_clearly_worse_than_one_per_row(data: Callable | str) -> None:
    if data == "rows":  # tokens of different size: what a per-token scale is for
        x = gaussian(T, K, seed=1) * torch.logspace(-2, 2, T).unsqueeze(1)
    else:
        x = outlier_channels(T, K, seed=1)
        x[3] *= 20
    per_token = {}
    for granularity in ("row", "tensor"):
        layer = make_layer(K, N, make_section(alpha=None, granularity=granularity))
        exact = x.double() @ layer.weight.detach().double().t()
        error = (layer(x).detach() - exact).norm(dim=1) / exact.norm(dim=1)
        per_token[granularity] = float(error.mean())
    assert per_token["tensor"] > 1.5 * per_token["row"], per_token


@pytest.mark.parametrize("backward", ["e5m2", "e4m3"])
def test_gradients_have_one_scale_per_token_and_one_per_output_channel(backward: str) -> None:
    # Sizes that one scale for the whole of grad_output would flush to zero.
    layer = make_layer(K, N, make_section(estimator="ste", alpha=None, backward=backward))
    x, weight = gaussian(T, K, seed=1), layer.weight
    sizes = torch.logspace(-12, 0, N)
    grad_output = gaussian(T, N, seed=2) * sizes
    results = run_layer(layer, x, grad_output)
    reference = reference_of(x, weight, grad_output).grad_weight
    error = np.linalg.norm(results.grad_weight.numpy() - reference, axis=1)
    assert (error / np.linalg.norm(reference, axis=1)).max() < 1.5 * BACKWARD[backward]
    grad_output = gaussian(T, N, seed=2) * torch.logspace(-12, 0, T).unsqueeze(1)
    results = run_layer(layer, x, grad_output)
    reference = reference_of(x, weight, grad_output).grad_input
    error = np.linalg.norm(results.grad_input.numpy() - reference, axis=1)
    assert (error / np.linalg.norm(reference, axis=1)).max() < 1.5 * BACKWARD[backward]


def test_the_gradient_differs_between_dge_and_ste_by_the_slope_alone() -> None:
    x, grad_output = gaussian(64, 256), gaussian(64, 32, seed=1)
    runs = {
        name: run_layer(
            make_layer(256, 32, make_section(estimator=name, alpha=None, backward="bf16")),
            x,
            grad_output,
        )
        for name in DGE
    }
    assert torch.equal(runs["dge"].output, runs["ste"].output)
    assert torch.equal(runs["dge"].grad_input, runs["ste"].grad_input)
    weight = make_layer(256, 32, make_section()).weight
    slope = reference_of(x, weight, grad_output, dge=(5.0, 3.0)).slope
    ratio = runs["dge"].grad_weight.double() / runs["ste"].grad_weight.double()
    np.testing.assert_allclose(ratio.numpy(), slope, rtol=2e-5)
    assert (slope > 0).all()
