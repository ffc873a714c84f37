"""Which kernel ran: implementations announce themselves, whoever asked listens.

A run manifest must tell what happened, not what was intended, so the name of a kernel comes from
the code that ran. Listening is per thread, since autograd calls backward from threads of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["announce", "listen"]

_listeners = threading.local()


def announce(kernel: str) -> None:
    """Called by an implementation at the place where it calls the kernel."""
    for names in getattr(_listeners, "active", ()):
        names.append(kernel)


@contextmanager
def listen() -> Iterator[list[str]]:
    """Collects the names of the kernels that this thread runs inside the block, in order."""
    names: list[str] = []
    _listeners.active = (*getattr(_listeners, "active", ()), names)
    try:
        yield names
    finally:
        _listeners.active = tuple(n for n in _listeners.active if n is not names)
