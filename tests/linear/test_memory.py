"""Bytes kept for backward, and one quantised input for the linears that read the same tensor."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from fp4_plugin import convert_to_fp4
from fp4_plugin.linear.operand import QuantizedInput
from fp4_plugin.linear.shared_input import share_inputs_within
from tests.linear.layers import backward_bytes, gaussian, make_layer, make_section, outlier_channels
from tests.tolerances import BACKWARD_BYTES_PER_ELEMENT

NUM_FEATURES = 96


def bytes_per_element(module: nn.Module, k: int, dtype: torch.dtype = torch.float32) -> float:
    """Growth of the saved bytes with the number of tokens: what depends on the weight drops out."""
    parameters = list(module.parameters())
    few, many = (
        backward_bytes(module, outlier_channels(num_tokens, k).to(dtype), parameters)
        for num_tokens in (64, 192)
    )
    return (many - few) / (128 * k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("estimator", ["dge", "ste"])
@pytest.mark.parametrize("k", [256, 1024, 4096])
@pytest.mark.parametrize(("alpha", "bound"), [(None, "no_outliers"), (0.99, "alpha_0.99")])
def test_saved_bytes_stay_within_their_bound(
    alpha: float | None, bound: str, k: int, estimator: str, dtype: torch.dtype
) -> None:
    section = make_section(estimator=estimator, alpha=alpha)
    layer = make_layer(k, NUM_FEATURES, section, bias=True, dtype=dtype)
    measured = bytes_per_element(layer, k, dtype)
    assert 0.5 <= measured <= BACKWARD_BYTES_PER_ELEMENT[bound]


def test_the_measure_gives_two_bytes_for_a_bf16_linear() -> None:
    plain = nn.Linear(256, NUM_FEATURES, dtype=torch.bfloat16)
    assert bytes_per_element(plain, 256, torch.bfloat16) == BACKWARD_BYTES_PER_ELEMENT["bf16"]


def test_what_is_saved_beside_the_input_is_at_most_the_weight_codes() -> None:
    layer = make_layer(1024, NUM_FEATURES, make_section())
    x = outlier_channels(64, 1024)
    saved = backward_bytes(layer, x, list(layer.parameters()))
    for_input = bytes_per_element(layer, 1024) * x.numel()
    assert saved - for_input <= NUM_FEATURES * (1024 // 2 + 4)


def test_without_weight_codes_only_the_input_is_saved() -> None:
    # ZeRO-3: a saved quantised weight would hold a whole model of them.
    layer = make_layer(1024, NUM_FEATURES, make_section())
    x, grad_output = outlier_channels(64, 1024), gaussian(64, NUM_FEATURES, seed=1)
    source = x.clone().requires_grad_()
    expected = torch.autograd.grad(layer(source), [source, layer.weight], grad_output)
    layer.fp4.keep_weight_codes = False
    saved = backward_bytes(layer, x, list(layer.parameters()))
    assert saved == bytes_per_element(layer, 1024) * x.numel()
    result = torch.autograd.grad(layer(source), [source, layer.weight], grad_output)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


class Branches(nn.Module):
    """q, k and v: three linears that read one tensor."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        share_inputs_within(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


@pytest.mark.parametrize("alpha", [None, 0.99])
def test_linears_that_read_the_same_tensor_share_one_quantised_input(alpha: float | None) -> None:
    section = make_section(alpha=alpha)
    one = bytes_per_element(make_layer(512, NUM_FEATURES, section), 512)
    three = Branches(*(make_layer(512, n, section) for n in (NUM_FEATURES, 32, 32)))
    assert bytes_per_element(three, 512) == one


