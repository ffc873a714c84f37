"""From the user's process to the ranks: as one of them, or by starting them on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.artifacts import RunFolder
from fp4_plugin.pretrain.checkpoints import resume_requests, was_restarted
from fp4_plugin.pretrain.curves import require_matplotlib
from fp4_plugin.pretrain.engine import require_deepspeed
from fp4_plugin.pretrain.job import job_shape, prepare_job
from fp4_plugin.pretrain.local_ranks import RankFailure, run_local_ranks
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.phase import require_resumable
from fp4_plugin.pretrain.quiet import set_up_logging
from fp4_plugin.pretrain.run import run_rank

__all__ = ["start"]

WORKER = "fp4_plugin.pretrain.worker"
SIGNALLED = 128  # plus the signal's number: the exit code that shells use
MAX_CPU_RANKS = 2  # more would only share the same cores


def start(options: PretrainOptions) -> int:
    """What `fp4 pretrain` does; returns the exit code. Raises Fp4Error on bad input."""
    set_up_logging()
    require_deepspeed()
    if options.twin:
        require_matplotlib()
    if options.dry_run:
        print("\n".join(job_shape(options, _world_size(options)).sizes().lines()))
        return 0
    if _is_launched():
        run_rank(options)
        return 0
    nproc = _num_processes(options.nproc)
    # What is wrong with the job shows here, once, before any rank starts.
    job, folder = prepare_job(options, nproc), RunFolder(options.output)
    requests = resume_requests(options.resume, restarted=was_restarted(os.environ))
    require_resumable(job, folder.checkpoints, requests)
    folder.prepare(options.inputs, resuming=bool(requests))
    folder.write_options(options)
    return _launch(folder.options, nproc)


def _is_launched() -> bool:
    """Whether torchrun, the deepspeed launcher or the like started this process as one rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _world_size(options: PretrainOptions) -> int:
    """Ranks of a dry run: those of the launcher, or as many as asked for, here or elsewhere."""
    if _is_launched():
        return int(os.environ["WORLD_SIZE"])
    return options.nproc or _num_processes(None)


def _num_processes(requested: int | None) -> int:
    """Ranks to start: as requested, else one per accelerator, else up to two on the CPU."""
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if requested is None:
        return devices or min(MAX_CPU_RANKS, os.cpu_count() or 1)
    if devices and requested > devices:
        raise ConfigError(
            f"--nproc {requested}: this machine has {devices} accelerator(s); leave --nproc out"
        )
    return requested


def _launch(options_file: Path, nproc: int) -> int:
    """Run the worker on `nproc` ranks of this machine; returns the exit code."""
    # All cores over all ranks: without this, each rank would take all of them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    sys.stdout.flush()
    try:
        run_local_ranks([sys.executable, "-m", WORKER, str(options_file)], nproc)
    except RankFailure as failure:
        return _exit_code(failure.rank, failure.exit_code)
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    return 0


def _exit_code(rank: int, code: int) -> int:
    """Ours for that of the rank which failed first; a rank that ran into an error has said so."""
    if code >= 0:
        return code
    hints: dict[int, str] = {
        signal.SIGKILL: "; out of memory?",
        signal.SIGUSR1: ": the job was told to leave before it began, there was nothing to save",
    }
    hint = hints.get(-code, "")
    print(f"fp4: error: rank {rank} was killed by signal {-code}{hint}", file=sys.stderr)
    return SIGNALLED - code
