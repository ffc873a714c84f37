"""`fp4 bench ablation`: its help, its flags, and the study behind them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp4_plugin.bench.ablation.arms import ARMS
from fp4_plugin.bench.ablation.settings import SMALL_SHAPE, StudyOptions
from fp4_plugin.pretrain.presets import PRESETS

__all__ = ["add_parser"]

DESCRIPTION = """\
Train a small LLaMA in BF16 and in variants of the FP4 recipe, and say which differences are real.

First BF16 chooses the learning rate: one run per rate, first seed, lowest held-out loss. Then every
arm runs at that rate on every seed (a seed decides initial weights and data order), and arms are
compared seed by seed. Two arms are told apart only if the differences of all seeds have one sign
and their mean exceeds the noise floor: what a perturbation of the initial weights by 1e-3 does to
BF16. The controls bf16, bf16_perturbed and bf16_dge_slope (BF16, weight gradients multiplied by
DGE's slope) are part of every study.
"""

EPILOG = """\
examples:
  fp4 bench ablation                             the whole study: 36 runs, 20 minutes of one core
  fp4 bench ablation --arms paper w4a4_tensor    the controls and two arms
  fp4 bench ablation --steps 10 --seeds 0 --learning-rates 4e-3 --arms paper
                                                 a try-out; the report names what it cannot say
  fp4 bench ablation --learning-rates 5e-4       no sweep: does a gap survive a lower rate?
  fp4 bench ablation --preset tiny --data notes/ --steps 1000 --jobs 32

arms:
{arms}

what it leaves in --output:
  report.md, report.json    the table, and which arms can be told apart
  runs.csv                  every run, the sweep included
  runs/*.json               one file per run with its training losses

A study that was stopped goes on where it was: a run is made again only if a setting, the text, this
package's version or torch's has changed (after editing code, use another --output). A loss that is
not finite is reported as diverged.

Read results with care: a loss below BF16 in a short run is an artefact, not a win; at a lower
learning rate it goes away (docs/ablation.md has the numbers).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    arms = "\n".join(f"  {name:<16} {ARMS[name].summary}" for name in ARMS)
    parser = subparsers.add_parser(
        "ablation",
        help="BF16 and variants of FP4 on several seeds: which differences are real",
        description=DESCRIPTION,
        epilog=EPILOG.format(arms=arms),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_study(parser.add_argument_group("study"))
    _add_model(parser.add_argument_group("model and data"))
    _add_execution(parser.add_argument_group("execution"))
    parser.set_defaults(func=_run)


def _add_study(group: argparse._ArgumentGroup) -> None:
    defaults = StudyOptions()
    group.add_argument(
        "--arms", nargs="+", default=defaults.arms, metavar="ARM",
        help="what to compare besides the controls (default: all below but w8a4 and msamp)",
    )  # fmt: skip
    group.add_argument(
        "--seeds", nargs="+", type=int, default=defaults.seeds, metavar="N",
        help=f"three or more for any statement (default: {_listed(defaults.seeds)})",
    )  # fmt: skip
    group.add_argument(
        "--learning-rates", nargs="+", type=float, default=defaults.learning_rates, metavar="RATE",
        help="peak rates that BF16 chooses from; the best should not lie at an end "
        f"(default: {_listed(defaults.learning_rates)})",
    )  # fmt: skip
    group.add_argument(
        "--steps", type=int, default=defaults.steps, metavar="N",
        help=f"optimiser steps of a run, with warm-up and cosine (default: {defaults.steps})",
    )  # fmt: skip
    group.add_argument(
        "--batch", dest="batch_sequences", type=int, default=defaults.batch_sequences, metavar="N",
        help=f"sequences per step (default: {defaults.batch_sequences}; smaller ones mislead)",
    )  # fmt: skip
    group.add_argument(
        "--held-out-sequences", type=int, default=defaults.held_out_sequences, metavar="N",
        help=f"sequences of the final evaluation (default: {defaults.held_out_sequences})",
    )  # fmt: skip


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", metavar="NAME",
        help=f"model of `fp4 pretrain`, on bytes: {', '.join(PRESETS)} (default: a smaller one, "
        f"hidden size {SMALL_SHAPE.hidden_size}, {SMALL_SHAPE.num_layers} layers, "
        f"{SMALL_SHAPE.seq_len} tokens)",
    )  # fmt: skip
    group.add_argument("--hidden", dest="hidden_size", type=int, metavar="N", help="hidden size")
    group.add_argument("--layers", dest="num_layers", type=int, metavar="N", help="decoder layers")
    group.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence")
    group.add_argument(
        "--data", type=Path, metavar="PATH",
        help="text, a folder of it, JSONL or a Megatron pair (default: Python's standard library)",
    )  # fmt: skip
    group.add_argument(
        "--cache-dir", type=Path, metavar="DIR",
        help="where tokenised text is kept (default: ~/.cache/fp4-plugin/tokens)",
    )  # fmt: skip


def _add_execution(group: argparse._ArgumentGroup) -> None:
    defaults = StudyOptions()
    group.add_argument(
        "--output", type=Path, default=defaults.output, metavar="DIR",
        help=f"folder of results and report (default: {defaults.output})",
    )  # fmt: skip
    group.add_argument(
        "--jobs", type=int, default=defaults.jobs, metavar="N",
        help="worker processes of one thread each; results do not depend on it "
        f"(default: one per core, here {defaults.jobs})",
    )  # fmt: skip


def _listed(values: Sequence[object]) -> str:
    return " ".join(str(value) for value in values)


def _run(arguments: argparse.Namespace) -> int:
    """Returns 0 once every run is done, diverged or not. Raises Fp4Error on bad input."""
    values: dict[str, Any] = {
        field.name: getattr(arguments, field.name) for field in fields(StudyOptions)
    }
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    options = StudyOptions(**values)
    from fp4_plugin.bench.ablation.report import write_report
    from fp4_plugin.bench.ablation.study import run_study

    report = write_report(run_study(options))
    print(f"\n{report.text()}\neverything is in {options.output}")
    return 0
