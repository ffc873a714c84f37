"""GEMMs of codes are exact: every implementation gives the bits of int64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fp4_plugin.core.gemm import code_gemm, code_gemm_float8, code_gemm_float32, code_gemm_int8
from fp4_plugin.core.quantize import fake_quantize
from tests.oracles import GRIDS, dequantize, sqnr_db
from tests.tolerances import GEMM_SQNR_DB

IMPLEMENTATIONS = [code_gemm, code_gemm_float32, code_gemm_int8, code_gemm_float8]
SHAPES = [
    (64, 1024, 48),
    (32, 8192, 16),
    (1, 1024, 64),
    (13, 1024, 7),
    (1, 8192, 1),
    (13, 767, 5),
    (5, 767, 1),
    (2, 1, 3),
    (3, 2, 1),
    (17, 33, 31),
    (0, 64, 8),
    (8, 64, 0),
    (4, 0, 5),
    (0, 0, 0),
]


def random_codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of products of doubled E2M1 values in int64, divided by 4 at the end."""
    doubled = [(2 * dequantize(codes.numpy(), GRIDS["e2m1"])).astype(np.int64) for codes in (a, b)]
    return torch.from_numpy((doubled[0] @ doubled[1].T).astype(np.float64) / 4)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda f: f.__name__)
def test_every_implementation_gives_the_bits_of_int64(
    implementation: Callable, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    a, b = random_codes(m, k, seed=m + k), random_codes(n, k, seed=n + k + 1)
    product = implementation(a, b)
    assert product.dtype == torch.float32
    assert product.shape == (m, n)
    assert torch.equal(product.double(), exact_product(a, b))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", [1024, 8192])
def test_the_largest_sums_stay_exact(implementation: Callable, k: int) -> None:
    # All codes at +-6: the accumulator grows to 36 K, the worst case of every kernel.
    a = torch.full((16, k), 7, dtype=torch.uint8)
    b = torch.full((16, k), 7, dtype=torch.uint8)
    b[8:] = 15
    a[3, k // 2], b[5, 1] = 1, 1  # odd quarters next to the large sums
    assert torch.equal(implementation(a, b).double(), exact_product(a, b))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda f: f.__name__)
def test_non_contiguous_codes_multiply_like_their_copies(implementation: Callable) -> None:
    a, b = random_codes(40, 24, 0).t(), random_codes(16, 80, 1)[:, ::2]
    expected = exact_product(a.contiguous(), b.contiguous())
    assert torch.equal(implementation(a, b).double(), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda f: f.__name__)
def test_a_row_of_the_product_does_not_depend_on_the_batch(implementation: Callable) -> None:
    a, b = random_codes(64, 1024, 2), random_codes(48, 1024, 3)
    whole = implementation(a, b)
    for row in (0, 13, 63):
        assert torch.equal(implementation(a[row : row + 1], b), whole[row : row + 1])


@pytest.mark.parametrize("name", GEMM_SQNR_DB)
def test_signal_to_noise_of_a_product_reaches_its_floor(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1024, generator=generator)
    w = torch.randn(128, 1024, generator=generator)
    reference = x.double() @ w.double().t()
    value = fake_quantize(x, name).double() @ fake_quantize(w, name).double().t()
    assert sqnr_db(reference.numpy(), value.numpy()) > GEMM_SQNR_DB[name]
