"""FP4Linear under autograd: dtypes, autocast, frozen parameters, in-place changes."""

from __future__ import annotations

import pytest
import torch

from tests.linear.layers import (
    gaussian,
    make_layer,
    make_section,
    outlier_channels,
    run_layer,
)
from tests.oracles import linear_reference, relative_frobenius
from tests.tolerances import BACKWARD

PAPER = make_section()
EXACT = make_section(backward="bf16")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_have_the_dtype_of_their_tensor(dtype: torch.dtype) -> None:
    layer = make_layer(256, 32, PAPER, bias=True, dtype=dtype)
    x, grad_output = outlier_channels(19, 256).to(dtype), gaussian(19, 32, seed=1).to(dtype)
    results = run_layer(layer, x, grad_output)
    for tensor in vars(results).values():
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
    wide = make_layer(256, 32, PAPER, bias=True)
    with torch.no_grad():
        wide.weight.copy_(layer.weight)
        wide.bias.copy_(layer.bias)
    # Operands are widened before anything else: only the last cast differs.
    assert torch.equal(wide(x.float()).to(dtype), results.output)


def test_small_fp16_gradients_survive_the_folded_scales() -> None:
    layer = make_layer(256, 32, PAPER, dtype=torch.float16)
    x, grad_output = gaussian(19, 256).half() / 64, gaussian(19, 32, seed=1).half() / 1024
    results = run_layer(layer, x, grad_output)
    reference = linear_reference(
        x.float().numpy(),
        layer.weight.detach().float().numpy(),
        grad_output.float().numpy(),
        alpha=0.99,
        dge=(5.0, 3.0),
    )
    error = relative_frobenius(results.grad_weight.float().numpy(), reference.grad_weight)
    assert error < BACKWARD["e5m2"]


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_weights_are_quantised_from_their_stored_dtype(
    input_dtype: torch.dtype,
) -> None:
    layer = make_layer(256, 32, EXACT, bias=True)
    x = outlier_channels(19, 256).to(input_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, layer(x.float()).bfloat16())


def test_backward_under_autocast_reaches_fp32_parameters() -> None:
    layer = make_layer(256, 32, EXACT, bias=True)
    x, grad_output = outlier_channels(64, 256), gaussian(64, 32, seed=1).bfloat16()

    def call(source: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(source)

    results = run_layer(layer, x, grad_output, call)
    assert results.grad_weight.dtype == results.grad_input.dtype == torch.float32
    reference = linear_reference(
        x.numpy(),
        layer.weight.detach().numpy(),
        grad_output.float().numpy(),
        alpha=0.99,
        dge=(5.0, 3.0),
    )
    assert relative_frobenius(results.grad_weight.numpy(), reference.grad_weight) < BACKWARD["bf16"]
    assert relative_frobenius(results.grad_input.numpy(), reference.grad_input) < BACKWARD["bf16"]


def test_a_frozen_weight_gets_no_gradient_and_the_input_still_does() -> None:
    x, grad_output = outlier_channels(19, 256), gaussian(19, 32, seed=1)
    layer = make_layer(256, 32, PAPER, bias=True)
    expected = run_layer(layer, x, grad_output)
    layer.weight.requires_grad_(False)
    results = run_layer(layer, x, grad_output)
    assert results.grad_weight is None
    assert torch.equal(results.grad_input, expected.grad_input)
    assert torch.equal(results.grad_bias, expected.grad_bias)


def test_an_input_without_gradient_leaves_the_weight_gradient_alone() -> None:
    x, grad_output = outlier_channels(19, 256), gaussian(19, 32, seed=1)
    layer = make_layer(256, 32, PAPER, bias=True)
    expected = run_layer(layer, x, grad_output)
    layer.zero_grad()
    layer(x).backward(grad_output)
    assert x.grad is None
    assert torch.equal(layer.weight.grad, expected.grad_weight)


def test_without_gradients_nothing_is_recorded_and_the_output_is_the_same() -> None:
    x = outlier_channels(19, 256)
    layer = make_layer(256, 32, PAPER, bias=True)
    expected = layer(x)
    with torch.no_grad():
        plain = layer(x)
    with torch.inference_mode():
        inference = layer(x.clone())
    assert plain.grad_fn is None
    assert torch.equal(plain, expected.detach())
    assert torch.equal(inference, expected.detach())


def test_gradients_accumulate_over_calls() -> None:
    layer = make_layer(256, 32, EXACT)
    x, grad_output = outlier_channels(8, 256), gaussian(8, 32, seed=1)
    once = run_layer(layer, x, grad_output).grad_weight
    layer.zero_grad()
    for _ in range(2):
        layer(x).backward(grad_output)
    assert torch.equal(layer.weight.grad, once + once)


def test_backward_twice_through_a_retained_graph_gives_the_same_bits() -> None:
    layer = make_layer(256, 32, PAPER)
    x, grad_output = outlier_channels(8, 256).requires_grad_(), gaussian(8, 32, seed=1)
    output = layer(x)
    first = torch.autograd.grad(output, [x, layer.weight], grad_output, retain_graph=True)
    second = torch.autograd.grad(output, [x, layer.weight], grad_output)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_changing_the_input_in_place_after_the_call_changes_no_gradient() -> None:
    # The input itself is not saved, so nothing can be stale and nothing need be forbidden.
    layer = make_layer(256, 32, PAPER)
    x, grad_output = outlier_channels(8, 256), gaussian(8, 32, seed=1)
    expected = run_layer(layer, x, grad_output)
    layer.zero_grad()
    source = x.clone()
    output = layer(source)
    source.zero_()
    output.backward(grad_output)
    assert torch.equal(layer.weight.grad, expected.grad_weight)


def test_an_input_changed_in_place_between_two_layers_is_quantised_again() -> None:
    first, second = (make_layer(256, 32, PAPER) for _ in range(2))
    x = outlier_channels(8, 256)
    changed = x.flip(1)
    expected = second(changed.clone())
    first(x)
    x.copy_(changed)
    assert torch.equal(second(x), expected)


def test_changing_the_weight_is_seen_by_the_next_call() -> None:
    layer = make_layer(256, 32, PAPER)
    x = outlier_channels(8, 256)
    layer(x)
    new = gaussian(32, 256, seed=9)
    layer.weight.data.copy_(new)  # as DeepSpeed writes: no version counter tells of it
    fresh = make_layer(256, 32, PAPER)
    with torch.no_grad():
        fresh.weight.copy_(new)
    assert torch.equal(layer(x), fresh(x))
