"""Ranks that die, stop, or reduce something else: an error within the timeout, never a sum."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fp4_plugin import comm
from fp4_plugin.errors import CommunicationError
from tests.distributed import ROOT, free_port, rank_environment

pytestmark = [pytest.mark.distributed, pytest.mark.timed]

TIMEOUT_S = 3.0
# Ranks notice when the timeout has passed; the rest is for a machine that is busy.
MARGIN_S = 12.0
# With one element more, messages have the same length after padding.
NUMEL = 19_990


def _series(folder: str) -> None:
    """Reductions until one fails."""
    _initialize(folder)
    sums, error, started = 0, "", time.monotonic()
    try:
        while True:
            started = time.monotonic()
            comm.all_reduce(torch.ones(NUMEL))
            sums += 1
    except CommunicationError as caught:
        error = str(caught)
    _write(folder, {"sums": sums, "error": error, "waited_s": time.monotonic() - started})
    # The others have to notice by themselves: keep the connections open.
    time.sleep(60)


def _mismatches(folder: str) -> None:
    """What two ranks may do differently although they have agreed before; the worst comes last."""
    rank, found = _initialize(folder, 30.0), {}
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    groups = {name: dist.new_group([0, 1], timeout=timeout) for name in MISMATCHES}
    for name, (numel, _) in MISMATCHES.items():
        for known in (NUMEL, numel):
            comm.all_reduce(torch.ones(known), groups[name])
    for name, (numel, block_size) in MISMATCHES.items():
        dist.barrier()
        started = time.monotonic()
        try:
            mine = torch.ones(numel if rank == 1 else NUMEL)
            comm.all_reduce(mine, groups[name], block_size=block_size if rank == 1 else 1024)
            error = ""
        except CommunicationError as caught:
            error = str(caught)
        found[name] = {"error": error, "waited_s": time.monotonic() - started}
        _write(folder, found)
    time.sleep(60)


def _late_limit(folder: str) -> None:
    """As DeepSpeed's groups: made without a limit, and given that of the job afterwards."""
    rank = _initialize(folder, 60.0)
    group = dist.new_group([0, 1])
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)
    comm.all_reduce(torch.ones(NUMEL), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    started, error = time.monotonic(), ""
    try:
        comm.all_reduce(torch.ones(NUMEL), group)
    except CommunicationError as caught:
        error = str(caught)
    _write(folder, {"error": error, "waited_s": time.monotonic() - started})
    time.sleep(60)


# Name -> elements and block size on rank 1; rank 0 keeps to NUMEL and 1024.
MISMATCHES = {"block size": (NUMEL, 512), "one more": (NUMEL + 1, 1024), "twice": (2 * NUMEL, 1024)}


def _initialize(folder: str, timeout_s: float = TIMEOUT_S) -> int:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    Path(folder, f"ready_{dist.get_rank()}").touch()
    return dist.get_rank()


def _write(folder: str, seen: object) -> None:
    path = Path(folder, f"seen_{dist.get_rank()}")
    path.with_suffix(".new").write_text(json.dumps(seen))
    path.with_suffix(".new").replace(path)


class Scene:
    """Real ranks in one folder, and the signals that befall them."""

    def __init__(self, folder: Path, function: Callable[[str], None], num_ranks: int) -> None:
        self.folder = folder
        port = free_port()
        name = function.__name__
        code = f"from tests.comm.test_faults import {name}; {name}({str(folder)!r})"
        self.ranks = []
        for rank in range(num_ranks):
            with Path(folder, f"stderr_{rank}").open("wb") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    env=rank_environment(rank, num_ranks, port, str(folder)),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                )
            self.ranks.append(process)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < limit_s, self.stderr()
            time.sleep(0.02)
        return time.monotonic() - start

    def start(self) -> None:
        paths = [self.folder / f"ready_{rank}" for rank in range(len(self.ranks))]
        self.until(lambda: all(path.exists() for path in paths), 60)
        time.sleep(0.5)  # into the series

    def send(self, rank: int, what: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, what)

    def wait_for(self, ranks: list[int], limit_s: float) -> dict[int, dict]:
        """What these ranks have written, once all have."""
        paths = {rank: self.folder / f"seen_{rank}" for rank in ranks}
        self.until(lambda: all(path.exists() for path in paths.values()), limit_s)
        return {rank: json.loads(path.read_text()) for rank, path in paths.items()}

    def stderr(self) -> str:
        files = sorted(self.folder.glob("stderr_*"))
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_gone_is_an_error_on_the_others_within_the_timeout(tmp_path, what):
    with Scene(tmp_path, _series, 3) as scene:
        scene.start()
        scene.send(1, what)
        seen = scene.wait_for([0, 2], TIMEOUT_S + MARGIN_S)
    for rank, one in seen.items():
        assert one["sums"] > 0
        assert f"failed on rank {rank} (of ranks [0, 1, 2])" in one["error"]
        assert "look at the first rank that failed" in one["error"]
        assert one["waited_s"] < TIMEOUT_S + MARGIN_S / 2
        print(f"\nrank {rank}: {one['waited_s']:.2f} s, timeout {TIMEOUT_S} s")


def test_a_limit_that_a_group_was_given_later_holds(tmp_path):
    with Scene(tmp_path, _late_limit, 2) as scene:
        seen = scene.wait_for([0], 60 + TIMEOUT_S + MARGIN_S)[0]
    assert "failed on rank 0" in seen["error"]
    assert seen["waited_s"] < TIMEOUT_S + MARGIN_S / 2


@pytest.fixture(scope="module")
def mismatches(tmp_path_factory):
    """(what rank 0 and rank 1 saw, the return code of rank 0, stderr)."""
    folder = tmp_path_factory.mktemp("mismatches")
    with Scene(folder, _mismatches, 2) as scene:
        scene.until(lambda: "twice" in scene.wait_for([1], 60)[1], 60)
        scene.until(lambda: scene.ranks[0].poll() is not None, 30)
        seen = scene.wait_for([0, 1], 1)
        return seen[0], seen[1], scene.ranks[0].returncode, scene.stderr()


def test_a_codec_that_changes_on_one_rank_only_is_an_error_and_no_sum(mismatches):
    """One rank asks the others to agree, the other knows no reason to: both wait in vain."""
    for rank in (0, 1):
        one = mismatches[rank]["block size"]
        assert f"failed on rank {rank}" in one["error"]
        assert one["waited_s"] < TIMEOUT_S + MARGIN_S / 2


def test_known_sizes_that_differ_by_little_are_an_error_that_names_both(mismatches):
    """The header tells the owner of the last share. The other rank waits in vain."""
    waiting, owner = (mismatches[rank]["one more"]["error"] for rank in (0, 1))
    assert "failed on rank 0" in waiting and "tensors of different sizes" in waiting
    assert "number of elements 9990 instead of 9991" in owner


def test_known_sizes_that_differ_by_much_never_give_a_sum(mismatches):
    """gloo aborts a process that gets more than it waits for.

    The other one sees the wrong header, or the first one gone, whatever comes first.
    """
    aborted, other, returncode, stderr = mismatches
    assert "twice" not in aborted and returncode == -signal.SIGABRT
    assert "Received data size doesn't match expected size" in stderr
    assert re.search(
        "failed on rank 1|number of elements 9990 instead of 19980", other["twice"]["error"]
    )
