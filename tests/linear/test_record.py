"""What a layer says it did: bytes and GEMM counts come from what happened."""

from __future__ import annotations

import pytest
import torch

from tests.linear.layers import backward_bytes, make_layer, make_section, outlier_channels


@pytest.mark.parametrize("keep_weight_codes", [False, True])
@pytest.mark.parametrize("alpha", [None, 0.99])
def test_reported_bytes_are_the_bytes_that_were_saved(
    alpha: float | None, keep_weight_codes: bool
) -> None:
    layer = make_layer(512, 64, make_section(alpha=alpha), bias=True)
    layer.fp4.keep_weight_codes = keep_weight_codes
    x = outlier_channels(24, 512)
    saved = backward_bytes(layer, x, list(layer.parameters()))
    record = layer.fp4.record
    assert record.saved_bytes + record.weight_code_bytes == saved
    assert record.weight_code_bytes == (64 * (512 // 2 + 4) if keep_weight_codes else 0)
    assert record.input_bytes == 2 * x.numel()


def test_every_gemm_that_ran_is_counted_once() -> None:
    layer = make_layer(256, 32, make_section())
    x = outlier_channels(5, 256).requires_grad_()
    layer(x).sum().backward()
    layer(x.detach()).sum().backward()  # no dgrad here
    with torch.no_grad():
        layer(x)
    calls = {label: gemm.calls for label, gemm in layer.fp4.record.gemms.items()}
    assert calls == {"fprop": 3, "dgrad": 1, "wgrad": 2}
    assert layer.fp4.record.tokens == 15
    assert all(gemm.kernels for gemm in layer.fp4.record.gemms.values())
