"""A layer whose weight is cut over ranks: the reductions that make its numbers those of the whole.

Tensor parallelism cuts W (N, K) along its outputs ("n", column-parallel) or along the contraction
axis ("k", row-parallel). A scale belongs to a row of an operand along the axis that a GEMM sums
over; where that axis is cut, each rank sees a part of the row, and the largest of their amaxes is
the row's. Clamping thresholds are order statistics of a whole row: each rank contributes its
extreme elements, which are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from fp4_plugin.core.outliers import Residual, residual_beyond, threshold_index

__all__ = ["Shards", "sums_over"]


@dataclass(frozen=True)
class Shards:
    """axis: of the weight (N, K) that is cut evenly over the ranks of `group`.

    exact: also sum what the ranks multiply before anything is rounded, so that fprop has the same
    bits for any number of ranks. Its methods are collectives of the group.
    """

    axis: Literal["n", "k"]
    group: dist.ProcessGroup
    exact: bool = False

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    def cuts(self, axes: str, granularity: str) -> bool:
        """Whether the groups that share a scale are spread over ranks.

        axes: of the stored matrix, rows then columns, e.g. "nk" for the weight.
        """
        return self.axis == axes[1] or (granularity == "tensor" and self.axis == axes[0])

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the ranks; infinite where one of them has a NaN."""
        # MAX of a NaN is whatever the backend says; either is "not finite" to a scale.
        amax = torch.where(amax.isnan(), torch.inf, amax)
        dist.all_reduce(amax, dist.ReduceOp.MAX, self.group)
        return amax

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(partial, dist.ReduceOp.SUM, self.group)
        return partial

    def split_outliers(self, rows: torch.Tensor, alpha: float, scope: str) -> Residual:
        """core.outliers.split_outliers of the whole rows; entries of this rank's columns alone.

        rows: (T, K / ranks). Thresholds are those of K elements, or of T * K in tensor scope.
        """
        flat = rows.reshape(1, -1) if scope == "tensor" else rows
        n = flat.shape[1] * self.num_ranks
        # The count of elements from the threshold to the end, on either side.
        count = n - threshold_index(alpha, n)
        wide = flat.to(torch.float32)
        num_candidates = min(count, flat.shape[1])
        candidates = torch.cat([wide, -wide]).topk(num_candidates, dim=1, sorted=False).values
        gathered = candidates.new_empty((self.num_ranks * len(candidates), num_candidates))
        dist.all_gather_into_tensor(gathered, candidates.contiguous(), self.group)
        by_rank = gathered.view(self.num_ranks, *candidates.shape)
        merged = by_rank.transpose(0, 1).flatten(1)
        extremes = merged.topk(count, dim=1).values[:, -1:]
        high, low = extremes[: len(flat)], -extremes[len(flat) :]
        return residual_beyond(rows, low.contiguous(), high.contiguous(), rows.shape)


def sums_over(shards: Shards | None) -> Shards | None:
    """`shards` if fprop's sums are spread over its ranks, and are to be exact."""
    return shards if shards is not None and shards.exact and shards.axis == "k" else None
