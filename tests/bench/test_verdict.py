"""When two arms may be called different, on numbers made for the purpose."""

from __future__ import annotations

import pytest

from fp4_plugin.bench.ablation.verdict import Difference, judge, noise_floor, paired
from fp4_plugin.errors import MismatchError


def test_differences_are_taken_seed_by_seed():
    difference = paired({0: 2.5, 1: 3.5, 2: 1.5}, {2: 1.25, 0: 2.0, 1: 3.25})
    assert difference is not None
    assert difference.values == (0.5, 0.25, 0.25)
    assert (difference.low, difference.high) == (0.25, 0.5)
    assert difference.mean == pytest.approx(1 / 3)


def test_pairing_removes_what_seeds_share():
    # The seeds are 1 nat apart, the arms .1: means and ranges overlap, differences do not.
    difference = paired({0: 2.1, 1: 3.1, 2: 4.1}, {0: 2.0, 1: 3.0, 2: 4.0})
    assert judge(difference, floor=0.01) == "higher"


def test_arms_on_other_seeds_cannot_be_paired():
    with pytest.raises(MismatchError, match="same seeds"):
        paired({0: 2.0}, {1: 2.0})


def test_noise_floor_is_the_largest_difference_on_either_side():
    assert noise_floor({0: 2.0, 1: 1.7, 2: 2.1}, {0: 2.0, 1: 2.0, 2: 2.0}) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.2, 0.3, 0.4), "higher"),
        ((-0.2, -0.3, -0.4), "lower"),
        ((-0.01, 0.3, 0.4), "cannot be told apart"),  # the range holds 0
        ((0.0, 0.3, 0.4), "cannot be told apart"),
        ((0.05, 0.06, 0.07), "cannot be told apart"),  # one sign, below the noise floor
        ((-0.05, -0.06, -0.07), "cannot be told apart"),  # ... on the other side too
        ((0.2, 0.3), "cannot be told apart"),  # two seeds
    ],
)
def test_a_difference_needs_one_sign_the_noise_floor_and_three_seeds(values, verdict):
    assert judge(Difference(values), floor=0.1) == verdict


def test_without_a_noise_floor_nothing_is_told_apart():
    assert noise_floor({0: None}, {0: 2.0}) is None
    assert judge(Difference((1.0, 1.0, 1.0)), None) == "cannot be told apart"


def test_a_diverged_run_spoils_its_arm_and_no_other():
    assert paired({0: 2.0, 1: None, 2: 2.0}, {0: 2.0, 1: 2.0, 2: 2.0}) is None
    assert judge(None, floor=0.1) == "diverged"


def test_a_gap_is_bounded_on_both_sides():
    assert Difference((0.2, 0.3)).bounds(0.25) == pytest.approx((-0.05, 0.55))
