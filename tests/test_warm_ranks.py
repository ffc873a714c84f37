"""Forked ranks are like fresh ones: apart from each other, heard when they fail, replaceable."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.distributed import RankFailure, rank_environment, run_ranks
from tests.warm_ranks import WarmRank

pytestmark = pytest.mark.distributed


def look_around():
    loaded = [name for name in ("torch", "fp4_plugin", "deepspeed") if name in sys.modules]
    import random

    import numpy as np
    import torch
    import torch.distributed as dist

    return {
        "rank": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
        "loaded": loaded,
        "initialized": dist.is_initialized(),
        "threads": len(os.listdir("/proc/self/task")),
        "order of strings": hash("order"),
        "drawn": [random.random(), float(np.random.rand()), float(torch.rand(1))],
        "process": [os.getpid(), os.getpgid(0), os.getppid()],
    }


def fail_on_rank_1():
    print("here is", os.environ["RANK"])
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 cannot")


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


def wait_for_ever():
    signal.pause()


def test_ranks_come_from_processes_of_their_own_that_have_only_imported():
    first, second = run_ranks(look_around, warm="torch")
    for rank, one in enumerate((first, second)):
        assert one["rank"] == [str(rank), "2"]
        assert one["loaded"] == ["torch", "fp4_plugin"]
        assert not one["initialized"]
        assert one["threads"] == 1
        assert one["process"][0] == one["process"][1]
    assert first["order of strings"] != second["order of strings"]
    again, _ = run_ranks(look_around, warm="torch")
    assert again["process"][2] == first["process"][2] != second["process"][2]
    for one, other in ((first, second), (first, again)):
        pairs = zip(one["drawn"], other["drawn"], strict=True)
        assert all(a != b for a, b in pairs)


def test_a_rank_that_fails_is_reported_with_its_words():
    with pytest.raises(RankFailure, match=r"(?s)rank 1 exit 1:\nhere is 1\n.*rank 1 cannot"):
        run_ranks(fail_on_rank_1, warm="torch")
    with pytest.raises(RankFailure, match=f"rank 0 exit -{signal.SIGSEGV:d}"):
        run_ranks(die, num_ranks=1, warm="torch")


def test_a_rank_that_does_not_end_is_killed_and_the_next_one_runs():
    with pytest.raises(RankFailure, match="rank 0 did not finish"):
        run_ranks(wait_for_ever, num_ranks=1, timeout_s=0.5, warm="torch")
    assert len(run_ranks(look_around, num_ranks=1, warm="torch")) == 1


def test_a_parent_whose_rank_was_forgotten_is_replaced(tmp_path):
    (before,) = run_ranks(look_around, num_ranks=1, warm="torch")
    what, log = [__file__, "wait_for_ever", "[]", str(tmp_path)], tmp_path / "log"
    forgotten = WarmRank("torch", what, rank_environment(0, 1, 0, str(tmp_path)), log, log)
    with pytest.raises(TimeoutError, match="did not end within 0.1 s"):
        forgotten.wait(0.1)
    (after,) = run_ranks(look_around, num_ranks=1, warm="torch")
    os.kill(forgotten.pid, signal.SIGKILL)
    assert after["process"][2] != before["process"][2]
