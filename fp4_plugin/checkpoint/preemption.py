"""Being asked to leave: a signal becomes a flag that a training loop looks at between steps.

    with Preemption() as preemption:
        for batch in loader:
            train_step(batch)
            if preemption.requested:        # of any rank: the ranks have to agree first
                save_checkpoint()
                break

Schedulers send SIGTERM before they take a machine away, and SIGUSR1 where a job asked for a warning
(Slurm: `--signal=USR1@120`). Python runs a handler between two of its own instructions, so a
process that waits in a collective sees the flag only when that returns.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from fp4_plugin.errors import UnsupportedError

__all__ = ["Preemption"]

# Schedulers signal every process of a job, and launchers pass on what they get: one request may
# arrive as two SIGTERMs. A person who means it a second time needs longer than this.
_ONE_REQUEST_SECONDS = 5.0


class Preemption:
    """Turns SIGTERM and SIGUSR1 into `requested`, from `install` (or `with`) to `restore`.

    A second SIGTERM, seconds after the first, does what it did before: it ends the process, as a
    rule. Only the main thread may install, by Python's rules for signals. Children made by a fork
    keep the old behaviour, so that a data loader can still end its workers.
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
    ) -> None:
        self._signals = tuple(signals)
        self._previous: dict[signal.Signals, Any] = {}
        self._process = 0
        self._received: signal.Signals | None = None
        self._first_sigterm: float | None = None

    @property
    def requested(self) -> bool:
        """Whether this process was asked to leave; it stays true."""
        return self._received is not None

    @property
    def received(self) -> str | None:
        """Name of the signal that came first ("SIGTERM"); None if none has."""
        return None if self._received is None else self._received.name

    def install(self) -> None:
        """Replace the handlers; a second call does nothing.

        Raises UnsupportedError outside the main thread.
        """
        if self._previous:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError(
                "Preemption replaces signal handlers, which Python allows in the main thread only; "
                f"this is {threading.current_thread().name!r}. Install it before starting threads"
            )
        self._process = os.getpid()
        handler: Callable[[int, FrameType | None], None] = self._on_signal
        for number in self._signals:
            self._previous[number] = signal.signal(number, handler)

    def restore(self) -> None:
        """Put the old handlers back, where nobody has put in others since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                # None: set by C code, which Python cannot name.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def __enter__(self) -> Preemption:
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or self._is_repeated(number):
            self.restore()
            signal.raise_signal(number)
            return
        if self._received is None:
            self._received = signal.Signals(number)

    def _is_repeated(self, number: int) -> bool:
        """Whether this is a SIGTERM that means: now."""
        if number != signal.SIGTERM:
            return False
        now = time.monotonic()
        if self._first_sigterm is None:
            self._first_sigterm = now
        return now - self._first_sigterm > _ONE_REQUEST_SECONDS
