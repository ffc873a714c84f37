"""Error feedback: what rounding took from a gradient is added to the next one.

After Seide et al., "1-bit stochastic gradient descent", Interspeech 2014. Only this rank's own
rounding is fed back, not that of an owner's sum. It costs a float32 copy of all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fp4_plugin.comm.traffic import Segment

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """What was lost, by parameter: `residuals[name]` is flat, float32, of the parameter's size."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self.residuals: dict[str, torch.Tensor] = {}

    def corrected(self, flat: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """float32 copy of `flat` with the losses of last time added."""
        values = flat.to(torch.float32, copy=True)
        for part, residual in self._parts(values, segments):
            part.add_(residual)
        return values

    def keep(self, lost: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Remember `lost`, float32, laid out as `segments`; what is not finite counts as 0."""
        for part, residual in self._parts(lost, segments):
            torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0, out=residual)

    def hold(self, segments: Sequence[Segment], device: torch.device) -> None:
        """Have residuals for parameters that lose nothing, too: all ranks then save the same."""
        for segment in segments:
            if segment.name in self._sizes:
                self._residual(segment.name, device)

    def rescale(self, factor: float) -> None:
        """Multiply all losses: gradients carry another loss scale from now on."""
        for residual in self.residuals.values():
            residual.mul_(factor)

    def reset(self) -> None:
        """Forget everything: the step these losses belong to was skipped."""
        for residual in self.residuals.values():
            residual.zero_()

    def load(self, residuals: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Continue with saved residuals. Raises KeyError or ValueError unless they fit."""
        for name, saved in residuals.items():
            if saved.numel() != self._sizes[name]:
                raise ValueError(
                    f"the saved residual of {name} has {saved.numel()} elements, the parameter "
                    f"{self._sizes[name]}: it belongs to another model"
                )
        self.residuals = {
            name: saved.to(device=device, dtype=torch.float32, copy=True).reshape(-1)
            for name, saved in residuals.items()
        }

    def _parts(
        self, flat: torch.Tensor, segments: Sequence[Segment]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(Part of `flat`, its residual) of each segment; those of no known parameter have none."""
        parts = []
        start = 0
        for segment in segments:
            part = flat[start : start + segment.numel]
            start += segment.numel
            if segment.name in self._sizes:
                residual = self._residual(segment.name, flat.device)
                parts.append((part, residual[segment.offset :][: segment.numel]))
        return parts

    def _residual(self, name: str, device: torch.device) -> torch.Tensor:
        if name not in self.residuals:
            # It outlives the inference mode it may be made in.
            with torch.inference_mode(mode=False):
                self.residuals[name] = torch.zeros(self._sizes[name], device=device)
        return self.residuals[name]
