"""`fp4 pretrain`: train a LLaMA in FP4, alone or beside its BF16 twin."""

from __future__ import annotations

import argparse
from typing import Any

from fp4_plugin.pretrain.arguments import DESCRIPTION, EPILOG, add_arguments, options_from

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pretrain",
        help="train a LLaMA in FP4 from presets, text and one DeepSpeed JSON",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the job. Raises Fp4Error on bad input."""
    options = options_from(arguments)
    from fp4_plugin.pretrain.launch import start  # transformers, which --help must not load

    return start(options)
