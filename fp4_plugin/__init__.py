"""FP4 training for DeepSpeed, Megatron and Hugging Face, after arXiv 2501.17116.

Importing this package changes nothing in torch and imports no framework. It arms
`deepspeed.initialize`, so that the "fp4" section of a DeepSpeed configuration takes effect, and
offers the AdamW kernels of apex and Transformer Engine to `fp4_plugin.optim`, which tries them.
"""

from __future__ import annotations

from fp4_plugin.activation import assert_active, convert_to_fp4
from fp4_plugin.integrations.deepspeed import arm as _arm
from fp4_plugin.integrations.deepspeed import initialize
from fp4_plugin.integrations.fused_adam import offer_fused_adam as _offer_fused_adam

__all__ = ["__version__", "assert_active", "convert_to_fp4", "initialize"]

__version__ = "0.1.0"

_arm()
_offer_fused_adam()
