"""What a person sees while it trains, on rank 0: a bar on a terminal, else a line every N steps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from fp4_plugin.pretrain.training import StepRecord

__all__ = ["Progress"]


class Progress:
    """Prints the course of one run named `label` ("paper", "bf16 twin"), from `steps_done` on."""

    def __init__(
        self,
        label: str,
        total_steps: int,
        log_interval: int,
        *,
        visible: bool,
        steps_done: int = 0,
    ) -> None:
        self._first_step = steps_done + 1
        self._label = label
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._visible = visible
        self._bar: Any = None
        if visible and sys.stderr.isatty():
            self._bar = tqdm(
                total=total_steps, initial=steps_done, desc=label, unit="step", dynamic_ncols=True
            )

    def note(self, message: str) -> None:
        """A line of its own, above the bar if there is one."""
        if not self._visible:
            return
        if self._bar is not None:
            self._bar.write(message, file=sys.stderr)
        else:
            print(message, flush=True)

    def step(self, record: StepRecord) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {record.loss:.4f}, lr {record.lr:.2e}", refresh=False)
            self._bar.update()
            return
        is_due = record.step == self._first_step or record.step % self._log_interval == 0
        if is_due or record.step == self._total_steps:
            self.note(
                f"{self._label}: step {record.step}/{self._total_steps}  loss {record.loss:.4f}  "
                f"lr {record.lr:.2e}  {record.seconds:.2f} s"
            )

    def held_out(self, steps_done: int, loss: float) -> None:
        self.note(f"{self._label}: held-out loss {loss:.4f} after step {steps_done}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
