"""Gradient estimators: DGE against its float64 formula, and what every estimator owes its user."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4_plugin.core.formats import E1M2, E2M1, E3M0, E4M3, FORMATS, MiniFloat
from fp4_plugin.errors import ConfigError
from fp4_plugin.estimators import DGE, ESTIMATORS, STE
from tests.oracles import GRIDS, dge_slope, load_vectors
from tests.strategies import quick
from tests.tolerances import DGE_CAPPED_MEAN, DGE_SLOPE, RELATIVE_MEAN_SLOPE

NO_CAP = 1e30
FOUR_BITS = [E2M1, E1M2, E3M0]


def slopes(estimator: DGE, values: np.ndarray, fmt: MiniFloat = E2M1) -> np.ndarray:
    x = torch.from_numpy(np.asarray(values, dtype=np.float32))
    result = estimator.slope(x, fmt)
    assert result.dtype == torch.float32
    assert result.shape == x.shape
    return result.double().numpy()


@pytest.mark.parametrize("k", [3, 5, 10])
def test_every_dge_vector(k: int) -> None:
    cases = [case for case in load_vectors("dge_slope") if case["k"] == k]
    assert cases
    for cap in {case["cap"] for case in cases}:
        same = [case for case in cases if case["cap"] == cap]
        result = slopes(DGE(k=k, max_slope=cap), np.array([case["x"] for case in same]))
        expected = np.array([case["slope"] for case in same])
        np.testing.assert_allclose(result, expected, rtol=DGE_SLOPE, atol=0)


def test_the_slope_of_a_weight_that_scales_beyond_6_is_that_of_6() -> None:
    case = load_vectors("edges")["rows"][0]
    assert slopes(DGE(), np.array([6.0]))[0] == pytest.approx(case["dge_slope_of_first"], rel=1e-6)


@quick
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=60),
    st.sampled_from([2.0, 3.0, 5.0, 7.5, 10.0]),
    st.sampled_from([1.5, 3.0, 8.0]),
)
def test_dge_equals_the_float64_formula(values: list[float], k: float, cap: float) -> None:
    array = np.array(values, dtype=np.float32)
    expected = dge_slope(array, GRIDS["e2m1"], k, cap)
    np.testing.assert_allclose(slopes(DGE(k, cap), array), expected, rtol=DGE_SLOPE, atol=0)


@pytest.mark.parametrize("fmt", [*FOUR_BITS, E4M3], ids=lambda fmt: fmt.name)
def test_dge_follows_the_grid_of_any_format(fmt: MiniFloat) -> None:
    values = np.linspace(-1.1, 1.1, 20_001, dtype=np.float32) * np.float32(fmt.max)
    # Every grid point and every middle, where t is exactly 1 and 0.
    grid = np.array(fmt.grid)
    values = np.concatenate([values, grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    expected = dge_slope(values, GRIDS[fmt.name], 5.0, 3.0)
    np.testing.assert_allclose(slopes(DGE(), values, fmt), expected, rtol=DGE_SLOPE, atol=0)


@pytest.mark.parametrize("fmt", FOUR_BITS, ids=lambda fmt: fmt.name)
def test_the_slope_is_even_and_zero_only_beyond_the_grid(fmt: MiniFloat) -> None:
    values = np.linspace(0, 1.2, 5001, dtype=np.float32) * np.float32(fmt.max)
    positive = slopes(DGE(), values, fmt)
    np.testing.assert_array_equal(positive, slopes(DGE(), -values, fmt))
    np.testing.assert_array_equal(positive == 0, values > fmt.max)
    inside = positive[values <= fmt.max]
    assert inside.min() >= np.float32(0.2) * (1 - DGE_SLOPE)
    assert inside.max() <= 3.0


@pytest.mark.parametrize("k", [3, 5, 10])
@pytest.mark.parametrize("interval", range(7))
def test_the_mean_slope_over_an_interval(interval: int, k: int) -> None:
    lo, hi = GRIDS["e2m1"][interval : interval + 2]
    count = 1 << 16
    middle = (np.arange(count) + 0.5) / count  # midpoint rule: never on the cusp itself
    points = (lo + (hi - lo) * middle).astype(np.float32)
    capped = slopes(DGE(k=k), points).mean()
    assert capped == pytest.approx(DGE_CAPPED_MEAN[k], rel=RELATIVE_MEAN_SLOPE)
    renormalised = slopes(DGE(k=k, renormalize=True), points).mean()
    assert renormalised == pytest.approx(1.0, rel=RELATIVE_MEAN_SLOPE)


@pytest.mark.parametrize("k", [3, 5])
def test_without_a_cap_the_mean_slope_is_one(k: int) -> None:
    # Over half of the interval [0, .5], seen from its middle; the cusp itself in closed form.
    edge = 1e-4
    t = np.geomspace(edge, 1, 200_001)
    x = 0.25 + 0.25 * t
    y = slopes(DGE(k=k, max_slope=NO_CAP), x)
    integral = float(np.sum((y[1:] + y[:-1]) / 2 * np.diff(t))) + edge ** (1 / k)
    assert integral == pytest.approx(1.0, rel=RELATIVE_MEAN_SLOPE)


def test_renormalising_scales_every_slope_by_the_same_factor() -> None:
    values = np.linspace(-6, 6, 1001, dtype=np.float32)
    ratio = slopes(DGE(renormalize=True), values) / slopes(DGE(), values)
    np.testing.assert_allclose(ratio, 1 / DGE_CAPPED_MEAN[5], rtol=2e-4)


def test_the_input_is_not_changed() -> None:
    x = torch.linspace(-7, 7, 100)
    copy = x.clone()
    DGE().slope(x, E2M1)
    assert torch.equal(x, copy)


def test_a_non_finite_weight_has_no_finite_slope() -> None:
    assert DGE().slope(torch.tensor([float("nan")]), E2M1).isnan().all()


def test_the_straight_through_estimator_means_one() -> None:
    slope = STE().slope(torch.linspace(-6, 6, 10), E2M1)
    assert slope is None or torch.equal(slope, torch.ones(10))


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_every_registered_estimator_gives_finite_slopes_of_its_argument_shape(name: str) -> None:
    estimator = ESTIMATORS[name]()
    for format_name in FORMATS.names():
        fmt = FORMATS[format_name]
        if not fmt.signed:
            continue
        for shape in [(0, 4), (1, 1), (3, 5), (7,)]:
            x = torch.linspace(-1, 1, math.prod(shape)).reshape(shape) * fmt.max
            slope = estimator.slope(x, fmt)
            if slope is not None:
                assert slope.shape == x.shape
                assert slope.isfinite().all()
                assert (slope >= 0).all()


def test_estimators_are_values() -> None:
    assert DGE() == DGE(k=5.0, max_slope=3.0, renormalize=False)
    assert DGE(k=3) != DGE()
    with pytest.raises(AttributeError):
        DGE().k = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments",
    [{"k": 0}, {"k": -5}, {"k": math.nan}, {"max_slope": 0}, {"max_slope": -1}],
    ids=str,
)
def test_parameters_without_meaning_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        DGE(**arguments)


def test_the_names_of_the_contract_are_registered() -> None:
    assert ESTIMATORS["dge"] is DGE
    assert ESTIMATORS["ste"] is STE
    with pytest.raises(ConfigError, match="dgee.*did you mean 'dge'"):
        ESTIMATORS["dgee"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dge_takes_any_float_and_computes_in_float32(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 0.25, -1.75, 5.5, 6.0], dtype=dtype)
    slope = DGE().slope(x, E2M1)
    assert slope.dtype == torch.float32
    assert torch.equal(slope, DGE().slope(x.float(), E2M1))
