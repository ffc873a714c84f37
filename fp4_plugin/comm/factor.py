"""FP8-LM's automatic factor: one scale per tensor, shared by all ranks.

After Peng et al., "FP8-LM: Training FP8 Large Language Models", arXiv 2310.18313, section 2.1:
g' = mu * s * g with s = max(format) / amax, the smallest over the ranks. mu is halved as soon as
more than 0.001 % of the elements saturate, and else doubles over 1000 steps. It was made for
transports that add up in FP8 and need headroom; with float32 sums block scales lose less. Kept to
reproduce that method.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp4_plugin.comm.transport import Members, all_reduce_exactly
from fp4_plugin.core.scaling import row_amax

__all__ = ["AutomaticFactor"]

SATURATION_LIMIT = 1e-5
GROWTH_STEPS = 1000


class AutomaticFactor:
    """mu and what decides about it. It stays on the device; `value` waits for that."""

    def __init__(self) -> None:
        self._mu: torch.Tensor | None = None
        self._saturated: torch.Tensor | None = None
        self._elements = 0

    @property
    def value(self) -> float:
        return 1.0 if self._mu is None else float(self._mu)

    def restore(self, value: float, device: torch.device) -> None:
        """Continue with the `value` of an earlier run."""
        self._mu = torch.tensor(value, dtype=torch.float32, device=device)

    def shared_amax(
        self, shares: Sequence[Sequence[torch.Tensor]], members: Members
    ) -> torch.Tensor:
        """(1, 1) float32: the largest |value| on any rank, over mu. NaN if one is not finite."""
        pieces = [one for share in shares for one in share if len(one)]
        amax = torch.stack([row_amax(piece.view(1, -1)) for piece in pieces]).amax()
        # Backends do not agree on the maximum of a NaN, but they do on that of an Inf.
        amax = torch.where(amax.isfinite(), amax, torch.inf)
        all_reduce_exactly(amax, members, "MAX")
        if self._mu is None:
            self._mu = torch.ones((), device=amax.device)
        shared = torch.where(amax.isfinite(), amax / self._mu, torch.nan)
        return shared.view(1, 1)

    def observe(self, values: torch.Tensor, amax: torch.Tensor | None) -> None:
        """Count what of `values` lies beyond the shared `amax`."""
        if amax is None:
            return
        beyond = (values.abs() > amax.view(1)).sum()
        self._saturated = beyond if self._saturated is None else self._saturated + beyond
        self._elements += values.numel()

    def step(self, members: Members) -> None:
        """Adapt mu, the same way on all members; once per optimizer step."""
        if self._mu is None:
            return
        # A rank that owns everything has sent nothing, but the others wait for its word.
        share = torch.full_like(self._mu, -1.0)
        if self._saturated is not None:
            share = self._saturated.to(torch.float32) / self._elements
        all_reduce_exactly(share, members, "MAX")
        grown = self._mu * 2.0 ** (1.0 / GROWTH_STEPS)
        adapted = torch.where(share > SATURATION_LIMIT, self._mu / 2, grown)
        self._mu = torch.where(share < 0, self._mu, adapted)
        self._saturated, self._elements = None, 0
