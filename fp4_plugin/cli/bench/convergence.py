"""`fp4 bench convergence`: its flags."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from fp4_plugin.bench.convergence.settings import PARTS, ConvergenceOptions
from fp4_plugin.pretrain.presets import PRESETS

__all__ = ["add_parser"]

DESCRIPTION = """\
Does one part of the "fp4" section change what a training reaches? `fp4 pretrain` runs with the
section as it is, and with that part set to null, on every seed; a seed decides the initial weights
and the order of the data. The difference is compared with what another seed does.
"""

EPILOG = """\
examples:
  fp4 bench convergence                       FP8 gradients on the quickstart: 6 runs, 4 minutes
  fp4 bench convergence --config ds.json --data notes/ --steps 1000 --seeds 0 1 2 3

what it leaves in --output:
  report.md, report.json    the table and the verdict
  with_*, without_*         the folder and the log of every run
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    defaults = ConvergenceOptions()
    parser = subparsers.add_parser(
        "convergence",
        help="one part of the section switched off: does the loss differ by more than seeds do",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--without", default=defaults.without, metavar="KEY",
        help=f"the part that is switched off: {', '.join(PARTS)} (default: {defaults.without})",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="JSON",
        help='DeepSpeed configuration with its "fp4" section (default: recipe paper, ZeRO-2)',
    )  # fmt: skip
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=defaults.seeds, metavar="N",
        help="three or more for any statement (default: 0 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, metavar="N",
        help=f"optimiser steps of a run (default: {defaults.steps})",
    )  # fmt: skip
    parser.add_argument(
        "--preset", default=defaults.preset, metavar="NAME",
        help=f"model: {', '.join(PRESETS)} (default: {defaults.preset})",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="PATH", help="as in fp4 pretrain")
    parser.add_argument("--nproc", type=int, metavar="N", help="as in fp4 pretrain")
    parser.add_argument(
        "--output", type=Path, default=defaults.output, metavar="DIR",
        help=f"folder of results (default: {defaults.output})",
    )  # fmt: skip
    parser.set_defaults(func=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Returns 0 once every run is done, whatever the verdict. Raises Fp4Error on bad input."""
    values = {field.name: getattr(arguments, field.name) for field in fields(ConvergenceOptions)}
    options = ConvergenceOptions(**{**values, "seeds": tuple(values["seeds"])})
    from fp4_plugin.bench.convergence.study import run_study
    from fp4_plugin.bench.convergence.verdict import Verdict

    outcomes = run_study(options)
    verdict = Verdict(options.without, outcomes[True], outcomes[False])
    verdict.write(options.output)
    print(f"\n{verdict.markdown()}\n\neverything is in {options.output}")
    return 0
