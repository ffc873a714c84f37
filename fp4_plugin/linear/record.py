"""What a layer really did: counted where the GEMM is called, read by the run manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fp4_plugin.core.tracing import listen

__all__ = ["GEMMS", "GemmRecord", "LayerRecord"]

GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass
class GemmRecord:
    """calls: how often the GEMM ran; kernels: how often each kernel was called for it."""

    calls: int = 0
    kernels: Counter[str] = field(default_factory=Counter)


@dataclass
class LayerRecord:
    """Counters of one layer since it was converted.

    tokens: rows that went through fprop. needed: backward GEMMs that an fprop made necessary.
    saved_bytes: what the last fprop kept for backward for its input; input_bytes: the same input
    in BF16. weight_code_bytes: codes and scales of the weight kept for backward.
    """

    gemms: dict[str, GemmRecord] = field(default_factory=lambda: {g: GemmRecord() for g in GEMMS})
    tokens: int = 0
    needed: set[str] = field(default_factory=set)
    saved_bytes: int = 0
    input_bytes: int = 0
    weight_code_bytes: int = 0

    @contextmanager
    def gemm(self, label: str) -> Iterator[None]:
        """Counts one call of the GEMM `label` and the kernels that run inside the block."""
        with listen() as kernels:
            yield
        record = self.gemms[label]
        record.calls += 1
        record.kernels.update(kernels)

    def expects(self, label: str) -> bool:
        """True if fprop ran with gradients that `label` computes, and `label` never did."""
        return label in self.needed and self.gemms[label].calls == 0

    def count_saved(
        self,
        num_elements: int,
        of_input: Iterable[torch.Tensor | None],
        of_weight: Iterable[torch.Tensor | None],
    ) -> None:
        """Bytes that one fprop keeps for backward for an input of `num_elements`."""
        self.input_bytes = torch.bfloat16.itemsize * num_elements
        self.saved_bytes = sum(t.nbytes for t in of_input if t is not None)
        self.weight_code_bytes = sum(t.nbytes for t in of_weight if t is not None)
