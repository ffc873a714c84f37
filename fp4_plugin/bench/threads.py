"""How many threads torch computes with, for as long as something is measured or repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["torch_threads"]


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """`count` threads within the block; 0 leaves the number as it is.

    With one thread the order of sums, and with it every bit, is the same on every run.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
