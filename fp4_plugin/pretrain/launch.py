"""From the user's process to the ranks: as one of them, or by starting them on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.artifacts import RunFolder
from fp4_plugin.pretrain.curves import require_matplotlib
from fp4_plugin.pretrain.engine import require_deepspeed
from fp4_plugin.pretrain.job import job_shape, prepare_job
from fp4_plugin.pretrain.options import PretrainOptions
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
    prepare_job(options, nproc)  # what is wrong with it shows here, once, before any rank starts
    folder = RunFolder(options.output)
    folder.prepare(options.inputs)
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
    """Run the worker on `nproc` ranks through torch.distributed.run; returns its exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # All cores over all ranks; torchrun would give each rank one thread, and a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    arguments = [f"--nproc-per-node={nproc}", "--nnodes=1", "--max-restarts=0"]
    # Port 0: the rendezvous takes a free one. The address spares a look-up of the host's name.
    arguments += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    arguments += ["--module", WORKER, str(options_file)]
    sys.stdout.flush()
    try:
        run.run(run.parse_args(arguments))
    except SignalException as error:
        return SIGNALLED + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code(rank, failure.exitcode)
    return 0


def _exit_code(rank: int, code: int) -> int:
    """Ours for that of the rank which failed first; a rank that ran into an error has said so."""
    if code >= 0:
        return code
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    print(f"fp4: error: rank {rank} was killed by signal {-code}{hint}", file=sys.stderr)
    return SIGNALLED - code
