"""Tiny studies: a corpus, options that run in milliseconds, and trainings that do not train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4_plugin.bench.ablation.settings import RunSettings, StudyOptions
from fp4_plugin.bench.ablation.study import Outcome
from fp4_plugin.bench.ablation.training import RunResult
from fp4_plugin.pretrain.dataset import DataSource

TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(200))


def tiny_options(folder: Path, **changes: Any) -> StudyOptions:
    """One layer of 32, 2 steps of 2 x 32 bytes, one seed, two rates."""
    corpus = folder / "corpus.py"
    corpus.write_text(TEXT)
    settings: dict[str, Any] = {
        "arms": ("paper",), "seeds": (0,), "learning_rates": (1e-3, 1e-2), "steps": 2,
        "batch_sequences": 2, "held_out_sequences": 4, "hidden_size": 32, "num_layers": 1,
        "seq_len": 32, "data": corpus, "cache_dir": folder / "cache", "output": folder / "out",
        "jobs": 1,
    }  # fmt: skip
    return StudyOptions(**{**settings, **changes})


class RecordedTraining:
    """Stands in for `train`: notes what it is asked, and answers with losses from a table."""

    def __init__(self, losses: dict[Any, float | None] | None = None) -> None:
        self.asked: list[RunSettings] = []
        self._losses = losses or {}

    def __call__(self, settings: RunSettings, source: DataSource) -> RunResult:
        self.asked.append(settings)
        for key in ((settings.arm, settings.seed), settings.arm, settings.learning_rate):
            if key in self._losses:
                return RunResult(settings, self._losses[key], (3.0,), 0.1)
        return RunResult(settings, 2.0, (3.0, 2.5), 0.1)


def outcome(folder: Path, losses: dict[str, list[float | None]], **changes: Any) -> Outcome:
    """A study with the given held-out losses by arm and seed; the controls must be among them."""
    seeds = tuple(range(len(losses["bf16"])))
    changes = {"learning_rates": (1e-3, 2e-3, 4e-3, 8e-3), "seeds": seeds, **changes}
    options = tiny_options(folder, arms=tuple(losses), **changes)
    runs = [
        RunResult(options.run(arm, seed, 2e-3, "corpus"), losses[arm][seed], (3.0,), 1.0)
        for arm in options.all_arms
        for seed in seeds
    ]
    sweep = [
        RunResult(options.run("bf16", 0, rate, "corpus"), 2.0, (3.0,), 1.0)
        for rate in options.learning_rates
    ]
    return Outcome(options, 2e-3, sweep, runs)
