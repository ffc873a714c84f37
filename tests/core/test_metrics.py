"""Metrics against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fp4_plugin.core.metrics import (
    cosine_similarity,
    saturation_fraction,
    sqnr_db,
    underflow_fraction,
)
from fp4_plugin.core.quantize import quantize


def test_sqnr_is_ten_decibels_per_factor_ten_in_noise_power() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert sqnr_db(reference, reference + torch.tensor([0.3, 0.4])) == pytest.approx(20, abs=1e-4)
    assert sqnr_db(reference, torch.zeros(2)) == pytest.approx(0)
    assert sqnr_db(reference, reference) == math.inf


def test_sqnr_sees_differences_below_float32() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    assert sqnr_db(reference, reference + 1e-10) == pytest.approx(200, abs=0.1)


def test_cosine_similarity_is_that_of_the_flat_tensors() -> None:
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert cosine_similarity(a, 5 * a) == pytest.approx(1)
    assert cosine_similarity(a, -a) == pytest.approx(-1)
    assert cosine_similarity(a, torch.tensor([[0.0, 1.0], [1.0, 0.0]])) == pytest.approx(0)
    assert cosine_similarity(a, torch.tensor([[1.0, 1.0], [0.0, 0.0]])) == pytest.approx(0.5)


@pytest.mark.parametrize("packed", [False, True])
def test_saturation_counts_elements_on_the_largest_value_of_either_sign(packed: bool) -> None:
    x = torch.tensor([[6.0, -6.0, 1.0, 0.0, 3.0, 5.9, 0.5, 0.1]])
    assert saturation_fraction(quantize(x, packed=packed)) == pytest.approx(3 / 8)


@pytest.mark.parametrize("packed", [False, True])
def test_underflow_counts_what_was_not_zero_before(packed: bool) -> None:
    x = torch.tensor([[6.0, 0.1, -0.1, 0.0, 0.0, 1.0]])
    assert underflow_fraction(x, quantize(x, packed=packed)) == pytest.approx(2 / 4)
