"""What a study and each of its runs are asked to do; equal settings have equal keys.

Light to import: `fp4 bench ablation --help` reads its defaults from here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fp4_plugin import __version__
from fp4_plugin.bench.ablation.arms import ARMS, CONTROLS, DEFAULT_ARMS
from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.presets import BYTE_VOCAB_SIZE, PRESETS, ModelPreset

__all__ = ["RunSettings", "StudyOptions"]

# The smallest shape in which rows are long enough for OCC at alpha .99 to clamp anything.
SMALL_SHAPE = ModelPreset("ablation", 128, 344, 2, 4, seq_len=256, vocab_size=BYTE_VOCAB_SIZE)


@dataclass(frozen=True)
class RunSettings:
    """One training: everything its numbers depend on. `corpus` is the digest of the tokens."""

    arm: str
    seed: int
    learning_rate: float
    steps: int
    batch_sequences: int
    held_out_sequences: int
    model: ModelPreset
    corpus: str

    def key(self) -> str:
        """16 hex digits that change with any setting, with the package and with torch."""
        facts = asdict(self)
        facts["arm"] = ARMS[self.arm].identity()
        facts["versions"] = [__version__, metadata.version("torch")]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StudyOptions:
    """The flags of `fp4 bench ablation`. Raises ConfigError for values that cannot be run."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    steps: int = 100
    batch_sequences: int = 16
    held_out_sequences: int = 256
    preset: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    seq_len: int | None = None
    data: Path | None = None
    cache_dir: Path | None = None
    output: Path = Path("runs/ablation")
    jobs: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def __post_init__(self) -> None:
        for arm in self.arms:
            ARMS[arm]  # raises ConfigError with the nearest name
        for name in ("arms", "seeds", "learning_rates"):
            _check_list(name, getattr(self, name))
        if min(self.seeds) < 0:
            raise ConfigError(f"--seeds {min(self.seeds)}: a seed is 0 or more")
        for rate in self.learning_rates:
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"--learning-rates {rate}: must be a finite number above 0")
        for name in ("steps", "batch_sequences", "held_out_sequences", "jobs", "hidden_size",
                     "num_layers", "seq_len"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} {value}: must be above 0")

    @property
    def all_arms(self) -> tuple[str, ...]:
        """The controls, then the arms that were asked for."""
        return (*CONTROLS, *(arm for arm in self.arms if arm not in CONTROLS))

    def shape(self) -> ModelPreset:
        """The preset with --hidden, --layers and --seq-len in place; heads keep their width."""
        preset = SMALL_SHAPE if self.preset is None else PRESETS[self.preset]
        # Bytes in, bytes out: a larger embedding would be ballast in every arm.
        preset = replace(preset, vocab_size=BYTE_VOCAB_SIZE, seq_len=self.seq_len or preset.seq_len)
        if self.num_layers is not None:
            preset = replace(preset, num_layers=self.num_layers)
        return preset if self.hidden_size is None else _widened(preset, self.hidden_size)

    def run(self, arm: str, seed: int, learning_rate: float, corpus: str) -> RunSettings:
        return RunSettings(
            arm, seed, learning_rate, self.steps, self.batch_sequences, self.held_out_sequences,
            self.shape(), corpus,
        )  # fmt: skip


def _check_list(name: str, values: Sequence[Any]) -> None:
    if not values or len(set(values)) < len(values):
        raise ConfigError(
            f"--{name.replace('_', '-')} {' '.join(map(str, values))}: needs one value or more, "
            "each once"
        )


def _widened(preset: ModelPreset, hidden_size: int) -> ModelPreset:
    head_width = preset.hidden_size // preset.num_heads
    if hidden_size % head_width:
        raise ConfigError(f"--hidden {hidden_size}: must be a multiple of {head_width}, a head")
    intermediate = preset.intermediate_size * hidden_size // preset.hidden_size
    return replace(
        preset,
        hidden_size=hidden_size,
        intermediate_size=max(8, intermediate // 8 * 8),
        num_heads=hidden_size // head_width,
    )
