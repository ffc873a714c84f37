"""What `fp4 bench convergence` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp4_plugin.errors import ConfigError

__all__ = ["PARTS", "ConvergenceOptions"]

# Keys of the section that null switches off.
PARTS = ("gradient_communication", "optimizer_states")


@dataclass(frozen=True)
class ConvergenceOptions:
    """The flags of the command. Raises ConfigError for what cannot be run.

    config: a DeepSpeed JSON whose section has the part `without` on; None for the built-in one.
    """

    without: str = PARTS[0]
    config: Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 100
    preset: str = "tiny"
    data: Path | None = None
    nproc: int | None = None
    output: Path = Path("runs/convergence")

    def __post_init__(self) -> None:
        if self.without not in PARTS:
            raise ConfigError(f"--without {self.without}: allowed are {', '.join(PARTS)}")
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ConfigError(f"--seeds {list(self.seeds)}: give one or more, each once")
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: at least one is needed")
