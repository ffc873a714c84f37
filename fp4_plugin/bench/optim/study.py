"""What `fp4 bench optim` runs: all sizes, or all trainings, one after the other."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import AdamW
from tqdm import tqdm

from fp4_plugin.bench.optim.contenders import CONTENDERS, Contender
from fp4_plugin.bench.optim.measure import WARMUP_REPEATS, Measured, measure_steps
from fp4_plugin.bench.optim.peak import measure_memory
from fp4_plugin.bench.optim.settings import OptimOptions
from fp4_plugin.bench.optim.training import MakeOptimizer, TrainingRun, stdlib_text, train
from fp4_plugin.bench.threads import torch_threads
from fp4_plugin.optim import FP16StateAdamW

__all__ = ["ARMS", "Arm", "missing_contenders", "run_steps", "run_trainings"]

_TEXT_BYTES = 2_000_000
_TRAINING: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Arm:
    """One way to train. compared_with: the arm it differs from by its states alone."""

    label: str
    make: MakeOptimizer
    compared_with: str
    dtype: torch.dtype = torch.float32
    perturbation: float = 0.0


def _ours(**options: Any) -> MakeOptimizer:
    return functools.partial(FP16StateAdamW, **_TRAINING, **options)


_FP32, _BF16 = "fp32 states", "bf16 weights, fp16 states, fp32 master"
ARMS = (
    Arm(_FP32, functools.partial(AdamW, **_TRAINING), _FP32),
    # How far apart two trainings end that differ by nothing of interest.
    Arm("fp32 states, weights x (1 + .001 N)", functools.partial(AdamW, **_TRAINING), _FP32,
        perturbation=1e-3),
    Arm("fp16 states", _ours(), _FP32),
    Arm("e4m3 + fp16 states", _ours(exp_avg="e4m3"), _FP32),
    Arm(_BF16, _ours(), _BF16, torch.bfloat16),
    Arm("bf16 weights, fp16 states, fp16 master", _ours(master_weights="fp16"), _BF16,
        torch.bfloat16),
    Arm("bf16 weights, e4m3 + fp16 states, fp16 master",
        _ours(exp_avg="e4m3", master_weights="fp16"), _BF16, torch.bfloat16),
)  # fmt: skip


def missing_contenders(options: OptimOptions) -> dict[str, str]:
    """label -> why it is not measured."""
    reasons = {}
    for one in CONTENDERS:
        reason = one.missing() or ("--no-compile" if _is_unwanted(one, options) else None)
        if reason is not None:
            reasons[one.label] = reason
    return reasons


def _is_unwanted(contender: Contender, options: OptimOptions) -> bool:
    return contender.is_compiled and not options.compile


def run_steps(options: OptimOptions) -> list[Measured]:
    """Every available contender at every size."""
    missing = missing_contenders(options)
    contenders = [one for one in CONTENDERS if one.label not in missing]
    sizes = [(numel, tensors) for numel in options.numel for tensors in options.tensors]
    steps = len(sizes) * len(contenders) * (options.repeats + WARMUP_REPEATS)
    found: list[Measured] = []
    with (
        torch_threads(options.threads),
        tqdm(total=steps + len(sizes) * len(contenders), unit="step", disable=None) as bar,
    ):
        for numel, tensors in sizes:
            bar.set_description(f"{numel:,} elements, {tensors} tensors")
            for one in measure_steps(contenders, numel, tensors, options.repeats, bar.update):
                memory = measure_memory(one.label, numel, tensors, options.threads)
                found.append(replace(one, memory=memory))
                bar.update()
    return found


def run_trainings(options: OptimOptions) -> dict[str, list[TrainingRun]]:
    """arm -> one run per seed. The runs of a seed follow one another."""
    text = stdlib_text(_TEXT_BYTES)
    runs = [(seed, arm) for seed in options.seeds for arm in ARMS]
    found: dict[str, list[TrainingRun]] = {arm.label: [] for arm in ARMS}
    for seed, arm in tqdm(runs, unit="training", disable=None):
        settings: dict[str, Any] = {"dtype": arm.dtype, "perturbation": arm.perturbation}
        found[arm.label].append(train(arm.make, text, options.steps, seed, **settings))
    return found
