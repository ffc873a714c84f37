"""What a run leaves to read: the course of its losses, and the table beside its twin.

Files in the run's folder:

    losses.csv                         one line per optimiser step
    report.json, report.csv, report.md the table
    curves.png                         both curves
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fp4_plugin.pretrain.training import History

__all__ = ["Comparison", "RunSummary", "summarize", "write_losses", "write_report"]

FINAL_STEPS = 10
WARMUP_STEPS = 3  # the first steps allocate and compile; they are not the speed of the run

COLUMNS = (
    "run", "train_loss", "held_out_loss", "train_gap_nats", "train_gap_percent",
    "held_out_gap_nats", "held_out_gap_percent", "seconds_per_step", "time_ratio", "skipped_steps",
)  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """One run in numbers. Losses in nats per token; `train_loss` is the mean of the last steps."""

    label: str
    train_loss: float
    held_out_loss: float
    seconds_per_step: float
    skipped_steps: int


def summarize(label: str, history: History) -> RunSummary:
    """The numbers of a finished run; the time is the median over the steps after the first few."""
    timed = history.steps[WARMUP_STEPS:] or history.steps
    return RunSummary(
        label,
        statistics.fmean(record.loss for record in history.steps[-FINAL_STEPS:]),
        history.held_out[-1][1],
        statistics.median(record.seconds for record in timed),
        history.skipped_steps,
    )


@dataclass(frozen=True)
class Comparison:
    """A run, and its BF16 twin if there was one."""

    run: RunSummary
    twin: RunSummary | None

    def rows(self) -> list[dict[str, str | float | int]]:
        """One row per run, keyed by COLUMNS; gaps and the ratio are against the twin."""
        return [self._row(run) for run in (self.run, self.twin) if run is not None]

    def _row(self, run: RunSummary) -> dict[str, str | float | int]:
        row: dict[str, str | float | int] = {"run": run.label, **asdict(run)}
        del row["label"]
        if self.twin is not None:
            for kind in ("train", "held_out"):
                reference = getattr(self.twin, f"{kind}_loss")
                gap = getattr(run, f"{kind}_loss") - reference
                row[f"{kind}_gap_nats"] = gap
                row[f"{kind}_gap_percent"] = 100.0 * gap / reference
            row["time_ratio"] = run.seconds_per_step / self.twin.seconds_per_step
        return {column: row[column] for column in COLUMNS if column in row}

    def markdown(self) -> str:
        """The table for people: four digits, the gap beside each loss."""
        lines = [
            "| run | train loss | gap | held-out loss | gap | s/step | ratio |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows():
            lines.append(
                f"| {row['run']} | {row['train_loss']:.4f} | {_gap(row, 'train')} "
                f"| {row['held_out_loss']:.4f} | {_gap(row, 'held_out')} "
                f"| {row['seconds_per_step']:.3f} | {_ratio(row)} |"
            )
        return "\n".join(lines)


def _gap(row: dict[str, str | float | int], kind: str) -> str:
    if f"{kind}_gap_nats" not in row:
        return "-"
    return f"{row[f'{kind}_gap_nats']:+.4f} ({row[f'{kind}_gap_percent']:+.2f} %)"


def _ratio(row: dict[str, str | float | int]) -> str:
    return f"{row['time_ratio']:.2f}x" if "time_ratio" in row else "-"


def write_losses(path: Path, histories: Sequence[tuple[str, History]]) -> None:
    """One line per step and run: run, step, loss, lr, seconds; an old file is replaced whole."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["run", "step", "loss", "lr", "seconds"])
    for label, history in histories:
        for record in history.steps:
            numbers = (f"{record.loss:.6f}", f"{record.lr:.6e}", f"{record.seconds:.4f}")
            writer.writerow([label, record.step, *numbers])
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(buffer.getvalue(), encoding="utf-8")
    aside.replace(path)


def write_report(folder: Path, comparison: Comparison, facts: dict[str, object]) -> None:
    """report.json (rows and `facts` about the run), report.csv (rows), report.md (the table)."""
    rows = comparison.rows()
    record = {"runs": rows, **facts}
    (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(comparison.markdown() + "\n", encoding="utf-8")
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (folder / "report.csv").write_text(buffer.getvalue(), encoding="utf-8")
