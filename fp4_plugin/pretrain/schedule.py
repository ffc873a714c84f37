"""Learning rate over the run: linear warm-up, then a cosine down to a fraction of the peak."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["WarmupCosine"]


@dataclass(frozen=True)
class WarmupCosine:
    """`total_steps` optimiser steps, the first `warmup_steps` of them rising to the peak."""

    total_steps: int
    warmup_steps: int
    min_fraction: float

    def factor(self, step: int) -> float:
        """Multiplier of the peak rate at optimiser step `step` (0-based); in (0, 1].

        The first step already learns (1 / warmup_steps), the last one of the warm-up has the peak,
        and from the last step of the run on the rate stays at `min_fraction`.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decay_steps = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_fraction + (1.0 - self.min_fraction) * cosine

    def scheduler(self) -> Callable[[Optimizer], LambdaLR]:
        """What `deepspeed.initialize(lr_scheduler=...)` takes: made once the optimiser exists."""
        return lambda optimizer: LambdaLR(optimizer, self.factor)
