"""Outlier clamping: thresholds against a full sort, and not a bit lost in clamped + residual."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4_plugin.core.outliers import clamp_outliers
from fp4_plugin.core.quantize import quantize
from fp4_plugin.errors import ConfigError
from tests.oracles import float32_of_hex, load_vectors, thresholds
from tests.strategies import alphas, bf16_matrices, bf16_rows, matrices, quick

ALPHAS = [0.51, 0.75, 0.8, 0.9, 0.95, 0.97, 0.99, 0.999]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gaussian rows; every 128th channel is 20 times larger."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., ::128] *= 20
    return x.to(dtype)


def row_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(0)


def check_row(case: dict) -> None:
    x = row_of(case["x"])
    clamped, residual = clamp_outliers(x, case["alpha"])
    assert float(residual.lo) == np.float32(case["lo"])
    assert float(residual.hi) == np.float32(case["hi"])
    dense = residual.to_dense()
    assert int((dense != 0).sum()) == case["num_clamped"]
    assert int(residual.num_entries) == case["num_clamped"]
    assert torch.equal(clamped + dense, x)
    if "residual_sum" in case:
        assert dense.double().sum().item() == pytest.approx(case["residual_sum"], rel=1e-6)


@pytest.mark.parametrize("case", load_vectors("occ_clamp"), ids=lambda case: case["name"])
def test_every_occ_vector(case: dict) -> None:
    check_row(case)


@pytest.mark.parametrize("case", load_vectors("edges")["occ"], ids=lambda case: case["name"])
def test_every_occ_edge_vector(case: dict) -> None:
    check_row(case)


@pytest.mark.parametrize("case", load_vectors("edges")["rows"][1:], ids=lambda case: case["name"])
def test_every_non_finite_edge_row(case: dict) -> None:
    x = row_of([float(value) for value in case["x"]])
    clamped, residual = clamp_outliers(x, 0.6)
    assert int(residual.num_entries) == case["residual_entries"]
    quantized = quantize(clamped)
    assert quantized.scale_inv.isnan().all()
    assert quantized.codes.tolist() == [case["codes"]]


def test_the_scaled_up_edge_row_has_no_residual_where_alpha_leaves_nothing() -> None:
    x = torch.from_numpy(float32_of_hex(load_vectors("edges")["rows"][0]["x_hex"])).unsqueeze(0)
    clamped, residual = clamp_outliers(x, 0.99)
    assert torch.equal(clamped, x)
    assert int(residual.num_entries) == 0


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 99, 100, 101, 127, 128, 255, 256, 767, 1000, 4096])
def test_thresholds_are_the_order_statistics_of_a_full_sort(
    n: int, alpha: float, scope: str
) -> None:
    x = gaussian(3, n, seed=n)
    clamped, residual = clamp_outliers(x, alpha, scope)
    groups = x.numpy() if scope == "row" else x.numpy().reshape(1, -1)
    expected = np.array([thresholds(group, alpha) for group in groups], dtype=np.float32)
    np.testing.assert_array_equal(residual.lo.numpy().reshape(-1), expected[:, 0])
    np.testing.assert_array_equal(residual.hi.numpy().reshape(-1), expected[:, 1])
    clipped = np.clip(x.numpy(), expected[:, :1], expected[:, 1:])
    np.testing.assert_array_equal(clamped.numpy(), clipped)
    np.testing.assert_array_equal(residual.to_dense().numpy(), x.numpy() - clipped)


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("n", [17_001, 18_001, 19_001])
def test_the_index_is_computed_in_float64(n: int, scope: str) -> None:
    # floor(float32(.999) * n) is one less here.
    x = torch.randperm(n, generator=torch.Generator().manual_seed(0)).float().unsqueeze(0)
    _, residual = clamp_outliers(x, 0.999, scope)
    index = math.floor(0.999 * n)
    assert (float(residual.lo), float(residual.hi)) == (n - 1 - index, index)


@quick
@given(bf16_rows(), alphas(), st.sampled_from(["row", "tensor"]))
def test_thresholds_of_tied_bf16_rows_equal_the_sort(
    x: np.ndarray, alpha: float, scope: str
) -> None:
    clamped, residual = clamp_outliers(torch.from_numpy(x).bfloat16(), alpha, scope)
    lo, hi = thresholds(x, alpha)
    assert (float(residual.lo), float(residual.hi)) == (lo, hi)
    np.testing.assert_array_equal(clamped.float().numpy(), np.clip(x, lo, hi))


@quick
@given(bf16_matrices(), alphas(), st.sampled_from(["row", "tensor"]))
def test_bf16_is_split_without_losing_a_bit(x: np.ndarray, alpha: float, scope: str) -> None:
    narrow = torch.from_numpy(x).bfloat16()
    clamped, residual = clamp_outliers(narrow, alpha, scope)
    dense = residual.to_dense()
    assert dense.dtype == torch.float32
    assert clamped.shape == dense.shape == narrow.shape
    together = (clamped.float() + dense).numpy()
    magnitudes = np.abs(x[x != 0])
    if magnitudes.size and magnitudes.max() < 2.0**15 * magnitudes.min():
        np.testing.assert_array_equal(together, x)
        return
    # Eight bits each, more than 15 binades apart: their difference may need 25 bits.
    ulp = np.spacing(np.maximum(np.abs(x), np.abs(dense.numpy())))
    assert (np.abs(together.astype(np.float64) - x) <= ulp).all()


def test_bf16_numbers_many_binades_apart_are_split_to_one_ulp() -> None:
    x = torch.tensor([[2.0**-24, 0.25, -1.0]], dtype=torch.bfloat16)
    clamped, residual = clamp_outliers(x, 0.625)
    together = clamped.double() + residual.to_dense().double()
    assert float((together - x.double()).abs().max()) == 2.0**-24


@quick
@given(matrices(max_columns=200), alphas())
def test_fp32_is_split_to_one_ulp_of_the_larger(x: np.ndarray, alpha: float) -> None:
    x = np.clip(x, -1e38, 1e38)  # so that hi - lo does not overflow
    clamped, residual = clamp_outliers(torch.from_numpy(x), alpha)
    dense = residual.to_dense().numpy()
    ulp = np.spacing(np.maximum(np.abs(x), np.abs(dense)))
    assert (np.abs(clamped.numpy().astype(np.float64) + dense - x) <= ulp).all()


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_ordinary_bf16_activations_are_split_exactly(scope: str) -> None:
    x = gaussian(64, 1024, dtype=torch.bfloat16)
    clamped, residual = clamp_outliers(x, 0.99, scope)
    assert int(residual.num_entries) > 0
    assert torch.equal((clamped.float() + residual.to_dense()), x.float())
    assert torch.equal((clamped.float() + residual.to_dense()).bfloat16(), x)


def test_residual_is_zero_exactly_where_nothing_was_clamped() -> None:
    x = gaussian(16, 512)
    clamped, residual = clamp_outliers(x, 0.97)
    dense = residual.to_dense()
    assert torch.equal(dense != 0, clamped != x)
    assert int(residual.num_entries) == int((dense != 0).sum())
    density = float((dense != 0).float().mean())
    assert 0.04 < density <= 0.0625  # about 2 (1 - alpha)


@pytest.mark.parametrize("n", [100, 256, 767, 1000, 4096])
@pytest.mark.parametrize("alpha", [0.97, 0.99, 0.999])
def test_the_row_residual_has_a_fixed_width(alpha: float, n: int) -> None:
    x = gaussian(7, n)
    _, residual = clamp_outliers(x, alpha)
    width = 2 * (n - 1 - math.floor(alpha * n))
    assert residual.values.shape == residual.columns.shape == (7, width)
    assert residual.values.dtype == torch.float32
    assert residual.columns.dtype == torch.int16
    assert tuple(residual.shape) == (7, n)


def test_columns_of_a_row_are_unique_ascending_and_hold_the_dense_values() -> None:
    _, residual = clamp_outliers(gaussian(9, 1000), 0.99)
    dense = residual.to_dense()
    for row in range(9):
        kept = residual.values[row] != 0
        columns = residual.columns[row][kept].long()
        # Entries of a row are summed in ascending k.
        assert (columns.diff() > 0).all()
        assert torch.equal(dense[row, columns], residual.values[row][kept])
        assert int((dense[row] != 0).sum()) == columns.numel()


def test_columns_beyond_int16_are_kept() -> None:
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(0))
    x[0, 39_999], x[1, 35_000] = 1e3, -1e3
    clamped, residual = clamp_outliers(x, 0.999)
    assert residual.to_dense()[0, 39_999] > 900
    assert residual.to_dense()[1, 35_000] < -900
    np.testing.assert_array_equal(residual.to_dense().numpy(), x.numpy() - clamped.numpy())


@pytest.mark.parametrize("n", [1, 2, 50, 99, 100])
def test_short_rows_are_left_alone(n: int) -> None:
    x = gaussian(5, n)
    clamped, residual = clamp_outliers(x, 0.99)
    assert torch.equal(clamped, x)
    assert int(residual.num_entries) == 0
    assert not residual.to_dense().any()


def test_a_row_depends_on_no_other_row() -> None:
    x = gaussian(33, 512)
    clamped, residual = clamp_outliers(x, 0.99)
    for row in (0, 7, 32):
        alone, alone_residual = clamp_outliers(x[row : row + 1], 0.99)
        assert torch.equal(alone[0], clamped[row])
        assert torch.equal(alone_residual.to_dense()[0], residual.to_dense()[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_non_finite_row_has_no_residual_and_stays_non_finite(bad: float) -> None:
    x = gaussian(4, 512)
    clean, clean_residual = clamp_outliers(x, 0.99)
    x[2, 100] = bad
    clamped, residual = clamp_outliers(x, 0.99)
    assert not residual.to_dense()[2].any()
    assert not residual.values[2].any()
    assert quantize(clamped).scale_inv[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(clamped[others], clean[others])
    assert torch.equal(residual.to_dense()[others], clean_residual.to_dense()[others])
    assert quantize(clamped).scale_inv[others].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_tensor_scope_does_not_launder_a_non_finite_element(bad: float) -> None:
    x = gaussian(4, 512)
    x[2, 100] = bad
    clamped, residual = clamp_outliers(x, 0.99, "tensor")
    assert quantize(clamped).scale_inv[2].isnan().all()
    assert residual.to_dense()[2].isfinite().all()
    assert not residual.to_dense()[2].any()


def test_ties_at_the_threshold_are_not_clamped() -> None:
    x = torch.zeros(1, 1000)
    x[0, :500] = 4.0
    x[0, 500:] = -4.0
    clamped, residual = clamp_outliers(x, 0.99)
    assert torch.equal(clamped, x)
    assert int(residual.num_entries) == 0


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    x = gaussian(6, 300)
    expected, expected_residual = clamp_outliers(x, 0.97)
    folded, folded_residual = clamp_outliers(x.reshape(2, 3, 300), 0.97)
    assert torch.equal(folded.reshape(6, 300), expected)
    assert torch.equal(folded_residual.to_dense().reshape(6, 300), expected_residual.to_dense())
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(clamp_outliers(strided, 0.97)[0], expected)


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("shape", [(0, 300), (2, 0, 300)], ids=str)
def test_no_rows_have_no_residual(shape: tuple[int, ...], scope: str) -> None:
    clamped, residual = clamp_outliers(torch.zeros(shape), 0.99, scope)
    assert clamped.shape == shape
    assert residual.to_dense().shape == shape
    assert int(residual.num_entries) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_clamped_values_keep_their_precision(dtype: torch.dtype) -> None:
    x = gaussian(4, 512, dtype=dtype)
    clamped, residual = clamp_outliers(x, 0.99)
    assert torch.equal(clamped.float().to(dtype).float(), clamped.float())
    assert torch.equal(clamped.float() + residual.to_dense(), x.float())


@pytest.mark.parametrize("alpha", [0.5, 0.1, 1.5, -0.99, 0.0, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        clamp_outliers(torch.ones(2, 300), alpha)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows"):
        clamp_outliers(torch.ones(2, 300), 0.99, "rows")


def test_tensor_scope_sees_beyond_the_row() -> None:
    x = gaussian(8, 64)
    assert int(clamp_outliers(x, 0.99, "row")[1].num_entries) == 0
    _, residual = clamp_outliers(x, 0.99, "tensor")
    n = x.numel()
    expected = 2 * (n - 1 - math.floor(0.99 * n))
    assert 0 < int(residual.num_entries) <= expected
