"""What a study found: report.md for people, runs.csv for tables, report.json for programs."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from typing import Any

from fp4_plugin.bench.ablation.arms import ARMS, BASELINE, CONTROLS, PERTURBED, SLOPE_CONTROL
from fp4_plugin.bench.ablation.results import write_atomically
from fp4_plugin.bench.ablation.study import Outcome
from fp4_plugin.bench.ablation.training import RunResult
from fp4_plugin.bench.ablation.verdict import (
    MIN_SEEDS,
    Difference,
    Verdict,
    judge,
    noise_floor,
    paired,
)

__all__ = ["Report", "write_report"]

MIN_BATCH_TOKENS = 16 * 256


class Report:
    """Every statement is derived from the runs of one outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._arms = outcome.options.all_arms
        self._losses = {arm: outcome.losses(arm) for arm in self._arms}
        self.floor = noise_floor(self._losses[PERTURBED], self._losses[BASELINE])

    def difference(self, arm: str, other: str = BASELINE) -> Difference | None:
        return paired(self._losses[arm], self._losses[other])

    def verdict(self, arm: str, other: str = BASELINE) -> Verdict:
        """How the loss of `arm` compares with that of `other`."""
        return judge(self.difference(arm, other), self.floor)

    def text(self) -> str:
        """The whole report as Markdown."""
        parts = [self._header(), self.sweep_table(), self.arm_table()]
        parts += ["\n".join(f"- {line}" for line in lines) for lines in self._lists() if lines]
        return "\n\n".join(parts) + "\n"

    def sweep_table(self) -> str:
        best = self._outcome.learning_rate
        lines = ["| learning rate | BF16 held-out loss |", "|---|---|"]
        for run in self._outcome.sweep:
            chosen = " (taken)" if run.settings.learning_rate == best else ""
            lines.append(f"| {run.settings.learning_rate:g}{chosen} | {_loss(run.held_out_loss)} |")
        return "\n".join(lines)

    def arm_table(self) -> str:
        lines = [
            "| arm | held-out loss | min .. max | minus BF16, by seed | min .. max "
            "| gap lies within | against BF16 |",
            "|---|---|---|---|---|---|---|",
            *(self._row(arm) for arm in self._arms),
        ]
        return "\n".join(lines)

    def _row(self, arm: str) -> str:
        finished = self._finished(arm)
        if len(finished) < len(self._losses[arm]):
            return f"| {arm} | {self._divergence(arm)} | - | - | - | - | diverged |"
        spread = f"{min(finished):.4f} .. {max(finished):.4f}"
        start = f"| {arm} | {statistics.fmean(finished):.4f} | {spread}"
        difference = self.difference(arm)
        if arm == BASELINE or difference is None:
            return f"{start} | - | - | - | - |"
        bounds = "-"
        if self.floor is not None:
            low, high = (self._percent(nats) for nats in difference.bounds(self.floor))
            bounds = f"{low} .. {high}"
        return (
            f"{start} | {difference.mean:+.4f} ({self._percent(difference.mean)}) "
            f"| {difference.low:+.4f} .. {difference.high:+.4f} | {bounds} | {self.verdict(arm)} |"
        )

    def _finished(self, arm: str) -> list[float]:
        return [loss for loss in self._losses[arm].values() if loss is not None]

    def _divergence(self, arm: str) -> str:
        losses = self._losses[arm]
        return f"{len(losses) - len(self._finished(arm))} of {len(losses)} runs diverged"

    def _percent(self, nats: float) -> str:
        return f"{100 * nats / statistics.fmean(self._finished(BASELINE)):+.2f} %"

    def _header(self) -> str:
        options, shape = self._outcome.options, self._outcome.options.shape()
        return (
            f"LLaMA with hidden size {shape.hidden_size} and {shape.num_layers} layers on bytes, "
            f"{options.steps} steps of {options.batch_sequences} x {shape.seq_len} tokens, seeds "
            f"{', '.join(map(str, options.seeds))}, {options.held_out_sequences} held-out "
            f"sequences. Losses in nats per token."
        )

    def _lists(self) -> list[list[str]]:
        return [self._floor_lines(), self.pair_lines(), self.artefact_lines(), self.limit_lines()]

    def _floor_lines(self) -> list[str]:
        if self.floor is None:
            return ["a control diverged, so there is no noise floor: nothing can be told apart"]
        return [
            f"noise floor: {self.floor:.4f} nats ({self._percent(self.floor).lstrip('+')}), the "
            f'largest difference that {PERTURBED} makes; "gap lies within" is the range over '
            "seeds, widened by it on both sides"
        ]

    def pair_lines(self) -> list[str]:
        """For every arm, in plain words: which arms it differs from, and which nobody can tell."""
        return [self._pair_line(arm) for arm in self._arms]

    def _pair_line(self, arm: str) -> str:
        if len(self._finished(arm)) < len(self._losses[arm]):
            return f"{arm}: {self._divergence(arm)}"
        others: dict[Verdict, list[str]] = {}
        for other in self._arms:
            if other != arm:
                others.setdefault(self.verdict(arm, other), []).append(other)
        phrases: list[tuple[Verdict, str]] = [
            ("lower", "lower than"),
            ("higher", "higher than"),
            ("cannot be told apart", "cannot be told apart from"),
        ]
        parts = [f"{words} {', '.join(others[key])}" for key, words in phrases if key in others]
        return f"{arm}: {'; '.join(parts)}"

    def artefact_lines(self) -> list[str]:
        """A loss below BF16 is never a win: say so where it occurs, and how to find out more."""
        lines = []
        for arm in self._arms:
            difference = self.difference(arm)
            if arm in (BASELINE, PERTURBED) or difference is None or difference.mean >= 0:
                continue
            nothing = " (and it quantises nothing)" if arm == SLOPE_CONTROL else ""
            lines.append(
                f"{arm} ends {-difference.mean:.4f} nats below BF16{nothing}: no win, but the "
                "artefact of short, small-batch training"
            )
        if lines:
            lines.append("gaps below BF16 change with the learning rate: repeat at a quarter of it")
        return lines

    def limit_lines(self) -> list[str]:
        """Where this study falls short of what a statement of parity needs."""
        options, rates = self._outcome.options, sorted(self._outcome.options.learning_rates)
        batch_tokens = options.batch_sequences * options.shape().seq_len
        limits = [
            (len(options.seeds) < MIN_SEEDS, f"fewer than {MIN_SEEDS} seeds say nothing"),
            (len(rates) < 4, "fewer than 4 learning rates were tried"),
            (
                self._outcome.learning_rate in (rates[0], rates[-1]),
                "the best learning rate lies at the edge of the sweep: widen --learning-rates",
            ),
            (batch_tokens < MIN_BATCH_TOKENS, f"fewer than {MIN_BATCH_TOKENS} tokens in a batch"),
        ]
        return [text for applies, text in limits if applies]

    def record(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "learning_rate": self._outcome.learning_rate,
            "noise_floor": self.floor,
            "arms": {arm: self._arm_record(arm) for arm in self._arms},
            "pairs": [
                {"arm": arm, "other": other, "verdict": self.verdict(arm, other)}
                for index, arm in enumerate(self._arms)
                for other in self._arms[index + 1 :]
            ],
            "limits": self.limit_lines(),
        }

    def _arm_record(self, arm: str) -> dict[str, Any]:
        difference = self.difference(arm)
        return {
            "summary": ARMS[arm].summary,
            "is_control": arm in CONTROLS,
            "held_out_losses": self._losses[arm],
            "minus_baseline": None if difference is None else difference.values,
            "verdict": self.verdict(arm),
        }


def write_report(outcome: Outcome) -> Report:
    """Leave report.md, report.json and runs.csv in the output folder."""
    report, folder = Report(outcome), outcome.options.output
    write_atomically(folder / "report.md", report.text())
    text = json.dumps(report.record(), indent=1, allow_nan=False) + "\n"
    write_atomically(folder / "report.json", text)
    write_atomically(folder / "runs.csv", _runs_csv(outcome))
    return report


def _runs_csv(outcome: Outcome) -> str:
    """Every run once, those of the sweep first."""
    runs = {run.settings.key(): run for run in (*outcome.sweep, *outcome.runs)}
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["arm", "seed", "learning_rate", "status", "held_out_loss", "steps", "seconds", "key"]
    )
    writer.writerows(_csv_row(run) for run in runs.values())
    return buffer.getvalue()


def _csv_row(run: RunResult) -> Sequence[Any]:
    settings, loss = run.settings, run.held_out_loss
    status = "diverged" if loss is None else "finished"
    return [
        settings.arm, settings.seed, settings.learning_rate, status,
        "" if loss is None else f"{loss:.6f}", len(run.train_losses), f"{run.seconds:.1f}",
        settings.key(),
    ]  # fmt: skip


def _loss(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4f}"
