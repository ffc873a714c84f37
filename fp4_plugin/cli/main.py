"""`fp4`: parses the command line, runs one sub-command, and turns our errors into one line.

A sub-command module offers `add_parser(subparsers)`, which sets `func`: a function from the parsed
arguments to an exit code. Modules import frameworks inside the command that needs them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fp4_plugin import __version__
from fp4_plugin.cli import bench, config, doctor, pretrain
from fp4_plugin.errors import Fp4Error

__all__ = ["build_parser", "main"]

COMMANDS = (doctor, config, pretrain, bench)

EPILOG = """\
a first session:
  fp4 doctor                             what this machine can run, and what is in the way
  fp4 config validate ds_config.json     is the "fp4" section right, and what does it ask for
  fp4 config explain ds_config.json --layer model.layers.0.mlp.up_proj
  fp4 pretrain --preset tiny --steps 100 --twin --output runs/first
  fp4 bench --help                       measurements that take longer than a test

To train an existing DeepSpeed or Hugging Face job in FP4, add  "fp4": {"recipe": "paper"}  to its
DeepSpeed JSON and `import fp4_plugin` to its script, or change no code and launch it with
`deepspeed --module fp4_plugin.run train.py ...`.

exit codes: 0 fine, 1 a check failed, 2 wrong input (the message says what to do), 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp4",
        description="FP4 training for DeepSpeed and Hugging Face jobs from one JSON section.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fp4-plugin {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv) and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        exit_code: int = arguments.func(arguments)
        sys.stdout.flush()
    except Fp4Error as error:
        print(f"fp4: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fp4: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`fp4 config schema | head`) has gone. Python flushes stdout once more at exit,
        # which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return exit_code
