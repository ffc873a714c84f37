"""Minifloats: what is derived from the bit layout agrees with ml_dtypes and OCP."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4_plugin.core.formats import E1M2, E2M1, E3M0, E4M3, E5M2, E8M0, FORMATS, MiniFloat
from fp4_plugin.errors import ConfigError
from tests.oracles import GRIDS, ML_DTYPES


def test_the_six_formats_of_the_contract_are_registered_under_their_names() -> None:
    expected = {"e2m1": E2M1, "e1m2": E1M2, "e3m0": E3M0, "e4m3": E4M3, "e5m2": E5M2, "e8m0": E8M0}
    assert set(FORMATS.names()) >= set(expected)
    for name, format_ in expected.items():
        assert FORMATS[name] is format_
        assert format_.name == name


@pytest.mark.parametrize("name", GRIDS)
def test_grid_and_max_are_those_of_the_independent_table(name: str) -> None:
    format_ = FORMATS[name]
    np.testing.assert_array_equal(np.array(format_.grid, dtype=np.float64), GRIDS[name])
    assert format_.max == GRIDS[name][-1]


@pytest.mark.parametrize("name", ML_DTYPES)
def test_limits_agree_with_ml_dtypes_finfo(name: str) -> None:
    info = ml_dtypes.finfo(ML_DTYPES[name])
    format_ = FORMATS[name]
    assert format_.bits == info.bits
    assert format_.max == float(info.max)
    if format_.signed:
        assert format_.min_normal == float(info.smallest_normal)
        assert format_.min_subnormal == float(info.smallest_subnormal)
        # ml_dtypes counts minexp with the 1 of the bias: 2^minexp is the smallest normal.
        assert format_.bias == 1 - info.minexp


def test_biases_are_the_published_ones() -> None:
    biases = {"e2m1": 1, "e1m2": 0, "e3m0": 3, "e4m3": 7, "e5m2": 15, "e8m0": 127}
    assert {name: FORMATS[name].bias for name in biases} == biases


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_decoding_every_code_agrees_with_ml_dtypes(name: str) -> None:
    format_ = FORMATS[name]
    every_code = np.arange(1 << format_.bits, dtype=np.uint8)
    expected = every_code.view(ML_DTYPES[name]).astype(np.float32)
    decoded = format_.decode_table().numpy()
    np.testing.assert_array_equal(decoded, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(decoded[finite]), np.signbit(expected[finite]))


def test_every_e2m1_value_is_exact_in_both_8_bit_formats() -> None:
    assert set(E2M1.grid) <= set(E4M3.grid)
    assert set(E2M1.grid) <= set(E5M2.grid)


def test_a_new_format_derives_its_grid() -> None:
    e2m2 = MiniFloat("e2m2", 2, 2)
    expected = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7]
    assert list(e2m2.grid) == expected
    assert (e2m2.bits, e2m2.bias, e2m2.max) == (5, 1, 7.0)


def test_an_unknown_format_names_the_allowed_and_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"e2m1fn.*e5m2.*did you mean 'e2m1'"):
        FORMATS["e2m1fn"]


def test_registering_a_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="e2m1"):
        FORMATS.register("e2m1", E2M1)


def test_formats_are_immutable_values() -> None:
    assert MiniFloat("e2m1", 2, 1) == E2M1
    with pytest.raises(AttributeError):
        E2M1.mantissa_bits = 2  # type: ignore[misc]


def test_the_decode_table_is_float32() -> None:
    assert E2M1.decode_table().dtype == torch.float32
