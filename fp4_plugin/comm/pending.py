"""A reduction under way."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Pending", "finished_or_pending"]


class Pending:
    """Like a `torch.distributed.Work`: the result is there after `wait`."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> bool:
        """Complete the reduction on the current stream; once that succeeded, do nothing."""
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        self._finish = None
        return True


def finished_or_pending(async_op: bool, finish: Callable[[], None] | None = None) -> Pending | None:
    """What a collective returns: None once it is complete, or what to wait for."""
    pending = Pending(finish)
    if async_op:
        return pending
    pending.wait()
    return None
