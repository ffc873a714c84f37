"""DeepSpeed: the "fp4" section of a DeepSpeed configuration turns linears into FP4 linears.

    hook              arms `deepspeed.initialize`, before or after DeepSpeed is imported
    ds_config         finds the configuration of a call and refuses features that cannot go along
    initialization    what an armed call does, and `initialize`
    optimizer         gives DeepSpeed an AdamW with 16-bit states; its parts are optimizer_*
    agreement         all ranks decide together
    engine            what an engine does more: verify its first step, leave the manifest
    tensor_parallel   FP4 forms of the linears that AutoTP builds

Nothing here imports DeepSpeed before the user's program does.
"""

from __future__ import annotations

from fp4_plugin.integrations.deepspeed.hook import arm, disarm, is_armed
from fp4_plugin.integrations.deepspeed.initialization import initialize

__all__ = ["arm", "disarm", "initialize", "is_armed"]
