"""`python -m fp4_plugin.pretrain`: the job for launchers, with the flags of `fp4 pretrain`."""

from __future__ import annotations

import argparse
import sys

from fp4_plugin.errors import Fp4Error
from fp4_plugin.pretrain.arguments import DESCRIPTION, EPILOG, add_arguments, options_from
from fp4_plugin.pretrain.launch import start
from fp4_plugin.pretrain.worker import report_error

__all__ = ["main"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fp4_plugin.pretrain",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    try:
        return start(options_from(parser.parse_args()))
    except Fp4Error as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
