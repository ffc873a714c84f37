"""Run a function, or a command, on N gloo ranks of this machine, with an end that always comes.

    results = run_ranks(my_function, {"stage": 2}, num_ranks=2)    # one JSON value per rank

Each rank is a fresh interpreter, or the fork of one that has done nothing but import
(tests/warm_ranks.py). It has its own torch-extension directory (a killed build leaves a lock there
that blocks the next one for ever) and a free port. A rank that fails or outlives the timeout takes
the others with it, and its stderr becomes the error message.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.warm_ranks import WarmRank, prepare

__all__ = [
    "RankFailure",
    "allow_fp16_on_cpu",
    "call",
    "free_port",
    "initialize_distributed",
    "rank_environment",
    "run_command",
    "run_ranks",
    "started_ranks",
]

ROOT = Path(__file__).resolve().parent.parent
_TAIL_CHARACTERS = 6000
_RESULT_NAME = "result_{rank}.json"


class RankFailure(AssertionError):
    """A rank failed or did not finish in time; carries the stderr of each failed rank."""


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    num_ranks: int = 2,
    timeout_s: float = 240.0,
    warm: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """`function(*arguments)` on every rank; returns what each returned, in rank order.

    `function` is defined at the top level of a file, `arguments` and its result are JSON. The
    process group is not initialised yet when it starts: see `initialize_distributed`. With `warm`,
    a key of WARM, the rank has imported that already: see tests/warm_ranks.py. `environment`: more
    variables, for fresh interpreters.
    """
    assert warm is None or environment is None, "what is imported has read its variables"
    if warm is not None:
        prepare(warm, [rank_environment(rank, num_ranks, 0, "") for rank in range(num_ranks)])
    with tempfile.TemporaryDirectory(prefix="fp4_ranks_") as folder:
        what = _call_of(function, arguments, folder)
        if warm is None:
            command = [sys.executable, __file__, *what]
            run_command(command, num_ranks=num_ranks, timeout_s=timeout_s, environment=environment)
        else:
            _run(partial(WarmRank, warm, what), num_ranks, timeout_s)
        return [
            json.loads((Path(folder) / _RESULT_NAME.format(rank=rank)).read_text())
            for rank in range(num_ranks)
        ]


@contextlib.contextmanager
def started_ranks(
    function: Callable[..., Any], *arguments: Any, warm: str, logs: Path, num_ranks: int = 2
) -> Iterator[list[WarmRank]]:
    """`function(*arguments)` under way on every rank, which may die; killed in the end.

    What rank r prints goes to `logs`/rank{r}.log.
    """
    prepare(warm, [rank_environment(rank, num_ranks, 0, str(logs)) for rank in range(num_ranks)])
    port = free_port()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            log = logs / f"rank{rank}.log"
            what = _call_of(function, arguments, str(logs))
            variables = rank_environment(rank, num_ranks, port, str(logs))
            ranks.append(WarmRank(warm, what, variables, log, log))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        yield ranks


def run_command(
    command: Sequence[str],
    *,
    num_ranks: int = 1,
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> list[str]:
    """Run `command` once per rank with the environment torchrun would set; returns each stdout.

    Raises RankFailure with the output of every rank that failed, or of all ranks on a timeout.
    """
    return _run(partial(_start_fresh, command, cwd), num_ranks, timeout_s, environment or {})


# Starts a process in a process group of its own: (its environment, its stdout, its stderr).
_Start = Callable[[Mapping[str, str], Path, Path], "subprocess.Popen[bytes] | WarmRank"]


def _start_fresh(
    command: Sequence[str], cwd: Path, variables: Mapping[str, str], stdout: Path, stderr: Path
) -> subprocess.Popen[bytes]:
    with stdout.open("wb") as output, stderr.open("wb") as errors:
        return subprocess.Popen(
            list(command),
            env=dict(variables),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def _run(
    start: _Start, num_ranks: int, timeout_s: float, environment: Mapping[str, str] | None = None
) -> list[str]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fp4_command_") as folder:
        ranks = []
        with contextlib.ExitStack() as started:
            for rank in range(num_ranks):
                variables = rank_environment(rank, num_ranks, port, folder)
                ranks.append(_Rank(start, variables | dict(environment or {}), Path(folder)))
                started.callback(ranks[-1].stop)
            _wait(ranks, time.monotonic() + timeout_s)
        return [rank.output() for rank in ranks]


class _Rank:
    """One process, in its own process group, whose output goes to files in `folder`."""

    def __init__(self, start: _Start, variables: Mapping[str, str], folder: Path) -> None:
        self.name = f"rank {variables['RANK']}"
        self._stdout = folder / f"stdout_{variables['RANK']}"
        self._stderr = folder / f"stderr_{variables['RANK']}"
        self._process = start(variables, self._stdout, self._stderr)

    def returncode(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """End the process and its children, if they still run."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        return _written(self._stdout)

    def report(self, state: str) -> str:
        stdout, stderr = self.output(), _written(self._stderr)
        return (
            f"--- {self.name} {state}:\n{stdout[-_TAIL_CHARACTERS:]}\n{stderr[-_TAIL_CHARACTERS:]}"
        )


