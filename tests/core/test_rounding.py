"""Casting to a grid: nearest-even against ml_dtypes and brute force, half-up, stochastic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4_plugin.core.formats import E2M1, E5M2, FORMATS, MiniFloat
from fp4_plugin.core.rounding import ROUNDINGS, PhiloxKey, philox, philox_uniform, round_to_grid
from fp4_plugin.errors import ConfigError
from tests.oracles import (
    GRIDS,
    ML_DTYPES,
    dequantize,
    every_finite_bf16,
    float32_of_hex,
    half_up_value,
    load_vectors,
    nearest_even_code,
    philox4x32,
)
from tests.strategies import finite_float32, quick
from tests.tolerances import STANDARD_ERRORS

SIGNED = [name for name in FORMATS.names() if FORMATS[name].signed]


def bits(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """Bit patterns, so that -0 differs from 0."""
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def rounded(values: np.ndarray, name: str, rounding: str = "nearest") -> np.ndarray:
    result = round_to_grid(torch.from_numpy(values), FORMATS[name], rounding)
    assert result.dtype == torch.float32
    assert result.shape == values.shape
    return result.numpy()


def random_float32(size: int) -> np.ndarray:
    """Random bit patterns (every exponent alike) and Gaussians, finite."""
    rng = np.random.default_rng(11)
    anything = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    gaussian = (3 * rng.standard_normal(size)).astype(np.float32)
    return np.concatenate([anything[np.isfinite(anything)], gaussian])


DATA = {"every-bf16": every_finite_bf16(), "random-fp32": random_float32(100_000)}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", [name for name in ML_DTYPES if FORMATS[name].signed])
def test_nearest_agrees_with_ml_dtypes(name: str, data: str) -> None:
    largest = np.float32(FORMATS[name].max)
    clipped = np.clip(DATA[data], -largest, largest)
    expected = clipped.astype(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(bits(rounded(DATA[data], name)), bits(expected))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", GRIDS)
def test_nearest_is_the_nearest_value_with_ties_to_the_even_code(name: str, data: str) -> None:
    values = DATA[data]
    if not FORMATS[name].signed:
        values = values[values > 0]
    expected = dequantize(nearest_even_code(values, GRIDS[name]), GRIDS[name])
    np.testing.assert_array_equal(bits(rounded(values, name)), bits(expected))


def test_e8m0_agrees_with_ml_dtypes_except_at_ties() -> None:
    # ml_dtypes breaks ties upward and rounds subnormals up; the contract is nearest-even for all.
    values = DATA["every-bf16"]
    values = values[values >= 2.0**-126]
    ties = np.frexp(values)[0] == 0.75
    expected = np.minimum(values, np.float32(2.0**127)).astype(ML_DTYPES["e8m0"])
    result = rounded(values, "e8m0")
    np.testing.assert_array_equal(result[~ties], expected.astype(np.float32)[~ties])


def test_every_e2m1_rounding_vector() -> None:
    cases = load_vectors("e2m1_rounding")
    values = float32_of_hex([case["x_hex"] for case in cases])
    expected = np.array([case["value"] for case in cases], dtype=np.float32)
    np.testing.assert_array_equal(bits(rounded(values, "e2m1")), bits(expected))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_fp8_cast_vector(name: str) -> None:
    cases = load_vectors("fp8_cast")
    values = np.array([case["x"] for case in cases], dtype=np.float32)
    codes = np.array([case[name] for case in cases], dtype=np.uint8)
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(bits(rounded(values, name)), bits(expected))


def test_every_e5m2_saturation_vector() -> None:
    cases = load_vectors("edges")["e5m2_saturating"]
    values = np.array([case["x"] for case in cases], dtype=np.float32)
    codes = np.array([case["e5m2"] for case in cases], dtype=np.uint8)
    expected = codes.view(ML_DTYPES["e5m2"]).astype(np.float32)
    np.testing.assert_array_equal(rounded(values, "e5m2"), expected)


@pytest.mark.parametrize("rounding", ["nearest", "half_up", "stochastic"])
@pytest.mark.parametrize("name", SIGNED)
class TestInvariantsOfEveryRegisteredFormat:
    key = PhiloxKey(seed=1, step=2, micro_step=0, tensor_id=3)

    def cast(self, values: torch.Tensor, name: str, rounding: str) -> torch.Tensor:
        key = self.key if rounding == "stochastic" else None
        return round_to_grid(values, FORMATS[name], rounding, key)

    def test_grid_points_are_fixed_points(self, name: str, rounding: str) -> None:
        grid = torch.tensor(FORMATS[name].grid)
        values = torch.cat([grid, -grid])
        np.testing.assert_array_equal(bits(self.cast(values, name, rounding)), bits(values))

    def test_the_result_is_one_of_the_two_neighbours(self, name: str, rounding: str) -> None:
        values = torch.linspace(-1.2, 1.2, 4001) * FORMATS[name].max
        grid = np.unique(np.concatenate([FORMATS[name].grid, -np.array(FORMATS[name].grid)]))
        inside = np.clip(values.numpy().astype(np.float64), grid[0], grid[-1])
        upper = np.searchsorted(grid, inside, side="left")
        lower = np.searchsorted(grid, inside, side="right") - 1
        result = self.cast(values, name, rounding).numpy()
        assert ((result == grid[upper]) | (result == grid[lower])).all()

    def test_it_is_idempotent(self, name: str, rounding: str) -> None:
        once = self.cast(
            torch.randn(1000, generator=torch.Generator().manual_seed(0)), name, rounding
        )
        assert torch.equal(self.cast(once, name, rounding), once)

    def test_it_saturates_and_keeps_the_sign_of_zero(self, name: str, rounding: str) -> None:
        largest = FORMATS[name].max
        values = torch.tensor([1.5 * largest, -1.5 * largest, 3e38, -3e38, 0.0, -0.0])
        expected = torch.tensor([largest, -largest, largest, -largest, 0.0, -0.0])
        np.testing.assert_array_equal(bits(self.cast(values, name, rounding)), bits(expected))


@pytest.mark.parametrize("name", SIGNED)
def test_nearest_is_odd_also_at_ties(name: str) -> None:
    grid = torch.tensor(FORMATS[name].grid)
    values = torch.cat([(grid[1:] + grid[:-1]) / 2, torch.rand(1000) * FORMATS[name].max])
    positive = round_to_grid(values, FORMATS[name])
    np.testing.assert_array_equal(bits(round_to_grid(-values, FORMATS[name])), bits(-positive))


@pytest.mark.parametrize("name", SIGNED)
def test_half_up_sends_ties_toward_plus_infinity(name: str) -> None:
    values = np.concatenate([DATA["random-fp32"][-20_000:], DATA["every-bf16"]])
    np.testing.assert_array_equal(
        rounded(values, name, "half_up"), half_up_value(values, GRIDS[name])
    )


@quick
@given(st.lists(finite_float32(), min_size=1, max_size=50))
def test_nearest_equals_the_oracle_on_whatever_hypothesis_finds(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    for name in ("e2m1", "e1m2", "e3m0", "e4m3", "e5m2"):
        expected = dequantize(nearest_even_code(array, GRIDS[name]), GRIDS[name])
        np.testing.assert_array_equal(bits(rounded(array, name)), bits(expected))


def test_a_format_nobody_thought_of_rounds_like_the_oracle() -> None:
    e2m3 = MiniFloat("e2m3", 2, 3)
    grid = np.array(e2m3.grid)
    values = (4 * np.random.default_rng(5).standard_normal(20_000)).astype(np.float32)
    result = round_to_grid(torch.from_numpy(values), e2m3)
    np.testing.assert_array_equal(
        bits(result), bits(dequantize(nearest_even_code(values, grid), grid))
    )


def test_an_unknown_rounding_is_refused_by_name() -> None:
    assert set(ROUNDINGS) >= {"nearest", "stochastic", "half_up"}
    with pytest.raises(ConfigError, match="neerest.*nearest"):
        round_to_grid(torch.zeros(2), E2M1, "neerest")


# Philox and stochastic rounding.

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_the_oracle_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(philox(torch.tensor(counter), key).tolist()) == expected


KEY = PhiloxKey(seed=7, step=3, micro_step=1, tensor_id=42)


def test_a_stream_can_be_read_from_anywhere() -> None:
    whole = philox_uniform(KEY, 0, 1003)
    for start, count in [(0, 1), (1, 5), (3, 4), (17, 100), (512, 491), (1002, 1), (5, 0)]:
        assert torch.equal(philox_uniform(KEY, start, count), whole[start : start + count])


def test_uniforms_are_float32_in_the_half_open_interval_and_look_uniform() -> None:
    count = 200_000
    sample = philox_uniform(KEY, 0, count)
    assert sample.dtype == torch.float32
    assert sample.min() >= 0
    assert sample.max() < 1
    assert abs(sample.double().mean() - 0.5) < STANDARD_ERRORS / math.sqrt(12 * count)
    histogram = torch.histc(sample, 16, 0, 1) / count
    assert (histogram - 1 / 16).abs().max() < STANDARD_ERRORS * math.sqrt(1 / 16 / count)
    neighbours = torch.corrcoef(torch.stack([sample[:-1], sample[1:]]))[0, 1]
    assert neighbours.abs() < STANDARD_ERRORS / math.sqrt(count)


@pytest.mark.parametrize("field", ["seed", "step", "micro_step", "tensor_id"])
def test_every_part_of_the_key_gives_another_stream(field: str) -> None:
    values = {"seed": 7, "step": 3, "micro_step": 1, "tensor_id": 42}
    other = PhiloxKey(**{**values, field: values[field] + 1})
    same = (philox_uniform(KEY, 0, 1000) == philox_uniform(other, 0, 1000)).float().mean()
    assert same < 0.05


def test_large_key_fields_are_not_truncated_to_the_same_stream() -> None:
    for seed in (2**31, 2**32 - 1):
        other = PhiloxKey(seed=seed, step=3, micro_step=1, tensor_id=42)
        assert not torch.equal(philox_uniform(KEY, 0, 64), philox_uniform(other, 0, 64))
    far = philox_uniform(KEY, 2**32 + 8, 64)
    assert not torch.equal(far, philox_uniform(KEY, 8, 64))


@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    format_, count = FORMATS[name], 100_000
    grid = np.array(format_.grid)
    for index, fraction in [(0, 0.1), (1, 0.5), (len(grid) - 2, 0.9), (len(grid) // 2, 0.25)]:
        lower, upper = grid[index], grid[index + 1]
        value = np.float32(lower + fraction * (upper - lower))
        for sign in (1, -1):
            y = torch.full((count,), float(sign * value))
            mean = round_to_grid(y, format_, "stochastic", KEY).double().mean().item()
            share = (float(value) - lower) / (upper - lower)
            error = (upper - lower) * math.sqrt(share * (1 - share) / count)
            assert abs(mean - sign * float(value)) < STANDARD_ERRORS * error


def test_stochastic_rounding_does_not_depend_on_the_layout_and_replays() -> None:
    y = 2 * torch.randn(48, 20, generator=torch.Generator().manual_seed(1))
    reference = round_to_grid(y, E2M1, "stochastic", KEY)
    assert torch.equal(round_to_grid(y, E2M1, "stochastic", KEY), reference)
    reshaped = round_to_grid(y.reshape(6, 8, 20), E2M1, "stochastic", KEY)
    assert torch.equal(reshaped.reshape(48, 20), reference)
    strided = torch.empty(20, 48).t()
    strided.copy_(y)
    assert torch.equal(round_to_grid(strided, E2M1, "stochastic", KEY), reference)
    later = PhiloxKey(seed=7, step=4, micro_step=1, tensor_id=42)
    assert not torch.equal(round_to_grid(y, E2M1, "stochastic", later), reference)


def test_stochastic_rounding_ignores_the_global_random_state() -> None:
    y = torch.linspace(-6, 6, 500)
    torch.manual_seed(0)
    first = round_to_grid(y, E5M2, "stochastic", KEY)
    torch.manual_seed(1)
    assert torch.equal(round_to_grid(y, E5M2, "stochastic", KEY), first)


def test_stochastic_rounding_without_a_key_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="key"):
        round_to_grid(torch.zeros(3), E2M1, "stochastic")
