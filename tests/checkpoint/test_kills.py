"""A save that is killed anywhere leaves a checkpoint that is found, verified and loads.

A forked process saves and is ended by SIGKILL before its n-th operation on the file system, for
every n: each open, rename, mkdir and removal that Python makes under the folder, and in the middle
of writing a file.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from fp4_plugin.checkpoint import find_folder, last_good, read_latest, verify_checkpoint
from tests.checkpoint.samples import save, seed_in
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed

_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
_OLD, _NEW, _LATER = 1, 2, 3


class _Killer:
    """Ends this process before operation number `fatal`; writes down the others."""

    def __init__(self, folder, fatal, log):
        self._folder = str(folder)
        self._fatal = fatal
        self._log = log
        self._count = 0
        sys.addaudithook(self._on_event)

    def _on_event(self, event, arguments):
        if event in _EVENTS and isinstance(arguments[0], str | Path):
            target = str(arguments[1] if event == "os.rename" else arguments[0])
            if target.startswith(self._folder):
                self.at(f"{event} {target.removeprefix(self._folder)}")

    def at(self, stage):
        if self._count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self._count += 1
        os.write(self._log, f"{stage}\n".encode())


def _killed_save(folder, tag, fatal):
    """Save `_NEW`, killed before operation `fatal`; returns the operations made, and the end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        killer = _Killer(folder, fatal, writing)
        save(folder, tag, _NEW, between=killer.at)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        made = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    return made, os.waitstatus_to_exitcode(status)


def every_kill(root):
    """{scenario: [[last operation before the kill, seed of last_good, of latest, after], ...]}"""
    found = {}
    for scenario, tag in (("another tag", "new"), ("the same tag", "old")):
        found[scenario], fatal, code = [], 0, None
        while code != 0:
            folder = Path(root) / f"{scenario} {fatal}"
            save(folder, "old", _OLD)
            made, code = _killed_save(folder, tag, fatal)
            found[scenario].append([made[-1] if made else "", code, *_aftermath(folder)])
            fatal += 1
    return found


def _aftermath(folder):
    good = last_good(folder)
    latest = find_folder(folder, read_latest(folder))
    verify_checkpoint(latest)
    seeds = [seed_in(good), seed_in(latest)]
    save(folder, "later", _LATER)
    verify_checkpoint(last_good(folder))
    assert seed_in(last_good(folder)) == _LATER
    verify_checkpoint(folder / "old")  # also if it had stepped aside
    left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
    return [*seeds, left]


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    (found,) = run_ranks(
        every_kill, str(tmp_path_factory.mktemp("kills")), num_ranks=1, warm="torch"
    )
    return found


@pytest.mark.parametrize("scenario", ["another tag", "the same tag"])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(kills, scenario):
    found = kills[scenario]
    print(f"{scenario}: killed at {len(found) - 1} operations")
    assert [code for _, code, *_ in found] == [-signal.SIGKILL] * (len(found) - 1) + [0]
    seeds = [good for _, _, good, *_ in found]
    # Old before the rename that commits, new from then on, and both occur.
    assert seeds == sorted(seeds) and set(seeds) == {_OLD, _NEW}
    assert all(latest in (_OLD, good) for _, _, good, latest, _ in found)
    assert [left for *_, left in found] == [[]] * len(found)


def test_saves_are_killed_at_every_stage(kills):
    for scenario, tag in (("another tag", "new"), ("the same tag", "old")):
        before = [operation for operation, *_ in kills[scenario]]
        for stage in (
            "os.mkdir",
            "inside shard_1.pt",
            "inside part.bin",
            "after the shards",
            "fp4_checkpoint.json",
            f"os.rename /{tag}",
            "os.rename /latest",
            *(["os.rename /.fp4_replaced"] if tag == "old" else []),
        ):
            assert any(stage in one for one in before), (scenario, stage, before)
