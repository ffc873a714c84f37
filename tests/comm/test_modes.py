"""Error feedback and the automatic factor: alone, and inside reductions."""

from __future__ import annotations

import math

import pytest
import torch

from fp4_plugin.comm import BlockCodec, GradientReducer
from fp4_plugin.comm.error_feedback import ErrorFeedback
from fp4_plugin.comm.factor import GROWTH_STEPS, AutomaticFactor
from fp4_plugin.comm.traffic import Segment
from fp4_plugin.comm.transport import members_of
from tests import tolerances
from tests.comm.threads import run_threads

NUMEL = 256
SEGMENTS = [Segment("a", 0, 100), Segment("b", 0, 156)]
SIZES = {"a": 100, "b": 156}


def _codec(fmt: str = "e5m2") -> BlockCodec:
    return BlockCodec.named(fmt, 64)


def _mean_error(feedback: bool, steps: int, op: str) -> float:
    """How far the mean of what rank 0 gets over some steps is from the true sum, relative."""
    torch.manual_seed(0)
    inputs = [torch.randn(NUMEL) for _ in range(2)]

    def rank(group):
        reducer = GradientReducer(_codec(), feedback=ErrorFeedback(SIZES) if feedback else None)
        total = torch.zeros(NUMEL, dtype=torch.float64)
        for _ in range(steps):
            tensor = inputs[group.rank].clone()
            if op == "owners":
                reducer.reduce_to_owners(
                    tensor, [(NUMEL, [0, 1])], group, describe=lambda: SEGMENTS
                )
            else:
                out = torch.empty(NUMEL if group.rank == 0 else 0)
                shares = [[tensor], [tensor[:0]]]
                reducer.reduce_scatter_v([out], shares, group, describe=lambda: [SEGMENTS, []])
                tensor = out if group.rank == 0 else tensor
            total += tensor.double()
        return total / steps

    exact = inputs[0].double() + inputs[1].double()
    return float((run_threads(2, rank)[0] - exact).norm() / exact.norm())


@pytest.mark.parametrize("op", ["owners", "scatter"])
def test_feedback_makes_the_mean_converge_where_rounding_alone_stays_biased(op):
    biased = [_mean_error(False, steps, op) for steps in (1, 64)]
    assert biased[0] == pytest.approx(biased[1], rel=1e-6)
    fed_back = [_mean_error(True, steps, op) for steps in (1, 16, 64)]
    assert fed_back[0] == pytest.approx(biased[0], rel=1e-6)
    # What is still owed is one rounding, however many steps share it.
    assert fed_back[1] < biased[0] / 8
    assert fed_back[2] < biased[0] / 32


def test_what_was_lost_is_what_is_added_next_time():
    feedback = ErrorFeedback(SIZES)
    values = torch.arange(NUMEL, dtype=torch.bfloat16)
    assert torch.equal(feedback.corrected(values, SEGMENTS), values.float())
    lost = torch.randn(NUMEL)
    feedback.keep(lost, SEGMENTS)
    assert torch.equal(feedback.corrected(values, SEGMENTS), values.float() + lost)
    # The same parameters in another bucket: part of b first, then a.
    moved = [Segment("b", 50, 20), Segment("a", 0, 100)]
    corrected = feedback.corrected(torch.zeros(120), moved)
    assert torch.equal(corrected, torch.cat([lost[150:170], lost[:100]]))
    feedback.reset()
    assert torch.equal(feedback.corrected(values, SEGMENTS), values.float())


