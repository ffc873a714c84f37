"""One rank of a job that `fp4 pretrain` launched: `python -m fp4_plugin.pretrain.worker FILE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fp4_plugin.errors import Fp4Error
from fp4_plugin.pretrain.engine import PeerError
from fp4_plugin.pretrain.local_ranks import end_with_launcher
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.run import run_rank

__all__ = ["main", "report_error"]


def main(options_file: str) -> int:
    """Run the job described in `options_file`; 0, or 2 after one line on stderr."""
    end_with_launcher()
    try:
        run_rank(PretrainOptions.from_json(Path(options_file).read_text(encoding="utf-8")))
    except Fp4Error as error:
        return report_error(error)
    except KeyboardInterrupt:
        return 130
    return 0


def report_error(error: Fp4Error) -> int:
    """One line on stderr that names the rank, unless it is the first; returns the exit code 2."""
    if isinstance(error, PeerError):
        return 2
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"[rank {rank}] "
    print(f"fp4: error: {where}{error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