def test_the_shared_input_survives_views_of_the_same_tensor() -> None:
    section = make_section()
    q, k, v = (make_layer(512, 32, section) for _ in range(3))

    class Views(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return q(x) + k(x.view(x.shape)) + v(x.view_as(x))

    one = bytes_per_element(make_layer(512, 32, section), 512)
    assert bytes_per_element(Views(q, k, v), 512) == one


def test_linears_with_other_recipes_do_not_share() -> None:
    sections = [make_section(alpha=alpha) for alpha in (None, 0.99, 0.97)]
    layers = [make_layer(512, 32, section) for section in sections]
    x = outlier_channels(16, 512)
    together = Branches(*layers)(x)
    for index, section in enumerate(sections):
        alone = make_layer(512, 32, section)(x.clone())
        assert torch.equal(together[:, 32 * index : 32 * index + 32], alone)


def test_shared_and_separate_inputs_give_the_same_bits() -> None:
    section = make_section()
    branches = Branches(*(make_layer(512, 32, section) for _ in range(3)))
    x, grad_output = outlier_channels(16, 512), gaussian(16, 96, seed=1)
    source = x.clone().requires_grad_()
    branches(source).backward(grad_output)
    for index, layer in enumerate(branches.layers):
        part = grad_output[:, 32 * index : 32 * index + 32]
        separate = make_layer(512, 32, section)
        separate(x.clone()).backward(part)
        assert torch.equal(layer.weight.grad, separate.weight.grad)


def test_a_new_tensor_at_the_address_of_a_freed_one_is_not_taken_for_it() -> None:
    layer = make_layer(512, 32, make_section())
    for seed in range(20):
        x = outlier_channels(16, 512, seed=seed)
        output = layer(x)
        with torch.no_grad():
            expected = make_layer(512, 32, make_section())(x.clone())
        assert torch.equal(output.detach(), expected)
        del x, output


def test_slices_of_one_tensor_are_told_apart() -> None:
    layer = make_layer(512, 32, make_section())
    x = outlier_channels(32, 512)
    halves = [layer(x[:16]), layer(x[16:])]
    assert torch.equal(torch.cat(halves), layer(x.clone()))
    assert torch.equal(layer(x[:16].flip(0)), halves[0].flip(0))


def quantized_inputs() -> list[QuantizedInput]:
    return [one for one in gc.get_objects() if type(one) is QuantizedInput]


def test_nothing_of_the_input_lives_on_after_backward() -> None:
    layer = make_layer(512, 32, make_section())
    x = outlier_channels(16, 512)
    reference = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    layer(x).sum().backward()
    del x
    assert reference.expired()
    assert quantized_inputs() == []


def test_nothing_of_the_input_lives_on_after_the_forward_of_a_model() -> None:
    model = convert_to_fp4(nn.Sequential(nn.Linear(512, 32)), make_section())
    with torch.no_grad():
        model(outlier_channels(16, 512))
    assert quantized_inputs() == []


def test_an_input_that_is_not_quantised_is_not_kept() -> None:
    section = {"linear": {"input": {"format": "bf16", "outliers": None}}}
    section["linear"] |= {"fprop": "bf16", "wgrad": "bf16"}
    make_layer(512, 32, section)(outlier_channels(16, 512))
    assert quantized_inputs() == []


def test_a_layer_that_is_recomputed_in_another_thread_sees_a_buffer_written_in_between() -> None:
    # As on CUDA, where autograd calls backward from its own thread.
    layer, buffer, seen = make_layer(512, 32, make_section()), outlier_channels(16, 512), []

    def two_steps() -> None:
        for seed in (1, 2):
            buffer.data.copy_(outlier_channels(16, 512, seed=seed))  # no version counter tells
            output = layer(buffer)
            seen.append(output.detach().clone())
            output.sum().backward()

    thread = threading.Thread(target=two_steps)
    thread.start()
    thread.join()
    assert not torch.equal(*seen)


def test_a_layer_called_by_itself_sees_a_buffer_that_was_written_behind_autograds_back() -> None:
    layer, buffer = make_layer(512, 32, make_section()), outlier_channels(16, 512)
    with torch.no_grad():
        first = layer(buffer)
        buffer.numpy()[:] *= -3.0
        assert not torch.equal(layer(buffer), first)


def test_an_error_in_forward_ends_the_sharing() -> None:
    branches = Branches(make_layer(512, 32, make_section()), nn.Linear(7, 7))
    with pytest.raises(RuntimeError):
        branches(outlier_channels(16, 512))
    assert quantized_inputs() == []
    layer, buffer = branches.layers[0], outlier_channels(16, 512)
    with torch.no_grad():
        first = layer(buffer)
        buffer.data.mul_(-3.0)
        assert not torch.equal(layer(buffer), first)
