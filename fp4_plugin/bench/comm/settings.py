"""What `fp4 bench comm` is asked to measure.

Light to import: `fp4 bench comm --help` reads its defaults from here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.errors import ConfigError

__all__ = ["OPERATIONS", "CommOptions"]

# name -> what it is compared with
OPERATIONS = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_to_owners": "all_reduce",
}
# A round is one call of every contender; fewer say nothing about the spread.
MIN_ROUNDS = 5
# An element costs about 30 bytes while it is measured: reference, inputs, messages.
MAX_ELEMENTS = 1 << 28
MAX_RANKS = 64


@dataclass(frozen=True)
class CommOptions:
    """The flags of `fp4 bench comm`. Raises ConfigError for values that cannot be measured."""

    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = (65_536, 1_048_576, 16_777_216)
    formats: tuple[str, ...] = ("e4m3",)
    block_sizes: tuple[int, ...] = (1024,)
    operations: tuple[str, ...] = tuple(OPERATIONS)
    rounds: int = 15
    seed: int = 0
    timeout_minutes: float = 10.0
    output: Path | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "sizes", "formats", "block_sizes", "operations"):
            _require_distinct(name, getattr(self, name))
        _require_within("ranks", self.ranks, 2, MAX_RANKS)
        _require_within("sizes", self.sizes, 1, MAX_ELEMENTS)
        _require_within("rounds", (self.rounds,), MIN_ROUNDS, 10_000)
        for operation in self.operations:
            if operation not in OPERATIONS:
                raise ConfigError(f"--operations {operation}: allowed are {', '.join(OPERATIONS)}")
        self.codecs()  # raises ConfigError for a format or block size
        if not (math.isfinite(self.timeout_minutes) and self.timeout_minutes > 0):
            raise ConfigError(
                f"--timeout-minutes {self.timeout_minutes}: must be a finite number above 0"
            )

    def codecs(self) -> list[BlockCodec]:
        """Every format with every block size."""
        return [
            BlockCodec.named(fmt, block_size)
            for fmt in self.formats
            for block_size in self.block_sizes
        ]

    def to_json(self) -> str:
        """For a rank's process; `from_json` reads it back to an equal object."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> CommOptions:
        record: dict[str, Any] = json.loads(text)
        if record["output"] is not None:
            record["output"] = Path(record["output"])
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
        }
        return cls(**values)


def _require_distinct(name: str, values: Sequence[Any]) -> None:
    if not values or len(set(values)) < len(values):
        raise ConfigError(
            f"--{name.replace('_', '-')} {' '.join(map(str, values))}: needs one value or more, "
            "each once"
        )


def _require_within(name: str, values: Sequence[int], low: int, high: int) -> None:
    for value in values:
        if not low <= value <= high:
            hint = "; with one rank there is nothing to send" if name == "ranks" else ""
            raise ConfigError(f"--{name} {value}: must be from {low} to {high}{hint}")