def test_what_is_not_finite_is_not_fed_back():
    feedback = ErrorFeedback(SIZES)
    lost = torch.ones(NUMEL)
    lost[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    feedback.keep(lost, SEGMENTS)
    lost[:3] = 0
    assert torch.equal(feedback.corrected(torch.zeros(NUMEL), SEGMENTS), lost)


def test_memory_of_no_known_parameter_is_sent_without_feedback():
    feedback = ErrorFeedback({"b": 156})
    feedback.keep(torch.ones(NUMEL), SEGMENTS)
    corrected = feedback.corrected(torch.zeros(NUMEL), SEGMENTS)
    assert corrected[:100].sum() == 0 and corrected[100:].sum() == 156


def test_residuals_load_as_copies_and_only_where_they_fit():
    feedback, device = ErrorFeedback(SIZES), torch.device("cpu")
    saved = {"a": torch.ones(10, 10), "b": torch.full((156,), 2.0, dtype=torch.float64)}
    feedback.load(saved, device)
    feedback.keep(torch.zeros(NUMEL), SEGMENTS)
    assert saved["a"].sum() == 100
    with pytest.raises(ValueError, match="residual of a has 99 elements, the parameter 100"):
        feedback.load({"a": torch.ones(99)}, device)
    with pytest.raises(KeyError, match="c"):
        feedback.load({"c": torch.ones(99)}, device)


def test_runs_with_several_owners_or_none_keep_their_residuals_apart():
    """Every owner gets the value plus the old residual; what nobody owns is not owed to anybody."""
    torch.manual_seed(1)
    inputs = [torch.randn(NUMEL) for _ in range(3)]
    owners = [(100, [0, 1]), (156, [])]

    def rank(group):
        feedback = ErrorFeedback(SIZES)
        feedback.keep(torch.full((NUMEL,), 0.125), SEGMENTS)
        tensor = inputs[group.rank].clone()
        reducer = GradientReducer(_codec(), feedback=feedback)
        reducer.reduce_to_owners(tensor, owners, group, describe=lambda: SEGMENTS)
        return tensor, feedback.residuals

    results = run_threads(3, rank)
    exact = sum(inputs)[:100] + 2 * 0.125  # an owner owes itself nothing
    for tensor, _ in results[:2]:
        assert (tensor[:100] - exact).norm() / exact.norm() < tolerances.FP8_SUM["e5m2"]
    assert torch.equal(results[2][0], inputs[2])
    for _, residuals in results:
        assert residuals.keys() == SIZES.keys()
        assert (residuals["b"] == 0.125).all()
        assert not (residuals["a"] == 0.125).any()


def test_a_rank_that_sends_nothing_of_a_parameter_holds_a_residual_all_the_same():
    """Checkpoints of all ranks then hold the same parameters."""

    def rank(group):
        feedback = ErrorFeedback(SIZES)
        reducer = GradientReducer(_codec(), feedback=feedback)
        owners = [(100, [0]), (156, [1])]
        reducer.reduce_to_owners(torch.rand(NUMEL), owners, group, describe=lambda: SEGMENTS)
        return {name: float(one.norm()) > 0 for name, one in feedback.residuals.items()}

    assert run_threads(2, rank) == [{"a": False, "b": True}, {"a": True, "b": False}]


def _members_and_factor(group):
    return members_of(group), AutomaticFactor()


def test_the_shared_scale_is_that_of_the_largest_gradient_of_any_rank():
    def rank(group):
        members, factor = _members_and_factor(group)
        largest = [3.0, 7.0, 5.0][group.rank]
        values = torch.tensor([0.5, -largest, 1.0], dtype=torch.bfloat16)
        return factor.shared_amax([[values[:1]], [], [values[1:]]], members)

    for amax in run_threads(3, rank):
        assert amax.shape == (1, 1) and amax.dtype == torch.float32 and float(amax) == 7.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_shared_scale_is_nan_on_all_ranks_if_one_value_is_not_finite(bad):
    def rank(group):
        members, factor = _members_and_factor(group)
        values = torch.ones(4)
        values[2] = bad if group.rank == 1 else 1.0
        return factor.shared_amax([[values]], members)

    assert all(amax.isnan() for amax in run_threads(2, rank))


def test_mu_halves_on_saturation_and_doubles_over_a_thousand_clean_steps():
    """Only rank 1 saturates, and rank 2 sends nothing at all: all three still agree."""

    def rank(group):
        members, factor = _members_and_factor(group)
        history = []
        for step in range(GROWTH_STEPS + 1):
            values = torch.ones(1000)
            factor.shared_amax([[values]], members)
            if step == GROWTH_STEPS and group.rank == 1:
                values[0] = 2.0
            if group.rank != 2:
                factor.observe(values, torch.ones(1, 1))
            history.append(factor.value)
            factor.step(members)
        return [history[0], history[-1], factor.value]

    results = run_threads(3, rank)
    assert results[0] == results[1] == results[2]
    start, grown, halved = results[0]
    assert start == 1.0
    assert grown == pytest.approx(2.0, rel=1e-4)
    assert halved == grown / 2


def test_mu_stays_while_nothing_is_reduced_and_without_a_scale():
    def rank(group):
        members, factor = _members_and_factor(group)
        factor.step(members)
        factor.shared_amax([[torch.ones(3)]], members)
        factor.observe(torch.ones(3), None)
        factor.step(members)
        return factor.value

    assert run_threads(2, rank) == [1.0, 1.0]


def test_saturation_is_counted_in_float32_also_for_narrow_gradients():
    """bfloat16 has no number between 1 and 1.0078: the limit must not be rounded to one of them."""
    factor = AutomaticFactor()
    values = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    factor.observe(values, torch.full((1, 1), 1.007))
    assert factor._saturated == 1


def test_reductions_with_a_factor_are_close_and_count_what_saturates():
    torch.manual_seed(2)
    inputs = [torch.randn(4096, dtype=torch.bfloat16) for _ in range(2)]

    def rank(group):
        factor = AutomaticFactor()
        reducer = GradientReducer(BlockCodec(), factor=factor)
        tensor = inputs[group.rank].clone()
        reducer.all_reduce(tensor, group)
        clean = reducer.traffic.report()["saturated_fraction"]
        for _ in range(10):
            factor.step(members_of(group))
        other = inputs[group.rank].clone()
        reducer.all_reduce(other, group)
        return tensor, clean, reducer.traffic.report()["saturated_fraction"]

    exact = inputs[0].double() + inputs[1].double()
    for tensor, clean, saturated in run_threads(2, rank):
        assert (tensor.double() - exact).norm() / exact.norm() < tolerances.FP8_SUM["e4m3"]
        assert clean == 0.0
        assert saturated is not None
