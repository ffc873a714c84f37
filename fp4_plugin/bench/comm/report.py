"""What was measured, for people and programs. Every sentence is derived from the numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp4_plugin import __version__
from fp4_plugin.bench.comm.contenders import BASELINE
from fp4_plugin.bench.comm.measure import Measured
from fp4_plugin.bench.comm.settings import OPERATIONS, CommOptions
from fp4_plugin.bench.comm.verdict import Spread, Verdict, break_even_bits_per_s, judge, ratios
from fp4_plugin.errors import ConfigError

__all__ = ["CommReport", "Row", "statement", "write_json"]

TITLES = (
    "operation", "elements", "ranks", "sent as", "time / bf16", "its spread", "bytes / bf16",
    "ms", "bytes per rank", "SNR dB", "worst block", "against bf16",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One contender beside BF16 at the same reduction. Codec time only for what is compressed."""

    measured: Measured
    baseline: Measured
    codec: Measured | None

    @property
    def time_ratio(self) -> Spread:
        return ratios(self.measured.seconds, self.baseline.seconds)

    @property
    def bytes_ratio(self) -> float:
        return self._bytes(self.measured) / self._bytes(self.baseline)

    @property
    def bytes_saved(self) -> int:
        return self._bytes(self.baseline) - self._bytes(self.measured)

    @property
    def verdict(self) -> Verdict | None:
        """None for what does not compress."""
        return None if self.codec is None else judge(self.time_ratio)

    @property
    def break_even_bits_per_s(self) -> float | None:
        if self.codec is None:
            return None
        return break_even_bits_per_s(self.bytes_saved, Spread.of(self.codec.seconds).median)

    @staticmethod
    def _bytes(measured: Measured) -> int:
        assert measured.wire_bytes is not None
        return measured.wire_bytes

    def cells(self) -> list[str]:
        """One line of the table, in the order of TITLES."""
        one, ratio, error = self.measured, self.time_ratio, self.measured.deviation
        assert error is not None
        return [
            one.operation, f"{one.elements:,}", str(one.num_ranks), one.label,
            f"{ratio.median:.2f}", f"{ratio.low:.2f} .. {ratio.high:.2f}",
            f"{self.bytes_ratio:.3f}", f"{1e3 * Spread.of(one.seconds).median:.2f}",
            f"{self._bytes(one):,}", "exact" if error.snr_db is None else f"{error.snr_db:.1f}",
            f"{100 * error.worst_block:.2f} %", self.verdict or "-",
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        one, error = self.measured, self.measured.deviation
        assert error is not None
        return {
            "operation": one.operation,
            "compared_with": OPERATIONS[one.operation],
            "elements": one.elements,
            "ranks": one.num_ranks,
            "sent_as": one.label,
            "time_ratio": asdict(self.time_ratio),
            "bytes_ratio": self.bytes_ratio,
            "seconds": asdict(Spread.of(one.seconds)),
            "rounds": list(one.seconds),
            "codec_seconds": None if self.codec is None else asdict(Spread.of(self.codec.seconds)),
            "wire_bytes_per_rank": one.wire_bytes,
            "snr_db": error.snr_db,
            "worst_block_relative_error": error.worst_block,
            "verdict": self.verdict,
            "estimated_break_even_bits_per_s": self.break_even_bits_per_s,
            "statement": None if self.codec is None else statement(self),
        }


def statement(row: Row) -> str:
    """One sentence about time, one about the bandwidth at which it would turn."""
    one, ratio = row.measured, row.time_ratio
    said = {
        "pays": "compression pays here",
        "does not pay": "compression does not pay here",
        "cannot be told": "whether compression pays here cannot be told",
        None: "nothing is compressed",
    }[row.verdict]
    start = (
        f"{one.operation}, {one.elements:,} elements, {one.num_ranks} ranks, {one.label}: {said}: "
        f"{ratio.median:.2f} times the time of BF16 (spread {ratio.low:.2f} .. {ratio.high:.2f})."
    )
    if row.codec is None:
        return start
    limit, codec_ms = row.break_even_bits_per_s, 1e3 * Spread.of(row.codec.seconds).median
    if limit is None:
        return f"{start} It saves no bytes, so it pays on no link."
    return (
        f"{start} Estimate: it pays on links below {_bandwidth(limit)} per rank "
        f"({row.bytes_saved:,} bytes saved for {codec_ms:.2f} ms of codec)."
    )


def _bandwidth(bits_per_s: float) -> str:
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.1f} Gbit/s"
    return f"{bits_per_s / 1e6:.0f} Mbit/s"


class CommReport:
    """Table and statements of one benchmark."""

    def __init__(self, options: CommOptions, measured: Sequence[Measured]) -> None:
        self._options = options
        by_key = {_key(one, one.label): one for one in measured}
        self.rows = [
            Row(
                one,
                by_key[_key(one, BASELINE)],
                by_key.get(_key(one, f"{one.label} codec")),
            )
            for one in measured
            if one.wire_bytes is not None
        ]

    def text(self) -> str:
        """The whole report: what it is, table, statements."""
        said = [f"- {statement(row)}" for row in self.rows if row.codec is not None]
        return "\n".join([self._header(), "", *self._table(), "", *said, "", FOOTNOTE])

    def _header(self) -> str:
        return (
            f"{os.cpu_count()} CPU cores, gloo on the loopback interface, torch "
            f"{torch.__version__}; {self._options.rounds} rounds, contenders in turn within each; "
            "medians, spread without the outermost tenth on either side"
        )

    def _table(self) -> list[str]:
        lines = [TITLES, *(row.cells() for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(TITLES))]
        padded = [
            "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
            for line in lines
        ]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return [padded[0], rule, *padded[1:]]

    def record(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "options": json.loads(self._options.to_json()),
            "machine": {
                "cpu_cores": os.cpu_count(),
                "backend": "gloo",
                "link": "loopback",
                "torch": torch.__version__,
                "fp4_plugin": __version__,
            },
            "measurements": [row.record() for row in self.rows],
        }


FOOTNOTE = """\
time / bf16: of the same call with BF16 in torch.distributed, in the same round; for
reduce_to_owners that is an all-reduce. Bytes of ours are counted, those of bf16 and fp32 are what a
ring sends (gloo's reduce_scatter sends twice as much). Errors are against a sum in float64; the
worst block is the largest relative error of 1024 elements. The loopback interface is faster than
any network and ranks share this machine's cores: neither a loss nor a win here is one on yours, so
look at the estimate."""


def _key(one: Measured, label: str) -> tuple[str, int, int, str]:
    """Of the contender `label` at the reduction of `one`."""
    return one.operation, one.elements, one.num_ranks, label


def write_json(report: CommReport, path: Path) -> None:
    """Raises ConfigError if `path` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.record(), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}; give another path") from error
