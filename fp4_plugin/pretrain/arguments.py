"""The command line of `fp4 pretrain` and of `python -m fp4_plugin.pretrain`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.presets import PRESETS

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "options_from"]

DESCRIPTION = """\
Pre-train a LLaMA with DeepSpeed in FP4: one JSON, one command. Without any flag it trains the
`tiny` preset for 100 steps on the source text of Python's standard library, on every GPU of this
machine or on two CPU ranks, under ZeRO-2 with  "fp4": {"recipe": "paper"}.
"""

EPILOG = """\
examples:
  fp4 pretrain --twin                          FP4 beside BF16: loss table, curves.png, manifest
  fp4 pretrain --data notes/ --steps 500       your own text: a file, a folder, JSONL, Megatron .bin
  fp4 pretrain --recipe w4a4_tensor --twin     another arm of the paper's ablation
  fp4 pretrain --preset 1.3b --config ds.json --nproc 64 --dry-run
                                               parameters, bytes per device, steps; trains nothing
  torchrun --nproc-per-node 8 -m fp4_plugin.pretrain --preset 1.3b --config ds.json
  deepspeed --module fp4_plugin.pretrain --preset 7b --zero-stage 3
                                               under a launcher, on any number of nodes

being interrupted:
  fp4 pretrain --save-interval 500 --keep 3 --resume latest
                                               the command of a job that may be stopped at any time
  SIGTERM, SIGUSR1                             the ranks finish the step, save together, exit with 0
  torchrun --max-restarts 2 ..., Slurm --requeue
                                               a restarted job resumes by itself
  A resumed run has the losses of one that was never stopped, bit for bit; other data, seed, batch
  layout, schedule or optimizer settings are refused by name.

what it leaves in --output:
  losses.csv report.md report.json report.csv  the course of the loss, the table
  curves.png                                   both curves (--twin)
  fp4_manifest.json                            per layer and GEMM: what was asked, what ran
  ds_config.json                               the complete DeepSpeed configuration that was used
  export/                                      safetensors + tokenizer for plain transformers
  monitor/                                     DeepSpeed's CSV files and TensorBoard events
  checkpoints/ checkpoints_bf16_twin/          what --resume takes

A flag beats the JSON of --config, the JSON beats the preset. Exit codes: 0 fine, or stopped
by a signal and saved; 2 wrong input, a loss that is not finite, layers that did not run as planned,
a checkpoint that cannot be written or used, or a missing artefact.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag; what is not given stays None or the default of PretrainOptions."""
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_run(parser.add_argument_group("run"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))


def options_from(arguments: argparse.Namespace) -> PretrainOptions:
    """The options in `arguments`. Raises ConfigError for values out of range."""
    return PretrainOptions(
        **{field.name: getattr(arguments, field.name) for field in fields(PretrainOptions)}
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", default="tiny", metavar="NAME",
        help=f"model size and the settings that go with it: {', '.join(PRESETS)} (default: tiny)",
    )  # fmt: skip
    group.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence")
    group.add_argument(
        "--vocab-size", type=int, metavar="N",
        help="rows of the embedding; at least the ids of the tokenizer",
    )  # fmt: skip
    group.add_argument(
        "--activation-checkpointing", action="store_true",
        help="recompute activations in the backward pass: less memory, about a third more time",
    )  # fmt: skip


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", type=Path, metavar="PATH",
        help="a text file, a .jsonl file with a \"text\" field, a folder of both, or a Megatron "
        ".bin/.idx pair (default: Python's standard library)",
    )  # fmt: skip
    group.add_argument(
        "--eval-data", type=Path, metavar="PATH",
        help="held-out text, same forms (default: one document in 20, or the last 5 %%)",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer", metavar="PATH_OR_NAME",
        help="a Hugging Face tokenizer (default: bytes, which needs no file)",
    )  # fmt: skip
    group.add_argument(
        "--cache-dir", type=Path, metavar="DIR",
        help="where tokenised text is kept (default: ~/.cache/fp4-plugin/tokens)",
    )  # fmt: skip


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config", type=Path, metavar="JSON",
        help='DeepSpeed configuration with its "fp4" section (default: built in)',
    )  # fmt: skip
    group.add_argument("--recipe", metavar="NAME", help='sets "recipe" in the "fp4" section')
    group.add_argument("--zero-stage", type=int, choices=range(4), help="sets the ZeRO stage")
    group.add_argument("--steps", type=int, metavar="N", help="optimiser steps")
    group.add_argument("--tokens", type=int, metavar="N", help="length of the run in tokens")
    group.add_argument("--micro-batch", type=int, metavar="N", help="sequences per rank at once")
    group.add_argument("--grad-accum", type=int, metavar="N", help="micro batches per step")
    group.add_argument("--lr", type=float, metavar="RATE", help="peak learning rate")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and order")


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nproc", type=int, metavar="N",
        help="ranks to start on this machine (default: one per GPU, else two); a launcher decides "
        "for itself",
    )  # fmt: skip
    group.add_argument(
        "--output", type=Path, default=PretrainOptions.output, metavar="DIR",
        help=f"folder for everything the run leaves (default: {PretrainOptions.output})",
    )  # fmt: skip
    group.add_argument(
        "--twin", action="store_true",
        help="then train the same job with the bf16 recipe, and compare",
    )  # fmt: skip
    group.add_argument(
        "--no-export", dest="export", action="store_false", help="leave out the Hugging Face export"
    )
    group.add_argument("--tensorboard", action="store_true", help="write TensorBoard events too")
    group.add_argument(
        "--eval-interval", type=int, metavar="N",
        help="evaluate every N steps (default: at the end only)",
    )  # fmt: skip
    group.add_argument(
        "--eval-sequences", type=int, metavar="N", default=PretrainOptions.eval_sequences,
        help=f"held-out sequences per evaluation (default: {PretrainOptions.eval_sequences})",
    )  # fmt: skip
    group.add_argument(
        "--log-interval", type=int, metavar="N", default=PretrainOptions.log_interval,
        help="without a terminal: print a line every N steps "
        f"(default: {PretrainOptions.log_interval})",
    )  # fmt: skip
    group.add_argument(
        "--timeout-minutes", type=float, metavar="M", default=PretrainOptions.timeout_minutes,
        help="a collective that takes longer fails, so that no job hangs for ever "
        f"(default: {PretrainOptions.timeout_minutes:g})",
    )  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true", help="print sizes and steps; start nothing"
    )
    # The deepspeed launcher passes this to every rank; the environment says the same.
    group.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save-interval", type=int, metavar="N",
        help="save a checkpoint every N optimiser steps and after the last one "
        "(default: only when a signal asks the job to leave)",
    )  # fmt: skip
    group.add_argument(
        "--keep", type=int, metavar="N",
        help="keep the last N checkpoints, remove older ones after each save (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--resume", metavar="WHAT",
        help="go on from a checkpoint: 'latest' (the newest good one in --output; from the start "
        "where there is none yet, so that a job script can always say it), a tag "
        "(global_step500), or the path of a checkpoint or of a folder of them",
    )  # fmt: skip
