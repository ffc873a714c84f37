"""FP8 gradients on the wire: a block codec, and reductions over `torch.distributed`.

codec -> transport -> reducer -> collectives and the DDP hook; frameworks use the reducer.
"""

from __future__ import annotations

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.comm.collectives import all_reduce, reduce, reduce_scatter
from fp4_plugin.comm.ddp import DdpState, ddp_hook
from fp4_plugin.comm.reducer import GradientReducer, Pending

__all__ = [
    "BlockCodec",
    "DdpState",
    "GradientReducer",
    "Pending",
    "all_reduce",
    "ddp_hook",
    "reduce",
    "reduce_scatter",
]
