"""16-bit optimiser states: storage formats, the step on a piece, and the optimiser around them."""

from __future__ import annotations

from fp4_plugin.optim.adamw import FP16StateAdamW
from fp4_plugin.optim.state_format import BLOCK_SIZE, STATE_FORMATS, StateFormat

__all__ = ["BLOCK_SIZE", "STATE_FORMATS", "FP16StateAdamW", "StateFormat"]
