"""From outcomes to a table and one careful sentence."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fp4_plugin.bench.convergence.study import Outcome

__all__ = ["Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What the runs of one study say; differences are with minus without the part."""

    part: str
    with_part: Sequence[Outcome]
    without_part: Sequence[Outcome]

    def differences(self) -> list[float]:
        """Of the held-out losses, seed by seed, in nats per token."""
        pairs = zip(self.with_part, self.without_part, strict=True)
        return [a.held_out_loss - b.held_out_loss for a, b in pairs]

    def seed_noise(self) -> float | None:
        """Standard deviation over seeds without the part; None for a single seed."""
        losses = [one.held_out_loss for one in self.without_part]
        return statistics.stdev(losses) if len(losses) > 1 else None

    def sentence(self) -> str:
        mean = statistics.fmean(self.differences())
        noise = self.seed_noise()
        if noise is None:
            return f"{self.part}: {mean:+.4f} nats on one seed, which says nothing; give three"
        relation = "within" if abs(mean) <= noise else "OUTSIDE"
        return (
            f"{self.part}: {mean:+.4f} nats on average, {relation} the seed noise of {noise:.4f} "
            f"(standard deviation over {len(self.without_part)} seeds without it)"
        )

    def markdown(self) -> str:
        """The table, one line per seed, and the sentence."""
        lines = [
            f"| seed | held-out with {self.part} | without | difference | s/step ratio |",
            "|---|---|---|---|---|",
        ]
        for a, b in zip(self.with_part, self.without_part, strict=True):
            ratio = a.seconds_per_step / b.seconds_per_step
            difference = a.held_out_loss - b.held_out_loss
            lines.append(
                f"| {a.seed} | {a.held_out_loss:.4f} | {b.held_out_loss:.4f} "
                f"| {difference:+.4f} ({100 * difference / b.held_out_loss:+.2f} %) "
                f"| {ratio:.2f} |"
            )
        return "\n".join([*lines, "", self.sentence()])

    def write(self, folder: Path) -> None:
        """report.md and report.json in `folder`."""
        record: Mapping[str, object] = {
            "part": self.part,
            "with": [asdict(one) for one in self.with_part],
            "without": [asdict(one) for one in self.without_part],
            "differences": self.differences(),
            "seed_noise": self.seed_noise(),
            "sentence": self.sentence(),
        }
        (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.markdown() + "\n", encoding="utf-8")
