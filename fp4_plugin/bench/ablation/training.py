"""One run of the study in plain torch: BF16 compute, FP32 master weights, AdamW.

This is what DeepSpeed does in BF16 on one rank, without its machinery: AdamW owns an FP32 model;
a BF16 copy of it, whose linears the arm converts, computes loss and gradients; each step moves the
gradients up (BF16 -> FP32), clips and steps there, and copies the weights down. Without masters, a
BF16 weight would swallow updates below 2^-9 of its size, and arms would differ by that.

The seed decides initial weights and sample order, so runs of one seed differ by their arm alone.
One thread: the order of sums, and with it every bit, is then the same wherever the run lands.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from fp4_plugin.activation import activate
from fp4_plugin.bench.ablation.arms import ARMS, Arm
from fp4_plugin.bench.ablation.settings import RunSettings
from fp4_plugin.bench.threads import torch_threads
from fp4_plugin.config import parse_section
from fp4_plugin.linear.convert import plan_model
from fp4_plugin.linear.operand import scaled_weight
from fp4_plugin.pretrain.dataset import TokenSequences, TrainingData
from fp4_plugin.pretrain.model import decay_groups
from fp4_plugin.pretrain.presets import ModelPreset
from fp4_plugin.pretrain.sample_order import BatchLayout, SampleOrder
from fp4_plugin.pretrain.schedule import WarmupCosine
from fp4_plugin.pretrain.training import sequence_losses

__all__ = [
    "RunResult",
    "SlopeControl",
    "build_master",
    "compute_copy",
    "perturb_weights",
    "train",
]

COMPUTE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class RunResult:
    """held_out_loss: nats per token, None if the run diverged. train_losses: of finite steps."""

    settings: RunSettings
    held_out_loss: float | None
    train_losses: tuple[float, ...]
    seconds: float

    @property
    def has_diverged(self) -> bool:
        return self.held_out_loss is None


class SlopeControl:
    """Multiplies weight gradients of unquantised linears by the slope an FP4 recipe would apply."""

    def __init__(self, compute: nn.Module, recipe: str) -> None:
        specs = plan_model(compute, parse_section({"recipe": recipe}).linear_spec).layers
        self._weights = [
            (f"{name}.weight", compute.get_parameter(f"{name}.weight"), spec)
            for name, spec in specs.items()
        ]

    @torch.no_grad()
    def apply(self, master: nn.Module) -> None:
        """Scale the FP32 gradients of `master`; the slope is that of the BF16 weights."""
        for name, weight, spec in self._weights:
            assert spec.weight.format is not None
            slope = spec.estimator.slope(scaled_weight(weight, spec.weight), spec.weight.format)
            grad = master.get_parameter(name).grad
            if slope is not None and grad is not None:
                grad.mul_(slope)


class _Replica:
    """FP32 master, BF16 compute copy as the arm wants it, and the optimiser between them."""

    def __init__(self, settings: RunSettings) -> None:
        arm, defaults = ARMS[settings.arm], settings.model.training
        self.master = build_master(settings.model, settings.seed)
        perturb_weights(self.master, arm.perturbation, settings.seed)
        self.compute, self.activation = _arm_copy(self.master, arm)
        self._slope = SlopeControl(self.compute, arm.slope_recipe) if arm.slope_recipe else None
        self._clipping = defaults.gradient_clipping
        self._optimizer = AdamW(
            decay_groups(self.master),
            lr=settings.learning_rate,
            betas=defaults.betas,
            eps=defaults.eps,
            weight_decay=defaults.weight_decay,
        )
        warmup_steps = max(1, round(settings.steps * defaults.warmup_fraction))
        schedule = WarmupCosine(settings.steps, warmup_steps, defaults.min_lr_fraction)
        self._scheduler = schedule.scheduler()(self._optimizer)

    def step(self, sequences: torch.Tensor) -> float:
        """One optimiser step on (B, L + 1) ids -> loss in nats; if not finite, nothing moves."""
        loss = sequence_losses(self.compute, sequences).mean()
        value = float(loss.detach())
        if not math.isfinite(value):
            return value
        loss.backward()
        self._move_gradients_up()
        if self._slope is not None:
            self._slope.apply(self.master)
        nn.utils.clip_grad_norm_(self.master.parameters(), self._clipping)
        self._optimizer.step()
        self._scheduler.step()
        _copy_weights(self.master, self.compute)
        return value

    def _move_gradients_up(self) -> None:
        for high, low in zip(self.master.parameters(), self.compute.parameters(), strict=True):
            high.grad = None if low.grad is None else low.grad.to(torch.float32)
            low.grad = None


def train(settings: RunSettings, data: TrainingData) -> RunResult:
    """Train and evaluate. A loss that is not finite ends the run as diverged.

    Raises MismatchError if the FP4 layers did not run as the arm asks.
    """
    started = time.perf_counter()
    with torch_threads(1):
        replica = _Replica(settings)
        losses = _losses(replica, settings, data.train)
        is_complete = len(losses) == settings.steps
        held_out = evaluate(replica.compute, data.held_out, settings) if is_complete else math.nan
        if replica.activation is not None and losses:
            replica.activation.verify()
    finite = held_out if math.isfinite(held_out) else None
    return RunResult(settings, finite, tuple(losses), time.perf_counter() - started)


def _losses(replica: _Replica, settings: RunSettings, data: TokenSequences) -> list[float]:
    """The training losses up to the last step, or up to the first that is not finite."""
    order = SampleOrder(len(data), settings.seed)
    layout = BatchLayout(settings.batch_sequences, grad_accum=1, world_size=1)
    losses: list[float] = []
    for step in range(settings.steps):
        loss = replica.step(data.read(order.sequences(layout.samples(step, 0, rank=0))))
        if not math.isfinite(loss):
            break
        losses.append(loss)
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, data: TokenSequences, settings: RunSettings) -> float:
    """Nats per token over evenly spaced held-out sequences, the same ones for every arm."""
    indices = data.evenly_spaced(settings.held_out_sequences)
    batch = settings.batch_sequences
    starts = range(0, len(indices), batch)
    losses = [sequence_losses(model, data.read(indices[start : start + batch])) for start in starts]
    return float(torch.cat(losses).to(torch.float64).mean())


def build_master(shape: ModelPreset, seed: int) -> nn.Module:
    """An FP32 LLaMA with the usual N(0, 0.02) weights, drawn from `seed`."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(shape.llama_config())
    return model


@torch.no_grad()
def perturb_weights(model: nn.Module, size: float, seed: int) -> None:
    """Multiply every parameter by 1 + size * N(0, 1), element by element; nothing for size 0."""
    if size == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


def compute_copy(master: nn.Module) -> nn.Module:
    """A copy with BF16 parameters; buffers (rotary frequencies) keep FP32."""
    compute = copy.deepcopy(master)
    for parameter in compute.parameters():
        parameter.data = parameter.data.to(COMPUTE_DTYPE)
    return compute


def _arm_copy(master: nn.Module, arm: Arm) -> tuple[nn.Module, Any]:
    """(compute copy, its activation), the latter None for an arm that converts nothing."""
    compute = compute_copy(master)
    config = parse_section(arm.section)
    is_converted = config.resolved()["linear"] is not None
    return compute, activate(compute, config) if is_converted else None


@torch.no_grad()
def _copy_weights(master: nn.Module, compute: nn.Module) -> None:
    for high, low in zip(master.parameters(), compute.parameters(), strict=True):
        low.copy_(high)
