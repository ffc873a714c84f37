"""Any number of tokens, any width, any strides."""

from __future__ import annotations

import pytest
import torch

from tests.linear.layers import (
    BACKWARDS,
    gaussian,
    make_layer,
    make_section,
    outlier_channels,
    run_layer,
    same_results,
)
from tests.oracles import linear_reference, relative_frobenius
from tests.tolerances import BACKWARD, FORWARD

PAPER = make_section()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize(
    "shape",
    [(1, 767, 33), (13, 767, 33), (13, 256, 1), (1, 1, 1), (5, 1, 3), (1, 256, 1), (2, 3, 5)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_odd_shapes_agree_with_float64(shape: tuple[int, int, int], backward: str) -> None:
    t, k, n = shape
    layer = make_layer(k, n, make_section(backward=backward), bias=True)
    x, grad_output = outlier_channels(t, k, seed=1), gaussian(t, n, seed=2)
    results = run_layer(layer, x, grad_output)
    reference = linear_reference(
        x.numpy(),
        layer.weight.detach().numpy(),
        grad_output.numpy(),
        alpha=0.99,
        dge=(5.0, 3.0),
        bias=layer.bias.detach().numpy(),
    )
    bound = BACKWARD["fp32" if backward == "bf16" else backward]
    if backward != "bf16":
        bound *= 4  # a few elements do not average the cast's error out; its largest is 1/8
    assert relative_frobenius(results.output.numpy(), reference.output) < FORWARD
    assert relative_frobenius(results.grad_input.numpy(), reference.grad_input) < bound
    assert relative_frobenius(results.grad_weight.numpy(), reference.grad_weight) < bound
    assert relative_frobenius(results.grad_bias.numpy(), reference.grad_bias) < BACKWARD["fp32"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)], ids=str)
def test_zero_tokens_give_an_empty_output_and_zero_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> None:
    layer = make_layer(256, 32, PAPER, bias=bias, dtype=dtype)
    grad_output = torch.zeros(*shape[:-1], 32, dtype=dtype)
    results = run_layer(layer, torch.zeros(shape, dtype=dtype), grad_output)
    assert results.output.shape == grad_output.shape
    assert results.output.dtype == dtype
    assert results.grad_input.shape == shape
    assert torch.equal(results.grad_weight, torch.zeros(32, 256, dtype=dtype))
    if bias:
        assert torch.equal(results.grad_bias, torch.zeros(32, dtype=dtype))


@pytest.mark.parametrize("shape", [(256,), (3, 7, 256), (2, 1, 5, 256)], ids=str)
def test_leading_dimensions_are_tokens(shape: tuple[int, ...]) -> None:
    layer = make_layer(256, 32, PAPER, bias=True)
    x, grad_output = outlier_channels(*shape), gaussian(*shape[:-1], 32, seed=1)
    folded = run_layer(layer, x, grad_output)
    flat = run_layer(layer, x.reshape(-1, 256), grad_output.reshape(-1, 32))
    assert folded.output.shape == (*shape[:-1], 32)
    assert folded.grad_input.shape == shape
    assert torch.equal(folded.output.reshape(-1, 32), flat.output)
    assert torch.equal(folded.grad_input.reshape(-1, 256), flat.grad_input)
    assert torch.equal(folded.grad_weight, flat.grad_weight)
    assert torch.equal(folded.grad_bias, flat.grad_bias)


def test_non_contiguous_inputs_and_gradients_do_not_matter() -> None:
    layer = make_layer(256, 32, PAPER, bias=True)
    x, grad_output = outlier_channels(24, 256), gaussian(24, 32, seed=1)
    expected = run_layer(layer, x, grad_output)
    transposed = x.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert same_results(run_layer(layer, transposed, grad_output), expected)
    padded = torch.zeros(48, 300)
    padded[::2, 7:263] = x
    assert same_results(run_layer(layer, padded[::2, 7:263], grad_output), expected)
    # A strided gradient may be summed in another order: equal to rounding, not in bits.
    one_row = grad_output[:1].expand(24, 32)  # what sum().backward() sends
    for strided in (grad_output.t().contiguous().t(), one_row):
        results = run_layer(layer, x, strided)
        copied = run_layer(layer, x, strided.contiguous())
        for a, b in zip(vars(results).values(), vars(copied).values(), strict=True):
            assert relative_frobenius(a.numpy(), b.double().numpy()) < BACKWARD["fp32"]


def test_a_transposed_sequence_first_input_works() -> None:
    layer = make_layer(256, 32, PAPER)
    x = outlier_channels(6, 4, 256)
    assert torch.equal(layer(x.transpose(0, 1)), layer(x).transpose(0, 1))


def test_a_wrong_width_is_refused_with_both_numbers() -> None:
    layer = make_layer(256, 32, PAPER)
    with pytest.raises((RuntimeError, ValueError), match="255.*256|256.*255"):
        layer(gaussian(3, 255))
