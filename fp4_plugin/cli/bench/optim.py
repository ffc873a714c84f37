"""`fp4 bench optim`: its help and its flags."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp4_plugin.bench.optim.settings import OptimOptions

__all__ = ["add_parser"]

DESCRIPTION = """\
Step time and memory of FP16StateAdamW, with its states in FP16 or E4M3, beside torch.optim.AdamW
and, where it is installed, torchao; or, with --training, what that does to a loss.

Smaller states cost arithmetic: they are decoded, updated in float32 and encoded again. What they
save is memory, on every step of a job whatever its speed.
"""

EPILOG = """\
examples:
  fp4 bench optim                                   two sizes, as one tensor and as 200: minutes
  fp4 bench optim --numel 5000000 --tensors 1 --no-compile
                                                    one size, no C++ compiler needed: seconds
  fp4 bench optim --threads 1 --repeats 25          a narrower spread
  fp4 bench optim --training                        7 ways to train a small model, 3 seeds each
  fp4 bench optim --training --steps 200 --seeds 0  a look at it
  fp4 bench optim --json optim.json                 all repeats as JSON

how to read it:
  All optimizers run in one process, in turn, on the same gradients, so a busy machine slows all of
  them; the load at the start is printed, and times of a busy machine are called that. A ratio is
  made repeat by repeat. One flat tensor is what ZeRO hands to an optimizer; many tensors, half of
  them vectors, are what plain torch does.
  Bytes owned are counted from the state tensors. Memory beside them is measured, not computed: in a
  process of its own for each optimizer, by the kernel (Linux).
  The training is too small to tell states apart that are nearly right; it finds those that are not.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "optim",
        help="optimizer states in FP16 and E4M3 against FP32: time, memory, loss",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_step_flags(parser.add_argument_group("steps"))
    _add_training_flags(parser.add_argument_group("training"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(func=_run)


def _add_step_flags(group: argparse._ArgumentGroup) -> None:
    defaults = OptimOptions()
    group.add_argument(
        "--numel", nargs="+", type=int, default=defaults.numel, metavar="N",
        help=f"elements in all tensors together (default: {_listed(defaults.numel)})",
    )  # fmt: skip
    group.add_argument(
        "--tensors", nargs="+", type=int, default=defaults.tensors, metavar="N",
        help=f"that they are split into (default: {_listed(defaults.tensors)})",
    )  # fmt: skip
    group.add_argument(
        "--repeats", type=int, default=defaults.repeats, metavar="N",
        help=f"steps of every optimizer, 3 or more (default: {defaults.repeats})",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=int, default=defaults.threads, metavar="N",
        help="of torch (default: as many as torch takes)",
    )  # fmt: skip
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=defaults.compile,
        help="measure also what torch.compile makes of a step (default: yes)",
    )  # fmt: skip


def _add_training_flags(group: argparse._ArgumentGroup) -> None:
    defaults = OptimOptions()
    group.add_argument("--training", action="store_true", help="train instead of measuring steps")
    group.add_argument(
        "--steps", type=int, default=defaults.steps, metavar="N",
        help=f"of each training (default: {defaults.steps})",
    )  # fmt: skip
    group.add_argument(
        "--seeds", nargs="+", type=int, default=defaults.seeds, metavar="N",
        help=f"one training of each kind per seed (default: {_listed(defaults.seeds)})",
    )  # fmt: skip


def _listed(values: Any) -> str:
    return " ".join(str(value) for value in values)


def _run(arguments: argparse.Namespace) -> int:
    """Returns 0 whatever is measured. Raises Fp4Error on bad input."""
    values = {field.name: getattr(arguments, field.name) for field in fields(OptimOptions)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    options = OptimOptions(**values)
    from fp4_plugin.bench.optim import report, study

    load = report.Load.now()
    if options.training:
        runs = study.run_trainings(options)
        text = report.training_text(options, runs, load)
        record = report.training_record(options, runs, load)
    else:
        missing, found = study.missing_contenders(options), study.run_steps(options)
        text = report.step_text(options, found, missing, load)
        record = report.step_record(options, found, missing, load)
    print(text)
    if options.json is not None:
        report.write_json(record, options.json)
        print(f"\neverything is in {options.json}")
    return 0
