"""A small causal language model on real text: what a state format does to the loss.

Two transformer layers of width 128 on the bytes of Python's standard library, so that a run takes
seconds and needs no download. The seed decides initial weights and batches; runs of one seed differ
by their optimiser alone, and are compared pair by pair.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from fp4_plugin.bench.threads import torch_threads
from fp4_plugin.errors import ConfigError

__all__ = ["MakeOptimizer", "TrainingRun", "small_model", "stdlib_text", "train"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

_WIDTH = 128
_VOCABULARY = 256
_SEQ_LEN = 32
_HELD_OUT_FRACTION = 0.1
_HELD_OUT_SEQUENCES = 256


@dataclass(frozen=True)
class TrainingRun:
    """final_loss: nats per byte on held-out text, NaN if a loss was not finite."""

    final_loss: float
    seconds: float


class _SmallModel(nn.Module):
    """(B, L) byte values -> (B, L, 256) logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_SEQ_LEN, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, nhead=4, dim_feedforward=4 * _WIDTH, dropout=0.0,
                batch_first=True, norm_first=True,
            )
            for _ in range(2)
        )  # fmt: skip
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def small_model(seed: int, perturbation: float = 0.0) -> nn.Module:
    """Weights drawn from `seed`, times 1 + perturbation * N(0, 1)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _SmallModel()
        for weight in (model.tokens.weight, model.positions.weight):
            nn.init.normal_(weight, std=0.02)
        if perturbation:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1 + perturbation * torch.randn(param.shape))
    return model


def stdlib_text(num_bytes: int) -> torch.Tensor:
    """(num_bytes,) uint8: source of the standard library, file after file in order of name.

    Raises ConfigError if this Python has no such sources.
    """
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= num_bytes:
            return torch.frombuffer(found[:num_bytes], dtype=torch.uint8)
    raise ConfigError(
        f"the standard library of this Python has {len(found):,} bytes of source, {num_bytes:,} "
        "are needed: install Python with its sources"
    )


def train(
    make: MakeOptimizer,
    text: torch.Tensor,
    steps: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    perturbation: float = 0.0,
    batch: int = 8,
) -> TrainingRun:
    """Train a `small_model`, held in `dtype`, with warm-up and cosine decay of the learning rate.

    batch: sequences of 32 bytes per step.

    One thread: the order of sums, and with it every bit, is then the same on every run.
    """
    started = time.perf_counter()
    split = int(len(text) * (1 - _HELD_OUT_FRACTION))
    with torch_threads(1):
        model = small_model(seed, perturbation).to(dtype)
        optimizer = make(list(model.parameters()))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_cosine(steps))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            loss = _loss(model, _batch(text[:split], batch, generator))
            if not math.isfinite(loss.item()):
                return TrainingRun(math.nan, time.perf_counter() - started)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        final = _held_out_loss(model, text[split:])
    return TrainingRun(final, time.perf_counter() - started)


def _warmup_cosine(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        done = min(1.0, step / steps)
        return min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    return factor


def _batch(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, L + 1) int64 from random places."""
    starts = torch.randint(len(text) - _SEQ_LEN, (count, 1), generator=generator)
    return text[starts + torch.arange(_SEQ_LEN + 1)].long()


def _loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    logits = model(sequences[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


@torch.no_grad()
def _held_out_loss(model: nn.Module, text: torch.Tensor) -> float:
    """On the same sequences for every seed and optimiser."""
    model.eval()
    sequences = _batch(text, _HELD_OUT_SEQUENCES, torch.Generator().manual_seed(0))
    return _loss(model, sequences).item()
