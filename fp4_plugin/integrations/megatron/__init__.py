"""FP4 layers in Megatron-LM and megatron-core.

    layers        the FP4 forms of ColumnParallelLinear and RowParallelLinear
    collectives   what a layer sends, as autograd functions that every megatron-core version has
    model         from a built model to FP4 layers, proved active after the first step
    launch        torchrun -m fp4_plugin.integrations.megatron pretrain_gpt.py ...

Nothing here is imported with `fp4_plugin`: megatron-core need not be there.
"""

from __future__ import annotations
