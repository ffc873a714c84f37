"""Equal bits: run to run, token by token, and recomputed by activation checkpointing."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.linear.layers import (
    BACKWARDS,
    gaussian,
    make_layer,
    make_section,
    outlier_channels,
    run_layer,
    same_results,
)

PAPER = make_section()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_two_runs_are_bit_equal(backward: str, dtype: torch.dtype) -> None:
    section = make_section(backward=backward)
    x, grad_output = outlier_channels(200, 512).to(dtype), gaussian(200, 96, seed=1).to(dtype)
    runs = [
        run_layer(make_layer(512, 96, section, bias=True, dtype=dtype), x.clone(), grad_output)
        for _ in range(2)
    ]
    assert same_results(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(256, 32), (767, 33), (1024, 384)], ids=str)
def test_decoding_one_token_equals_prefill(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = make_layer(*size, PAPER, bias=True, dtype=dtype)
    x = outlier_channels(65, size[0]).to(dtype)
    with torch.no_grad():
        prefill = layer(x)
        for token in (0, 1, 31, 64):
            assert torch.equal(layer(x[token : token + 1]), prefill[token : token + 1])
        assert torch.equal(layer(x[:13]), prefill[:13])
        assert torch.equal(layer(x[5]), prefill[5])


@pytest.mark.parametrize("shape", [(33, 767, 48), (1, 256, 32), (5, 1, 3), (0, 256, 8)], ids=str)
def test_both_cpu_kernels_give_the_same_output(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # int8 where the CPU has int8 dot products, float32 elsewhere: the same bits.
    num_tokens, k, n = shape
    layer = make_layer(k, n, PAPER, bias=True)
    x = outlier_channels(num_tokens, k)
    outputs = []
    for is_fast in (False, True):
        monkeypatch.setattr("fp4_plugin.core.gemm.has_fast_int8", lambda is_fast=is_fast: is_fast)
        outputs.append(layer(x.clone()).detach())
    assert torch.equal(*outputs)


def test_a_token_depends_on_no_other_token() -> None:
    layer = make_layer(512, 64, PAPER)
    x = outlier_channels(32, 512)
    before = layer(x)
    changed = x.clone()
    changed[20:] = 1e4 * gaussian(12, 512, seed=3)
    assert torch.equal(layer(changed)[:20], before[:20])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation_checkpointing_recomputes_the_same_bits(
    dtype: torch.dtype, use_reentrant: bool
) -> None:
    layers = nn.Sequential(
        make_layer(256, 512, PAPER, bias=True, dtype=dtype),
        nn.SiLU(),
        make_layer(512, 256, PAPER, dtype=dtype),
    )
    x, grad_output = outlier_channels(40, 256).to(dtype), gaussian(40, 256, seed=1).to(dtype)

    def run(*, checkpointed: bool) -> list[torch.Tensor]:
        layers.zero_grad()
        source = x.clone().requires_grad_()
        call = functools.partial(checkpoint, layers, use_reentrant=use_reentrant)
        output = call(source) if checkpointed else layers(source)
        output.backward(grad_output)
        return [output.detach(), source.grad, *(p.grad.clone() for p in layers.parameters())]

    plain, recomputed = run(checkpointed=False), run(checkpointed=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
