"""Everything the command line of `fp4 pretrain` decides, as one frozen object.

None means "not given": the DeepSpeed JSON decides, then the model preset.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fp4_plugin.errors import ConfigError

__all__ = ["PretrainOptions"]

_PATHS = ("data", "eval_data", "cache_dir", "config", "output")
_POSITIVE = (
    "vocab_size",
    "seq_len",
    "steps",
    "tokens",
    "micro_batch",
    "grad_accum",
    "lr",
    "nproc",
    "eval_interval",
    "eval_sequences",
    "log_interval",
    "timeout_minutes",
    "save_interval",
    "keep",
)


@dataclass(frozen=True)
class PretrainOptions:
    """Field by field the flags of `fp4 pretrain --help`."""

    # model
    preset: str = "tiny"
    vocab_size: int | None = None
    seq_len: int | None = None
    activation_checkpointing: bool = False
    # data
    data: Path | None = None
    eval_data: Path | None = None
    tokenizer: str | None = None
    cache_dir: Path | None = None
    # training
    config: Path | None = None
    recipe: str | None = None
    zero_stage: int | None = None
    steps: int | None = None
    tokens: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    lr: float | None = None
    seed: int = 0
    # run
    nproc: int | None = None
    output: Path = Path("runs/pretrain")
    twin: bool = False
    export: bool = True
    tensorboard: bool = False
    eval_interval: int | None = None
    eval_sequences: int = 128
    log_interval: int = 10
    timeout_minutes: float = 30.0
    # checkpoints
    save_interval: int | None = None
    keep: int | None = None
    resume: str | None = None
    # nothing of the above
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be above 0 and finite")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"--seed {self.seed}: must be from 0 to {(1 << 32) - 1}")
        if self.steps is not None and self.tokens is not None:
            raise ConfigError("--steps and --tokens both give the length of the run; choose one")

    @property
    def inputs(self) -> list[Path]:
        """The files and folders that the run reads."""
        tokenizer = Path(self.tokenizer) if self.tokenizer else None
        given = (self.config, self.data, self.eval_data, tokenizer)
        return [path for path in given if path is not None]

    def to_json(self) -> str:
        """For a worker process; `from_json` reads it back to an equal object."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(record, indent=1, default=str)

    @classmethod
    def from_json(cls, text: str) -> PretrainOptions:
        record: dict[str, Any] = json.loads(text)
        for name in _PATHS:
            if record[name] is not None:
                record[name] = Path(record[name])
        return cls(**record)
