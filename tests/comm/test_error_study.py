"""How much of a gradient's sum survives, from 2 to 512 ranks, on gradients like real ones.

A gradient is noise of its rank plus a mean that all share, both with heavy tails (Student's t with
3 degrees of freedom), and a scale per block, as layers have. The mean is 20 times smaller than the
noise: were it larger, the sum would grow faster than the errors and more ranks would look better.
Errors are against the float64 sum: in dB over all elements, and the relative Frobenius error of the
worst block of 1024.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fp4_plugin.comm import BlockCodec
from tests import tolerances

BLOCK = 1024
NUM_BLOCKS = 16
NUMEL = NUM_BLOCKS * BLOCK
RANKS = [2, 8, 64, 512]
CODEC = BlockCodec(block_size=BLOCK)


class _Gradients:
    """Gradients of any number of ranks, one at a time; blocks are spread over `decades`."""

    def __init__(self, decades: float) -> None:
        self._generator = torch.Generator().manual_seed(7)
        exponents = torch.linspace(0, -decades, NUM_BLOCKS)
        self._scale = (10**exponents).repeat_interleave(BLOCK)
        self._mean = self._heavy()

    def next(self) -> torch.Tensor:
        return ((self._heavy() + self._mean / 20) * self._scale).to(torch.bfloat16)

    def _heavy(self) -> torch.Tensor:
        normal = torch.randn(4, NUMEL, generator=self._generator)
        return normal[0] / (normal[1:].square().sum(0) / 3).sqrt()


@dataclass(frozen=True)
class _Quality:
    db: float
    worst_block: float


def _quality(values: torch.Tensor, exact: torch.Tensor) -> _Quality:
    error, exact = (values.double() - exact).view(-1, BLOCK), exact.view(-1, BLOCK)
    db = 20 * torch.log10(exact.norm() / error.norm())
    return _Quality(float(db), float((error.norm(dim=1) / exact.norm(dim=1)).max()))


def _reduced(size: int, decades: float, shared_scale: bool = False) -> tuple[_Quality, _Quality]:
    """(reduce-scatter, all-reduce) of `size` ranks; rank 0 owns everything.

    shared_scale: one scale for the whole bucket of a rank in place of one per block.
    """
    gradients = _Gradients(decades)
    exact = torch.zeros(NUMEL, dtype=torch.float64)
    terms = []
    for rank in range(size):
        gradient = gradients.next()
        exact += gradient.double()
        terms.append(gradient if rank == 0 else _message(gradient, shared_scale))
    total = torch.empty(NUMEL)
    CODEC.sum(terms, NUMEL, lambda start, values: total[start:][: len(values)].copy_(values))
    returned = CODEC.decode(_message(total, shared_scale), NUMEL)
    return _quality(total, exact), _quality(returned, exact)


def _message(values: torch.Tensor, shared_scale: bool) -> torch.Tensor:
    message = torch.empty(CODEC.num_bytes(NUMEL), dtype=torch.uint8)
    amax = values.abs().amax().float().view(1, 1) if shared_scale else None
    CODEC.encode(values, message, amax)
    return message


@pytest.mark.parametrize("size", RANKS)
def test_sums_keep_their_signal_at_every_number_of_ranks(size):
    scatter, all_reduce = _reduced(size, decades=2.0)
    print(
        f"\n{size:4} ranks: reduce-scatter {scatter.db:.1f} dB, worst {scatter.worst_block:.2%}; "
        f"all-reduce {all_reduce.db:.1f} dB, worst {all_reduce.worst_block:.2%}"
    )
    assert scatter.db >= tolerances.REDUCE_SCATTER_DB
    assert scatter.worst_block <= tolerances.REDUCE_SCATTER_WORST_BLOCK
    assert all_reduce.db >= tolerances.ALL_REDUCE_DB
    assert all_reduce.worst_block <= tolerances.ALL_REDUCE_WORST_BLOCK


@pytest.mark.parametrize("size", RANKS[:3])
def test_one_scale_per_bucket_loses_the_small_blocks(size):
    """Blocks over four decades: the smallest ones fall below the steps of a shared scale."""
    blocks, bucket = (_reduced(size, 4.0, shared) for shared in (False, True))
    for name, own, shared in zip(("reduce-scatter", "all-reduce"), blocks, bucket, strict=True):
        ratio = shared.worst_block / own.worst_block
        print(f"\n{size} ranks, {name}: {own.worst_block:.2%} against {shared.worst_block:.2%}")
        assert ratio >= tolerances.BUCKET_SCALE_RATIO
