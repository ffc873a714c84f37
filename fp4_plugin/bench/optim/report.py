"""What was measured, for people and programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp4_plugin import __version__
from fp4_plugin.bench.comm.verdict import Spread, ratios
from fp4_plugin.bench.optim.contenders import BASELINE
from fp4_plugin.bench.optim.measure import Measured
from fp4_plugin.bench.optim.settings import OptimOptions
from fp4_plugin.bench.optim.study import ARMS
from fp4_plugin.bench.optim.training import TrainingRun
from fp4_plugin.errors import ConfigError

__all__ = ["Load", "step_record", "step_text", "training_record", "training_text", "write_json"]

_STEP_TITLES = (
    "elements", "tensors", "optimizer", "time / adamw", "its spread", "ms",
    "bytes owned", "of parameters", "of gradients", "kept MB", "step MB",
)  # fmt: skip
_TRAINING_TITLES = (
    "states",
    "held-out loss",
    "its spread",
    "minus",
    "paired difference",
    "its spread",
)
_MB = 2**20


@dataclass(frozen=True)
class Load:
    """Of the machine as the benchmark begins: runnable processes in the last minute, and cores."""

    average: float
    cores: int

    @classmethod
    def now(cls) -> Load:
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
        return cls(round(average, 2), os.cpu_count() or 1)

    def text(self) -> str:
        said = f"load average {self.average:g} on {self.cores} CPU cores at the start"
        is_busy = self.average > self.cores / 4
        return f"{said}: BUSY MACHINE, times are those of a loaded machine" if is_busy else said


def step_text(
    options: OptimOptions, found: Sequence[Measured], missing: dict[str, str], load: Load
) -> str:
    threads = options.threads or torch.get_num_threads()
    header = (
        f"{load.text()}; torch {torch.__version__}, {threads} threads; {options.repeats} repeats, "
        "optimizers in turn within each; medians, spread without the outermost tenth on either side"
    )
    rows = [_step_cells(one, _baseline(one, found)) for one in found]
    said = [f"not measured: {label}: {reason}" for label, reason in missing.items()]
    return "\n".join([header, "", *_table([_STEP_TITLES, *rows]), "", *said, _STEP_FOOTNOTE])


def step_record(
    options: OptimOptions, found: Sequence[Measured], missing: dict[str, str], load: Load
) -> dict[str, Any]:
    """JSON-ready."""
    measurements = [
        one.record()
        | {
            "time_ratio": asdict(ratios(one.seconds, _baseline(one, found).seconds)),
            "owned_bytes_per_parameter": one.owned_bytes / one.numel,
        }
        for one in found
    ]
    return _common(options, load) | {"measurements": measurements, "not_measured": missing}


def training_text(options: OptimOptions, runs: dict[str, list[TrainingRun]], load: Load) -> str:
    header = (
        f"{load.text()}; {options.steps:,} steps, seeds {' '.join(map(str, options.seeds))}; "
        "held-out loss in nats per byte, means over seeds, lowest .. highest"
    )
    rows = [_training_cells(label, runs) for label in runs]
    return "\n".join([header, "", *_table([_TRAINING_TITLES, *rows]), "", _TRAINING_FOOTNOTE])


def training_record(
    options: OptimOptions, runs: dict[str, list[TrainingRun]], load: Load
) -> dict[str, Any]:
    """JSON-ready; a loss that is not finite is null."""
    losses = {
        label: [one.final_loss if math.isfinite(one.final_loss) else None for one in found]
        for label, found in runs.items()
    }
    seconds = {label: [one.seconds for one in found] for label, found in runs.items()}
    return _common(options, load) | {"final_losses": losses, "seconds": seconds}


def _common(options: OptimOptions, load: Load) -> dict[str, Any]:
    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
        "machine": {
            "cpu_cores": load.cores,
            "load_average_at_start": load.average,
            "torch": torch.__version__,
            "fp4_plugin": __version__,
        },
    }


def _baseline(one: Measured, found: Sequence[Measured]) -> Measured:
    size = (one.numel, one.tensors, BASELINE)
    return next(other for other in found if (other.numel, other.tensors, other.label) == size)


def _step_cells(one: Measured, baseline: Measured) -> list[str]:
    ratio, seconds = ratios(one.seconds, baseline.seconds), Spread.of(one.seconds)
    memory = one.memory
    return [
        f"{one.numel:,}", str(one.tensors), one.label, f"{ratio.median:.2f}",
        f"{ratio.low:.2f} .. {ratio.high:.2f}", f"{1e3 * seconds.median:.1f}",
        f"{one.owned_bytes / one.numel:.2f}", f"{one.parameter_bytes / one.numel:.2f}",
        f"{one.gradient_bytes / one.numel:.2f}",
        "-" if memory is None else f"{memory.kept / _MB:.1f}",
        "-" if memory is None else f"{memory.step / _MB:.1f}",
    ]  # fmt: skip


def _training_cells(label: str, runs: dict[str, list[TrainingRun]]) -> list[str]:
    other = next(arm.compared_with for arm in ARMS if arm.label == label)
    losses = [one.final_loss for one in runs[label]]
    gaps = [
        ours.final_loss - theirs.final_loss
        for ours, theirs in zip(runs[label], runs[other], strict=True)
    ]
    cells = [label, *_mean_and_range(losses, "")]
    return (
        [*cells, "-", "-", "-"] if other == label else [*cells, other, *_mean_and_range(gaps, "+")]
    )


def _mean_and_range(values: Sequence[float], sign: str) -> list[str]:
    mean = sum(values) / len(values)
    return [f"{mean:{sign}.4f}", f"{min(values):{sign}.4f} .. {max(values):{sign}.4f}"]


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Markdown, the first line being the header."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [padded[0], rule, *padded[1:]]


_STEP_FOOTNOTE = """\
time / adamw: of torch.optim.AdamW(foreach=True) on float32 parameters, in the same repeat. Bytes
are per element; those owned by the optimizer count states and master weights, and a float32
parameter is its own master weight, so that it is counted there and under parameters. MB: measured
in a process of its own, beside parameters, gradients and states; kept: scratch memory between steps
(of a compiled optimizer also what the compiler made), step: on top of that while a step runs."""

_TRAINING_FOOTNOTE = """\
A paired difference is of runs of one seed, which have the same weights at the start and the same
batches. That of the second row comes from a change of the initial weights by 0.1 %: differences of
that size say nothing."""


def write_json(record: dict[str, Any], path: Path) -> None:
    """Raises ConfigError if `path` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}; give another path") from error
