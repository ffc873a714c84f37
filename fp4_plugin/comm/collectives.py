"""The collectives as functions, for code that has no reducer of its own.

Drop-in for the calls of `torch.distributed` with the same names, as far as gradients need them:
sums of contiguous float tensors. See `GradientReducer` for what is allowed and what is raised.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.comm.reducer import GradientReducer, Pending

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def all_reduce(
    tensor: torch.Tensor,
    group: Any = None,
    format: str = "e4m3",
    block_size: int = 1024,
    async_op: bool = False,
) -> Pending | None:
    """Sum `tensor` over `group`, in place, with the same bits on every rank.

    Wire: about 2 bytes per element instead of 4 with BF16. Error: 28 to 31 dB below the sum.
    """
    return _reducer(format, block_size).all_reduce(tensor, group, async_op=async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Any = None,
    format: str = "e4m3",
    block_size: int = 1024,
    async_op: bool = False,
) -> Pending | None:
    """Sum part r of `input` over `group` into `output` of rank r; both 1-D or of matching size.

    Wire: about 1 byte per element instead of 2 with BF16. Error: 31 to 34 dB below the sum.
    """
    return _reducer(format, block_size).reduce_scatter(output, input, group, async_op=async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    group: Any = None,
    format: str = "e4m3",
    block_size: int = 1024,
    async_op: bool = False,
) -> Pending | None:
    """Sum `tensor` over `group` into the one of rank `dst` of the job; others stay as they are."""
    return _reducer(format, block_size).reduce(tensor, dst, group, async_op=async_op)


@lru_cache(maxsize=16)
def _reducer(format: str, block_size: int) -> GradientReducer:
    reducer = GradientReducer(BlockCodec.named(format, block_size))
    reducer.traffic.sampling = False  # nobody reads these counts
    return reducer
