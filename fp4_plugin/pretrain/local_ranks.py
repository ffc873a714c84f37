"""The ranks of `fp4 pretrain` on this machine: started and signalled together, none left over.

SIGTERM, SIGUSR1     passed on as SIGUSR1: the ranks save and leave, and this process after them
SIGTERM again        ends this process, and with it, at once, the ranks
Ctrl-C               the ranks get it from the terminal; those that do not leave are killed
a rank fails         the others have a moment to say what they saw, then they are killed
this process dies    the kernel kills the ranks (Linux): `end_with_launcher`
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from fp4_plugin.checkpoint import Preemption

__all__ = ["RankFailure", "end_with_launcher", "run_local_ranks"]

_POLL_SECONDS = 0.1
_LAST_WORDS_SECONDS = 3.0
_STORE_TIMEOUT = timedelta(minutes=5)
_LAUNCHER = "FP4_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


class RankFailure(Exception):
    """The rank that failed first, and its exit code: negative for the signal that killed it."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} ended with {exit_code}")
        self.rank = rank
        self.exit_code = exit_code


def run_local_ranks(command: Sequence[str], num_ranks: int) -> None:
    """Run `command` once per rank with the environment torchrun would set, until all have ended.

    Raises RankFailure, or KeyboardInterrupt; no rank runs any more when it returns or raises.
    """
    import torch.distributed as dist

    # Here, on a port that the system chooses: no rank has to find a free one, or leave last.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT
    )
    processes: list[subprocess.Popen[bytes]] = []
    with Preemption() as preemption:
        try:
            for rank in range(num_ranks):
                environment = os.environ | _environment(rank, num_ranks, store.port)
                processes.append(subprocess.Popen(list(command), env=environment))
            _watch(processes, preemption)
        except (KeyboardInterrupt, RankFailure):
            _wait(processes, time.monotonic() + _LAST_WORDS_SECONDS)
            raise
        finally:
            for process in processes:
                process.kill()  # nothing, where it has ended
                process.wait()


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is not rank 0's, but its launcher's; torch then asks for the attempt as well.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        _LAUNCHER: str(os.getpid()),
    }


def _watch(processes: Sequence[subprocess.Popen[bytes]], preemption: Preemption) -> None:
    """Until all have ended with 0. Raises RankFailure for the first that has not."""
    is_passed_on = False
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RankFailure(rank, code)
        if None not in codes:
            return
        if preemption.requested and not is_passed_on:
            is_passed_on = True
            print(f"fp4: {preemption.received}: saving, then leaving", file=sys.stderr, flush=True)
            for process in processes:
                # Never SIGTERM: a rank may have had one already, and a second one means "at once".
                process.send_signal(signal.SIGUSR1)
        time.sleep(_POLL_SECONDS)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended, or the deadline."""
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))


def end_with_launcher() -> None:
    """In a rank: be killed when the process that started it ends, however that came about.

    Without this a launcher that is killed with SIGKILL leaves its ranks training. Linux only; does
    nothing elsewhere, and nothing in a rank of another launcher.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)
