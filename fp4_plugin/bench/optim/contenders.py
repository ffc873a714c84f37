"""The optimisers that are measured against each other, and why one of them cannot be.

`adamw` is torch.optim.AdamW(foreach=True), the baseline. torchao's are compiled by torchao itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from fp4_plugin.optim import FP16StateAdamW

__all__ = ["BASELINE", "CONTENDERS", "Contender"]

BASELINE = "adamw"
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _always() -> str | None:
    return None


@dataclass(frozen=True)
class Contender:
    """`make` takes parameters of `dtype`. unavailable: the reason why it cannot run here, or None.

    is_compiled: the optimiser fuses its step with torch.compile, on CPU with a C++ compiler.
    """

    label: str
    make: Callable[[Iterable[torch.nn.Parameter]], Optimizer]
    dtype: torch.dtype = torch.float32
    is_compiled: bool = False
    unavailable: Callable[[], str | None] = _always

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return self.unavailable() or (_no_compiler() if self.is_compiled else None)


def _no_compiler() -> str | None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}) on PATH: apt-get install g++"
    return None


def _ours(label: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Contender]:
    """Eager and compiled."""
    return [
        Contender(
            f"{label} compiled" if is_compiled else label,
            functools.partial(FP16StateAdamW, **HYPERPARAMETERS, **options, compile=is_compiled),
            dtype,
            is_compiled,
        )
        for is_compiled in (False, True)
    ]


def _torch(label: str, **options: Any) -> Contender:
    return Contender(label, functools.partial(AdamW, **HYPERPARAMETERS, **options))


def _torchao(name: str) -> Contender:
    def make(params: Iterable[torch.nn.Parameter]) -> Optimizer:
        optim: Any = importlib.import_module("torchao.optim")
        return getattr(optim, name)(params, **HYPERPARAMETERS)

    def unavailable() -> str | None:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed: pip install torchao"
        try:
            found = hasattr(importlib.import_module("torchao.optim"), name)
        # It fails in whatever way its extensions do with another torch.
        except Exception as error:
            return f"importing torchao.optim raises {type(error).__name__}: {error}"
        return None if found else f"torchao.optim has no {name}: pip install --upgrade torchao"

    return Contender(f"torchao {name}", make, is_compiled=True, unavailable=unavailable)


CONTENDERS = (
    _torch(BASELINE, foreach=True),
    _torch("adamw fused", fused=True),
    *_ours("fp16"),
    *_ours("e4m3", exp_avg="e4m3"),
    *_ours("bf16 + fp16 master", torch.bfloat16, master_weights="fp16"),
    *_ours("bf16 + fp16 master, e4m3", torch.bfloat16, exp_avg="e4m3", master_weights="fp16"),
    _torchao("AdamW8bit"),
    _torchao("AdamWFp8"),
)
