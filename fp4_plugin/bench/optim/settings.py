"""What `fp4 bench optim` is asked to measure.

Light to import: `fp4 bench optim --help` reads its defaults from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4_plugin.errors import ConfigError

__all__ = ["OptimOptions", "tensor_shapes"]

# Fewer say nothing about the spread.
MIN_REPEATS = 3
# Parameters, gradients and the states of all contenders cost about 60 bytes per element.
MAX_NUMEL = 1 << 31
MAX_TENSORS = 100_000
# A model has norms and biases beside its matrices.
_VECTOR_NUMEL = 1024


@dataclass(frozen=True)
class OptimOptions:
    """The flags of `fp4 bench optim`. Raises ConfigError for values that cannot be measured.

    threads: of torch; 0 leaves it what it is. steps, seeds: of the runs of `training`.
    """

    numel: tuple[int, ...] = (20_000_000, 50_000_000)
    tensors: tuple[int, ...] = (1, 200)
    repeats: int = 9
    threads: int = 0
    compile: bool = True
    training: bool = False
    steps: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("numel", "tensors", "seeds"):
            _require_distinct(name, getattr(self, name))
        _require_within("numel", self.numel, 1, MAX_NUMEL)
        _require_within("tensors", self.tensors, 1, MAX_TENSORS)
        _require_within("repeats", (self.repeats,), MIN_REPEATS, 10_000)
        _require_within("threads", (self.threads,), 0, 1024)
        _require_within("steps", (self.steps,), 1, 1_000_000)
        _require_within("seeds", self.seeds, 0, 2**31)
        if max(self.tensors) > min(self.numel):
            raise ConfigError(
                f"--tensors {max(self.tensors)}: {min(self.numel)} elements (--numel) do not fill "
                "so many; give fewer tensors"
            )


def tensor_shapes(numel: int, tensors: int) -> list[tuple[int, ...]]:
    """Shapes of `tensors` tensors, `numel` elements in all: half vectors, half matrices.

    One tensor is flat: that is what ZeRO hands to an optimiser.
    """
    if tensors == 1:
        return [(numel,)]
    vectors = tensors // 2
    length = min(_VECTOR_NUMEL, numel // tensors)
    left, matrices = numel - vectors * length, tensors - vectors
    sizes = [left // matrices + (index < left % matrices) for index in range(matrices)]
    shapes: list[tuple[int, ...]] = [
        (size // 64, 64) if size % 64 == 0 else (size,) for size in sizes
    ]
    return [*shapes, *[(length,)] * vectors]


def _require_distinct(name: str, values: Sequence[int]) -> None:
    if not values or len(set(values)) < len(values):
        given = " ".join(map(str, values))
        raise ConfigError(f"--{name} {given}: needs one value or more, each once")


def _require_within(name: str, values: Sequence[int], low: int, high: int) -> None:
    for value in values:
        if not low <= value <= high:
            raise ConfigError(f"--{name} {value}: must be from {low:,} to {high:,}")
