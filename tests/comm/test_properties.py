"""Reductions of any size, dtype, world and block against numpy: the bits, and a proven bound."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4_plugin.comm import BlockCodec, GradientReducer
from tests.comm.reference import (
    reduced_shares,
    reduction_bound,
    rounded,
    share_bounds,
)
from tests.comm.threads import run_threads

some = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Case:
    size: int
    numel: int
    fmt: str
    block_size: int
    dtype: str
    kind: str
    seed: int
    async_op: bool

    def inputs(self, numel: int | None = None) -> list[np.ndarray]:
        """One float32 array per rank that its dtype holds exactly."""
        rng = np.random.default_rng(self.seed)
        numel = self.numel if numel is None else numel
        return [rounded(_values(rng, numel, self.kind), self.dtype) for _ in range(self.size)]

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(getattr(torch, self.dtype))

    def reducer(self) -> GradientReducer:
        return GradientReducer(BlockCodec.named(self.fmt, self.block_size))


def _values(rng: np.random.Generator, numel: int, kind: str) -> np.ndarray:
    values = rng.standard_normal(numel)
    if kind == "heavy":
        values = rng.standard_t(2.0, numel).clip(-500, 500)
    if kind == "decades":
        values *= 10.0 ** -rng.integers(0, 5, numel)
    if kind == "zeros":
        values *= rng.random(numel) < 0.1
    if kind == "tiny":
        values *= 2.0 ** -rng.integers(90, 120, numel)
    if kind == "negative zeros":
        values = -np.zeros(numel)
    return values.astype(np.float32)


# Sizes around the edges of blocks and shares.
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128]
cases = st.builds(
    Case,
    size=st.integers(2, 5),
    numel=st.one_of(st.sampled_from(EDGES), st.integers(1, 400)),
    fmt=st.sampled_from(["e4m3", "e5m2"]),
    block_size=st.sampled_from([16, 32, 64, 1024]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    kind=st.sampled_from(["normal", "heavy", "decades", "zeros", "tiny", "negative zeros"]),
    seed=st.integers(0, 2**32 - 1),
    async_op=st.booleans(),
)  # fmt: skip


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.int32)


def _check(case: Case, got: np.ndarray, expected: np.ndarray, exact: np.ndarray, bound: np.ndarray):
    assert (_bits(got) == _bits(rounded(expected, case.dtype))).all()
    assert (np.abs(got - exact) <= bound).all()


def _wait(pending: Any) -> None:
    if pending is not None:
        assert pending.wait() is True


@some
@given(case=cases)
def test_all_reduce_has_the_bits_of_the_rule_and_stays_within_the_bound(case):
    inputs = case.inputs()

    def rank(group):
        tensor = case.tensor(inputs[group.rank])
        _wait(case.reducer().all_reduce(tensor, group, async_op=case.async_op))
        return tensor.float().numpy()

    results = run_threads(case.size, rank)
    rule = (inputs, share_bounds(case.numel, case.size), case.fmt, case.block_size)
    expected = np.concatenate(reduced_shares(*rule, twice=True))
    bound = np.concatenate(reduction_bound(*rule, case.dtype, twice=True))
    exact = sum(one.astype(np.float64) for one in inputs)
    for result in results:
        _check(case, result, expected, exact, bound)


@some
@given(case=cases, data=st.data())
def test_reduce_gives_one_rank_what_all_reduce_gives_all(case, data):
    inputs = case.inputs()
    dst = data.draw(st.integers(0, case.size - 1))

    def rank(group):
        tensor = case.tensor(inputs[group.rank])
        _wait(case.reducer().reduce(tensor, dst, group, async_op=case.async_op))
        return tensor.float().numpy()

    results = run_threads(case.size, rank)
    rule = (inputs, share_bounds(case.numel, case.size), case.fmt, case.block_size)
    expected = rounded(np.concatenate(reduced_shares(*rule, twice=True)), case.dtype)
    for index, result in enumerate(results):
        assert (_bits(result) == _bits(expected if index == dst else inputs[index])).all()


@some
@given(case=cases, aliased=st.booleans(), output_dtype=st.sampled_from(["float32", "bfloat16"]))
def test_reduce_scatter_has_the_bits_of_the_rule_and_stays_within_the_bound(
    case, aliased, output_dtype
):
    """Also with the output in another dtype, and with the output inside the input."""
    share = case.numel
    inputs = case.inputs(share * case.size)

    def rank(group):
        source = case.tensor(inputs[group.rank])
        output = source[group.rank * share :][:share]
        if not aliased:
            output = torch.full((share,), 7.0, dtype=getattr(torch, output_dtype))
        _wait(case.reducer().reduce_scatter(output, source, group, async_op=case.async_op))
        return output.float().numpy()

    results = run_threads(case.size, rank)
    dtype = case.dtype if aliased else output_dtype
    rule = (
        inputs,
        [(r * share, (r + 1) * share) for r in range(case.size)],
        case.fmt,
        case.block_size,
    )
    sums = reduced_shares(*rule, twice=False)
    limits = reduction_bound(*rule, dtype, twice=False)
    exact = sum(one.astype(np.float64) for one in inputs)
    for index, result in enumerate(results):
        assert (_bits(result) == _bits(rounded(sums[index], dtype))).all()
        assert (np.abs(result - exact[index * share :][:share]) <= limits[index]).all()


@some
@given(case=cases, data=st.data())
def test_reduce_to_owners_writes_owned_runs_and_nothing_else(case, data):
    """Runs of any length with no, one or several owners, which need not be contiguous."""
    inputs = case.inputs()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, case.numel - 1)), max_size=4)))
    edges = [0, *[cut for cut in cuts if cut < case.numel], case.numel]
    ranks = st.lists(st.integers(0, case.size - 1), max_size=2, unique=True)
    owners = [(stop - start, data.draw(ranks)) for start, stop in itertools.pairwise(edges)]

    def rank(group):
        tensor = case.tensor(inputs[group.rank])
        case.reducer().reduce_to_owners(tensor, owners, group)
        return tensor.float().numpy()

    results = run_threads(case.size, rank)
    for index, result in enumerate(results):
        mine = np.zeros(case.numel, bool)
        for start, (length, owning) in zip(edges, owners, strict=False):
            mine[start : start + length] = index in owning
        assert (_bits(result[~mine]) == _bits(inputs[index][~mine])).all()
        # The runs of an owner travel as one sequence, in blocks of their own.
        held = [one[mine] for one in inputs]
        bounds = [(0, int(mine.sum()) if r == index else 0) for r in range(case.size)]
        sums = reduced_shares(held, bounds, case.fmt, case.block_size, twice=False)[index]
        assert (_bits(result[mine]) == _bits(rounded(sums, case.dtype))).all()


@some
@given(case=cases, data=st.data())
def test_ragged_shares_in_pieces_arrive_like_contiguous_ones(case, data):
    """reduce_scatter_v: shares of different sizes, cut into pieces on both sides, and scaled."""
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=case.size, max_size=case.size))
    ends = np.cumsum(sizes)
    bounds = [(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
    inputs = case.inputs(int(ends[-1]))
    cut = data.draw(st.integers(0, 70))

    def rank(group):
        source = case.tensor(inputs[group.rank])
        shares = [_in_two(source[start:stop], cut) for start, stop in bounds]
        output = torch.full((sizes[group.rank],), 7.0)
        outputs = _in_two(output, cut // 2)
        reducer = case.reducer()
        scale = 1 / case.size
        _wait(reducer.reduce_scatter_v(outputs, shares, group, scale=scale, async_op=case.async_op))
        return output.numpy()

    results = run_threads(case.size, rank)
    sums = reduced_shares(inputs, bounds, case.fmt, case.block_size, twice=False)
    for result, expected in zip(results, sums, strict=True):
        assert (_bits(result) == _bits(expected * np.float32(1 / case.size))).all()


def _in_two(tensor: torch.Tensor, cut: int) -> list[torch.Tensor]:
    return [tensor[:cut], tensor[cut:]]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [0, 40, 127])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(fmt, bad, position):
    case = Case(3, 128, fmt, 32, "float32", "normal", 5, False)
    inputs = case.inputs()
    inputs[1][position] = bad

    def rank(group):
        tensor = case.tensor(inputs[group.rank])
        reducer = case.reducer()
        reducer.all_reduce(tensor, group)
        return tensor, reducer.traffic.settle()

    results = run_threads(case.size, rank)
    share = 48  # 128 / 3, rounded up to a multiple of 16
    start = position // share * share
    first = start + (position - start) // 32 * 32
    block = torch.zeros(128, dtype=torch.bool)
    block[first : min(first + 32, start + share)] = True
    for tensor, _ in results:
        assert not tensor[block].isfinite().any() and tensor[~block].isfinite().all()
    assert [sum(event.blocks for event in events) for _, events in results] == [0, 1, 0]