def _written(path: Path) -> str:
    """What a rank has written; nothing if it was ended before it began."""
    return path.read_text(errors="replace") if path.exists() else ""


def _wait(ranks: Sequence[_Rank], deadline: float) -> None:
    while any(rank.returncode() is None for rank in ranks):
        failed = any(rank.returncode() not in (None, 0) for rank in ranks)
        if failed or time.monotonic() > deadline:
            # The others notice a lost peer within moments and say which call they were in.
            time.sleep(1.0 if failed else 0.0)
            break
        time.sleep(0.05)
    reports = [
        rank.report("did not finish" if rank.returncode() is None else f"exit {rank.returncode()}")
        for rank in ranks
        if rank.returncode() != 0
    ]
    if reports:
        raise RankFailure("\n".join(reports))


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, num_ranks: int, port: int, extensions: str) -> dict[str, str]:
    """The environment of one rank: what torchrun sets, CPU only, offline, finite timeouts."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_TIMEOUT": "2",  # minutes
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": extensions,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def initialize_distributed() -> None:
    """Initialise DeepSpeed's process group on gloo, without compiling its shared-memory op.

    That op serves inference only, and building it takes from seconds to minutes.
    """
    # DeepSpeed calls collectives by names that torch 2.13 is about to drop, in every step.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    import deepspeed
    import torch
    from deepspeed.comm.torch import TorchBackend

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed <= 0.18 gathers ZeRO-1/2's parameters into a buffer that has a gradient history;
    # gloo of torch 2.13 writes it through views and refuses that while gradients are recorded.
    TorchBackend.all_gather_into_tensor = torch.no_grad()(TorchBackend.all_gather_into_tensor)
    deepspeed.init_distributed("gloo", verbose=False)


def allow_fp16_on_cpu() -> None:
    """Let DeepSpeed train in fp16 on a CPU that computes it in software.

    The accelerator refuses fp16 where oneDNN has no fast kernel for it; torch computes it anyway.
    """
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def _call_of(function: Callable[..., Any], arguments: Sequence[Any], folder: str) -> list[str]:
    """The arguments of `call`."""
    file = Path(function.__code__.co_filename).resolve()
    return [str(file), function.__qualname__, json.dumps(arguments), folder]


def call(file: str, name: str, arguments: str, folder: str) -> None:
    """What a rank runs: import `file`, call `name(*arguments)`, write the result."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    result = getattr(module, name)(*json.loads(arguments))
    path = Path(folder) / _RESULT_NAME.format(rank=os.environ["RANK"])
    path.write_text(json.dumps(result))
    _leave()


def _leave() -> None:
    """End the process once every rank has finished, without tearing gloo down.

    gloo's teardown aborts a process now and then when a peer has closed its sockets first. The
    result is on disk by now, so nothing is left to tear down for. The ranks meet at the store, and
    rank 0, which hosts it, leaves last.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        num_left = store.add("left", 1)
        while dist.get_rank() == 0 and num_left < dist.get_world_size():
            time.sleep(0.01)
            num_left = store.add("left", 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    call(*sys.argv[1:])
