"""The process-wide precision switch of oneDNN is as it was, however many threads used it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fp4_plugin.core.gemm import gemm_bf16_exact, gemm_float32

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has no such switch"
)


def _products(_: int) -> torch.Tensor:
    return gemm_bf16_exact(torch.ones(64, 64), torch.ones(64, 64))


def test_threads_leave_the_switch_as_they_found_it():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with ThreadPoolExecutor(8) as pool:
        for product in pool.map(_products, range(400)):
            assert torch.equal(product, torch.full((64, 64), 64.0))
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_float32_products_keep_their_precision_beside_those_of_another_thread():
    x = torch.randn(256, 256)
    expected = gemm_float32(x, x)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(gemm_bf16_exact, x, x) for _ in range(200)]
        products = [gemm_float32(x, x) for _ in range(50)]
        assert all(torch.equal(product, expected) for product in products)
        assert all(other.result().isfinite().all() for other in others)


def test_an_error_leaves_the_switch_as_it_was():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(RuntimeError):
        gemm_bf16_exact(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.backends.mkldnn.matmul.fp32_precision == before
