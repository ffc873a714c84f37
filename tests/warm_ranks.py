"""Ranks that need not import torch, DeepSpeed and transformers: forks of a process that has.

    run_ranks(my_function, warm="deepspeed")    # see tests/distributed.py

These imports take about seven seconds of one core, for each of some fifty ranks. Here one process
per rank number makes them once and is then forked, which is sound as long as it does nothing else:
it has no thread and no process group, and its environment is that of a rank of its number. Ranks of
different numbers are forks of different processes, so that they differ in what an interpreter
chooses when it starts, such as the order of sets.

Fresh interpreters are for tests of commands, and of what happens while something is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["WARM", "WarmRank", "prepare"]

ROOT = Path(__file__).resolve().parent.parent
# What a rank would import, fp4_plugin first, down to what DeepSpeed's first engine asks for.
WARM = {
    "torch": ("fp4_plugin",),
    "deepspeed": (
        "fp4_plugin",
        "tests.integrations.training",
        "deepspeed",
        "transformers.models.llama.modeling_llama",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
    "megatron": (
        "fp4_plugin",
        "deepspeed",
        "megatron.core.distributed",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.optimizer",
    ),
}
_NOT_IN_EVERY_RELEASE = {"deepspeed.runtime.zero.muon.muon_optimizer"}


def prepare(kind: str, environments: Sequence[Mapping[str, str]]) -> None:
    """Return once all imports of ranks with these environments are made, several at a time.

    Before a port is chosen, then: it would be free for somebody else for as long as they take.
    """
    parents = [_parent(kind, environment) for environment in environments]
    for parent in parents:
        parent.wait_until_ready()


class WarmRank:
    """One forked rank in a process group of its own: what `subprocess.Popen` is to a fresh one."""

    def __init__(
        self,
        kind: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
    ) -> None:
        """`kind` is a key of WARM, `arguments` are those of tests.distributed.call."""
        self._parent = _parent(kind, environment)
        self._parent.wait_until_ready()
        self._parent.ask([list(arguments), dict(environment), str(stdout), str(stderr)])
        self._answers: list[int] = []

    @property
    def pid(self) -> int:
        if not self._answers:
            self._hear()
        return self._answers[0]

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        while len(self._answers) < 2 and self._parent.has_answered():
            self._hear()
        return self._answers[1] if len(self._answers) == 2 else None

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code. Raises TimeoutError if it is not there in time."""
        if not self._answers:
            self._hear()
        if len(self._answers) < 2:
            if not self._parent.has_answered(timeout_s):
                raise TimeoutError(f"process {self.pid} did not end within {timeout_s} s")
            self._hear()
        return self._answers[1]

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _hear(self) -> None:
        self._answers.append(self._parent.answer())
        self._parent.is_free = len(self._answers) == 2


class _Parent:
    """The process that is forked. It has one rank at a time, and ends when this process does."""

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        self.is_free = True
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_ranks", kind],
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer in a buffer is one that `has_answered` does not see
            start_new_session=True,
        )
        atexit.register(self.stop)

    def wait_until_ready(self) -> None:
        if not self._is_ready:
            self.answer()
            self._is_ready = True

    def ask(self, request: object) -> None:
        """Start a rank. The answers are its process id, at once, and its exit code, in the end."""
        self.is_free = False
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def has_answered(self, timeout_s: float | None = 0.0) -> bool:
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks ranks has ended, and said why on stderr"
        return int(line)

    def stop(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()


_PARENTS: dict[tuple[str, str], _Parent] = {}


def _parent(kind: str, environment: Mapping[str, str]) -> _Parent:
    """The one of this rank number; another one where a test was interrupted while it had a rank."""
    key = kind, environment["RANK"]
    if key in _PARENTS and not _PARENTS[key].is_free:
        _PARENTS.pop(key).stop()
    if key not in _PARENTS:
        _PARENTS[key] = _Parent(kind, environment)
    return _PARENTS[key]


def _fork_on_request(kind: str, run: Callable[..., None]) -> None:
    """For each line of stdin a rank that calls `run`; says its process id, then its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    for name in WARM[kind]:
        allowed = ImportError if name in _NOT_IN_EVERY_RELEASE else ()
        with contextlib.suppress(allowed):
            importlib.import_module(name)
    print(0, file=answers, flush=True)  # ready
    gc.freeze()  # what is imported is no garbage: no rank need look through it
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "threads would be missing in a fork"
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become_rank(run, *json.loads(line))
        with contextlib.suppress(OSError):  # the rank does so too: whoever comes first
            os.setpgid(pid, pid)
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become_rank(
    run: Callable[..., None],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdout: str,
    stderr: str,
) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        written = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # both may be one file
        _redirect(0, os.devnull, os.O_RDONLY)
        _redirect(1, stdout, written)
        _redirect(2, stderr, written)
        os.environ.clear()
        os.environ.update(environment)
        _draw_seeds()
        run(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _draw_seeds() -> None:
    """As a fresh interpreter does; Python's own generator has done so when it was forked."""
    import numpy
    import torch

    torch.seed()
    numpy.random.seed()


def _redirect(number: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, number)
    os.close(opened)


if __name__ == "__main__":
    from tests.distributed import call

    _fork_on_request(sys.argv[1], call)
