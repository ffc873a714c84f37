"""`fp4 bench comm`: its help, its flags, and the ranks behind them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp4_plugin.bench.comm.settings import OPERATIONS, CommOptions
from fp4_plugin.comm.codec import BLOCK_SIZES, WIRE_FORMATS

__all__ = ["add_parser"]

DESCRIPTION = """\
Reduce gradients over ranks of this machine, with FP8 on the wire and with torch.distributed in BF16
and FP32, and say what that does to bytes, time and error, and whether it pays.

Compression trades arithmetic for bytes. Bytes are about half of BF16's for an all-reduce and a
quarter where only the owner of a shard keeps the sum (reduce_to_owners, what ZeRO-1 and ZeRO-2
need). It pays where the network is slower than the codec: between machines, hardly ever within one.
"""

EPILOG = """\
examples:
  fp4 bench comm                                    2 and 4 ranks, three sizes: a few minutes
  fp4 bench comm --ranks 2 --sizes 1048576 --rounds 50
                                                    one size, a narrower spread
  fp4 bench comm --formats e4m3 e5m2 --block-sizes 128 1024 --operations all_reduce
                                                    what a format and a block size cost and bring
  fp4 bench comm --output comm.json                 all rounds as JSON

how to read it:
  All contenders run in one process per rank, in turn, so a busy machine slows all of them. A ratio
  is made round by round; its spread leaves out the outermost tenth on either side. "pays" and
  "does not pay" are said only if the whole spread lies on one side of 1.
  Ranks talk over the loopback interface, which no network matches. The bandwidth below which
  compression would pay is an estimate: bytes saved, by the time that the codec takes here.
  scripts/two_hosts.py measures the same over a link of limited bandwidth (Linux, root).

FP8 sums are made in float32, in rank order: see docs/communication.md.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "comm",
        help="gradient reductions in FP8 against BF16 and FP32: bytes, time, error",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_subject(parser.add_argument_group("what is reduced"))
    _add_execution(parser.add_argument_group("execution"))
    parser.set_defaults(func=_run)


def _add_subject(group: argparse._ArgumentGroup) -> None:
    defaults = CommOptions()
    group.add_argument(
        "--ranks", nargs="+", type=int, default=defaults.ranks, metavar="N",
        help=f"numbers of ranks, one job each (default: {_listed(defaults.ranks)})",
    )  # fmt: skip
    group.add_argument(
        "--sizes", nargs="+", type=int, default=defaults.sizes, metavar="N",
        help="elements per call, rounded up to a multiple of the ranks "
        f"(default: {_listed(defaults.sizes)})",
    )  # fmt: skip
    group.add_argument(
        "--operations", nargs="+", default=defaults.operations, metavar="NAME",
        help=f"of {_listed(OPERATIONS)} (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--formats", nargs="+", default=defaults.formats, metavar="NAME",
        help=f"of {_listed(fmt.name for fmt in WIRE_FORMATS)} "
        f"(default: {_listed(defaults.formats)})",
    )  # fmt: skip
    group.add_argument(
        "--block-sizes", nargs="+", type=int, default=defaults.block_sizes, metavar="N",
        help=f"elements that share a scale, a power of two from {BLOCK_SIZES[0]} to "
        f"{BLOCK_SIZES[-1]} (default: {_listed(defaults.block_sizes)})",
    )  # fmt: skip


def _add_execution(group: argparse._ArgumentGroup) -> None:
    defaults = CommOptions()
    group.add_argument(
        "--rounds", type=int, default=defaults.rounds, metavar="N",
        help=f"calls of every contender, 5 or more (default: {defaults.rounds})",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=defaults.seed, metavar="N", help="of the gradients"
    )
    group.add_argument(
        "--timeout-minutes", type=float, default=defaults.timeout_minutes, metavar="M",
        help="end the ranks if one job takes longer (default: "
        f"{defaults.timeout_minutes:g})",
    )  # fmt: skip
    group.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")


def _listed(values: Any) -> str:
    return " ".join(str(value) for value in values)


def _run(arguments: argparse.Namespace) -> int:
    """Returns 0 whatever is measured. Raises Fp4Error on bad input and failing ranks."""
    values = {field.name: getattr(arguments, field.name) for field in fields(CommOptions)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    options = CommOptions(**values)
    from fp4_plugin.bench.comm.launch import require_gloo, run_ranks
    from fp4_plugin.bench.comm.report import CommReport, write_json

    require_gloo()
    measured = [one for ranks in options.ranks for one in run_ranks(options, ranks)]
    report = CommReport(options, measured)
    print(report.text())
    if options.output is not None:
        write_json(report, options.output)
        print(f"\nall rounds are in {options.output}")
    return 0
