"""torch.library definitions: opcheck on every operation, and what the fused ones promise."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import fp4_plugin.core.ops  # noqa: F401  (defines torch.ops.fp4_plugin)
from fp4_plugin.core.formats import FORMATS
from fp4_plugin.core.outliers import clamp_outliers, split_outliers
from fp4_plugin.core.packing import pack, unpack
from fp4_plugin.core.quantize import quantize

OPS = torch.ops.fp4_plugin


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., ::128] *= 20
    return x


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=generator)
    return pack(codes) if bits == 4 else codes & 0x7B  # no NaN or Inf code of either 8-bit format


def residual_arguments(scope: str, shape: tuple[int, int] = (6, 300)) -> tuple[Any, ...]:
    residual = split_outliers(gaussian(*shape), 0.97, scope)
    assert residual.num_entries > 0
    return residual.columns, residual.values, residual.offsets


def samples() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """id -> (operation, arguments)."""
    x, low, high = gaussian(5, 33), torch.full((5, 1), -1.0), torch.full((5, 1), 1.0)
    amax = torch.ones(1, 1)
    cases: dict[str, tuple[str, tuple[Any, ...]]] = {
        "quantize-clamped": ("quantize_rows", (x, "e2m1", "nearest", "absmax", None, low, high)),
        "quantize-amax": ("quantize_rows", (x, "e2m1", "nearest", "absmax", amax)),
        "quantize-pow2": ("quantize_rows", (x, "e2m1", "half_up", "pow2")),
        "quantize-bf16": ("quantize_rows", (x.bfloat16(), "e2m1", "nearest", "absmax")),
        "quantize-none": ("quantize_rows", (x[:0], "e2m1", "nearest", "absmax")),
        "quantize-strided": ("quantize_rows", (x.t(), "e4m3", "nearest", "absmax")),
        "quantize-stochastic": (
            "quantize_rows",
            (x, "e2m1", "stochastic", "absmax", None, None, None, [1, 2, 3, 4]),
        ),
        "gemm-nt": ("gemm", (*operand("e2m1", 5, 33), *operand("e2m1", 7, 33), "nt", 33, 33)),
        "gemm-nn": ("gemm", (*operand("e5m2", 5, 7), *operand("e2m1", 7, 33), "nn", 7, 33)),
        "gemm-tn": ("gemm", (*operand("", 5, 7), *operand("e2m1", 5, 33), "tn", 7, 33)),
        "gemm-mixed": ("gemm", (*operand("e4m3", 5, 33), *operand("e2m1", 7, 33), "nt", 33, 33)),
        "split": ("split_outliers", (gaussian(4, 300), 296)),
        "split-none": ("split_outliers", (gaussian(0, 300), 296)),
        "split-wide": ("split_outliers", (gaussian(1, 40_000), 39_990)),
        "residual-row": ("residual_gemm", (*residual_arguments("row"), gaussian(8, 300))),
        "residual-tensor": ("residual_gemm", (*residual_arguments("tensor"), gaussian(8, 300))),
        "wgrad-row": ("residual_wgrad", (*residual_arguments("row"), gaussian(6, 8), 300)),
        "wgrad-tensor": ("residual_wgrad", (*residual_arguments("tensor"), gaussian(6, 8), 300)),
    }
    for name in FORMATS.names():
        if FORMATS[name].signed:
            cases[f"quantize-{name}"] = ("quantize_rows", (x, name, "nearest", "absmax"))
    return cases


def operand(name: str, rows: int, columns: int) -> tuple[torch.Tensor, str]:
    if not name:
        return gaussian(rows, columns), name
    return random_codes(rows, columns, FORMATS[name].bits), name


SAMPLES = samples()


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck_finds_nothing_wrong(sample: str) -> None:
    name, arguments = SAMPLES[sample]
    torch.library.opcheck(getattr(OPS, name).default, arguments)


def test_every_operation_of_the_namespace_has_a_sample() -> None:
    defined = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fp4_plugin::")
    }
    assert defined
    assert defined == {name for name, _ in SAMPLES.values()}


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize(
    "formats", [("e2m1", "e2m1"), ("e5m2", "e2m1"), ("e2m1", "e1m2"), ("", "e2m1")], ids=str
)
def test_gemm_multiplies_the_decoded_operands_in_every_layout(
    formats: tuple[str, str], layout: str
) -> None:
    shapes = {"nt": ((5, 33), (7, 33)), "nn": ((5, 33), (33, 7)), "tn": ((33, 5), (33, 7))}[layout]
    stored, values = [], []
    for name, shape in zip(formats, shapes, strict=True):
        matrix, _ = operand(name, *shape)
        stored.append(matrix)
        values.append(decoded(matrix, name, shape[1]))
    a = values[0].t() if layout[0] == "t" else values[0]
    b = values[1].t() if layout[1] == "t" else values[1]
    product = OPS.gemm(
        stored[0], formats[0], stored[1], formats[1], layout, shapes[0][1], shapes[1][1]
    )
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), a @ b, rtol=1e-5, atol=1e-3)
    if formats == ("e2m1", "e2m1"):
        assert torch.equal(product.double(), a @ b)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_gemm_of_4_bit_codes_is_exact_for_every_small_shape_and_layout(layout: str) -> None:
    sizes = (1, 2, 3, 8, 13)
    for m, k, n in itertools.product(sizes, sizes, sizes):
        shape_a = (k, m) if layout[0] == "t" else (m, k)
        shape_b = (n, k) if layout[1] == "t" else (k, n)
        a, _ = operand("e2m1", *shape_a)
        b, _ = operand("e2m1", *shape_b)
        left, right = decoded(a, "e2m1", shape_a[1]), decoded(b, "e2m1", shape_b[1])
        expected = (left.t() if layout[0] == "t" else left) @ (
            right.t() if layout[1] == "t" else right
        )
        product = OPS.gemm(a, "e2m1", b, "e2m1", layout, shape_a[1], shape_b[1])
        assert torch.equal(product.double(), expected), (layout, m, k, n)


def decoded(matrix: torch.Tensor, name: str, num_columns: int) -> torch.Tensor:
    if not name:
        return matrix.double()
    codes = unpack(matrix, num_columns) if FORMATS[name].bits == 4 else matrix
    return FORMATS[name].decode_table()[codes.long()].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("shift", [-4.0, -2.0, 0.0, 2.0, 4.0])
def test_clamping_inside_quantize_rows_is_clamping_before_it(
    shift: float, scope: str, dtype: torch.dtype
) -> None:
    x = gaussian(40, 300, seed=5) + shift
    # Rows that lie wholly beyond the thresholds of the tensor, on either side.
    x[3], x[4], x[5] = 0.1 * shift, 40 + x[4], -40 + x[5]
    x[6] = 0.05
    x = x.to(dtype)
    clamped, residual = clamp_outliers(x, 0.9, scope)
    expected = quantize(clamped, packed=True)
    codes, scale_inv = OPS.quantize_rows(
        x, "e2m1", "nearest", "absmax", None, residual.low, residual.high
    )
    assert torch.equal(scale_inv, expected.scale_inv)
    assert torch.equal(codes, expected.codes)


@pytest.mark.parametrize("name", ["e2m1", "e1m2", "e3m0", "e4m3", "e5m2"])
def test_elements_beyond_a_given_amax_saturate(name: str) -> None:
    # A scale may come from elsewhere (another rank, another tensor) and be too small for x.
    x = torch.tensor([[1.0, -1.0, 1.3, -7.0, 1e30, -3e38]])
    codes, scale_inv = OPS.quantize_rows(x, name, "nearest", "absmax", torch.ones(1, 1))
    values = decoded(codes, name, 6) * scale_inv
    assert torch.equal(values.sign(), x.double().sign())
    assert torch.equal(values.abs().float(), torch.full_like(x, FORMATS[name].max) * scale_inv)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_clamped_infinity_does_not_vanish_into_the_threshold(bad: float) -> None:
    x = gaussian(4, 300)
    x[2, 7] = bad
    low, high = torch.full((4, 1), -1.0), torch.full((4, 1), 1.0)
    codes, scale_inv = OPS.quantize_rows(x, "e2m1", "nearest", "absmax", None, low, high)
    assert scale_inv.isnan().squeeze(1).tolist() == [False, False, True, False]
    assert not codes[2].any()


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_residual_products_are_those_of_the_dense_residual(scope: str) -> None:
    x = gaussian(24, 300)
    residual = split_outliers(x, 0.97, scope)
    dense = residual.to_dense().double()
    weight, grad_output = gaussian(8, 300, seed=1), gaussian(24, 8, seed=2)
    parts = residual.columns, residual.values, residual.offsets
    output = OPS.residual_gemm(*parts, weight)
    torch.testing.assert_close(output.double(), dense @ weight.double().t(), rtol=1e-5, atol=1e-3)
    grad_weight = OPS.residual_wgrad(*parts, grad_output, 300)
    expected = grad_output.double().t() @ dense
    torch.testing.assert_close(grad_weight.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_features", [1, 8, 48, 513])
def test_a_row_of_the_residual_product_is_batch_invariant_and_ascends_in_k(
    num_features: int,
) -> None:
    residual = split_outliers(gaussian(64, 1000), 0.97)
    weight = gaussian(num_features, 1000, seed=3)
    whole = OPS.residual_gemm(residual.columns, residual.values, None, weight)
    for row in (0, 13, 63):
        part = slice(row, row + 1)
        alone = OPS.residual_gemm(residual.columns[part], residual.values[part], None, weight)
        assert torch.equal(alone, whole[part])
    # Ascending k in float32, with or without fused multiply-adds.
    row, dense = 13, residual.to_dense()[13].numpy()
    total = np.zeros(num_features, dtype=np.float64)
    plain = np.zeros(num_features, dtype=np.float32)
    for column in np.flatnonzero(dense):
        products = dense[column].astype(np.float64) * weight[:, column].numpy().astype(np.float64)
        total = (total + products).astype(np.float32).astype(np.float64)
        plain = plain + products.astype(np.float32)
    value = whole[row].numpy()
    assert ((value == total) | (value == plain)).all()


def test_residual_products_are_equal_in_every_run() -> None:
    residual = split_outliers(gaussian(512, 1024), 0.97)
    grad_output = gaussian(512, 32, seed=4)
    parts = residual.columns, residual.values, None
    first = OPS.residual_wgrad(*parts, grad_output, 1024)
    for _ in range(3):
        assert torch.equal(OPS.residual_wgrad(*parts, grad_output, 1024), first)
