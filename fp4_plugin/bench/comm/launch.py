"""Ranks on this machine: started together, ended together, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import fp4_plugin
from fp4_plugin.bench.comm import worker
from fp4_plugin.bench.comm.measure import Measured
from fp4_plugin.bench.comm.settings import CommOptions
from fp4_plugin.errors import CommunicationError, UnsupportedError

__all__ = ["require_gloo", "run_ranks"]

_WORKER = worker.__name__
_POLL_S = 0.05
_TAIL_CHARACTERS = 2000


def require_gloo() -> None:
    """Raise UnsupportedError where this torch cannot run ranks on a CPU."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnsupportedError(
            "fp4 bench comm needs torch.distributed with gloo, and this torch was built without: "
            "install torch from pip"
        )


def run_ranks(options: CommOptions, num_ranks: int) -> list[Measured]:
    """Everything that `num_ranks` ranks measure. No process is left when this returns or raises.

    Raises CommunicationError if a rank fails, or if they do not finish in time.
    """
    with tempfile.TemporaryDirectory(prefix="fp4_bench_comm_") as name:
        folder = Path(name)
        (folder / worker.OPTIONS_NAME).write_text(options.to_json(), encoding="utf-8")
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                ranks.append(_start(folder, rank, num_ranks))
            _wait(folder, ranks, options.timeout_minutes)
        finally:
            for process in ranks:
                _stop(process)
        records = json.loads((folder / worker.RESULTS_NAME).read_text(encoding="utf-8"))
    return [Measured.from_record(record) for record in records]


def _start(folder: Path, rank: int, num_ranks: int) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    package = str(Path(fp4_plugin.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / f"stderr_{rank}.txt").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(folder), str(rank), str(num_ranks)],
            # A rank ends when this pipe does, even if this process is killed.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Rank 0 draws its progress bar.
            stderr=None if rank == 0 and sys.stderr.isatty() else stderr,
            env={"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            # Ctrl-C comes to this process alone, which ends the ranks.
            start_new_session=True,
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _wait(folder: Path, ranks: Sequence[subprocess.Popen[bytes]], timeout_minutes: float) -> None:
    deadline = time.monotonic() + 60 * timeout_minutes
    while True:
        codes = [process.poll() for process in ranks]  # None: still running
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise CommunicationError(_failure(folder, ranks, failed[0]))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"{len(ranks)} ranks did not finish within {timeout_minutes:g} minutes: give fewer "
                "--sizes or --rounds, or a longer --timeout-minutes"
            )
        time.sleep(_POLL_S)


def _failure(folder: Path, ranks: Sequence[subprocess.Popen[bytes]], rank: int) -> str:
    """What to say about the rank that failed first."""
    code = ranks[rank].returncode
    if code < 0:
        hint = " (out of memory? give smaller --sizes)" if -code == signal.SIGKILL else ""
        return f"rank {rank} of {len(ranks)} was killed by signal {-code}{hint}"
    for name in (worker.ERROR_NAME.format(rank=rank), f"stderr_{rank}.txt"):
        path = folder / name
        if path.exists() and (text := path.read_text(errors="replace").strip()):
            return f"rank {rank} of {len(ranks)} failed: {text[-_TAIL_CHARACTERS:]}"
    return f"rank {rank} of {len(ranks)} failed with exit code {code}"
