"""The ranks of one machine: signals reach them, failures end them, none is left over.

The launcher is a process of its own, since it replaces signal handlers; ranks are small scripts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timed, pytest.mark.timeout(120)]

LAUNCHER = """
import sys
from fp4_plugin.pretrain.launch import _exit_code
from fp4_plugin.pretrain import local_ranks
from fp4_plugin.pretrain.local_ranks import RankFailure, run_local_ranks
local_ranks._LAST_WORDS_SECONDS = 0.3
try:
    run_local_ranks([sys.executable, "-c", sys.argv[1]], 2)
except RankFailure as failure:
    sys.exit(_exit_code(failure.rank, failure.exit_code))
except KeyboardInterrupt:
    sys.exit(130)
"""

# Ranks that find each other through the launcher's store, then wait for a signal.
MEET_AND_WAIT = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from fp4_plugin.pretrain.local_ranks import end_with_launcher
end_with_launcher()
seen = []
signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.barrier()
os.write(1, f"met {dist.get_rank()} {os.getpid()}\\n".encode())
while not seen:
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def start():
    launchers = []

    def start(script):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        launchers.append(
            subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, script],
                env=environment | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def _pids(launcher):
    lines = [launcher.stdout.readline().split() for _ in range(2)]
    assert {line[1] for line in lines} == {"0", "1"}
    return [int(line[2]) for line in lines]


def _wait_until_gone(pids, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.05)


def test_a_sigterm_reaches_the_ranks_as_a_request_to_save(start):
    launcher = start(MEET_AND_WAIT)
    pids = _pids(launcher)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (0, "fp4: SIGTERM: saving, then leaving\n")
    _wait_until_gone(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_ranks_do_not_outlive_a_launcher_that_is_killed(start):
    launcher = start(MEET_AND_WAIT)
    pids = _pids(launcher)
    launcher.kill()
    _wait_until_gone(pids)


def test_a_rank_that_fails_ends_the_others_and_gives_the_exit_code(start):
    launcher = start(
        "import os, sys, time\n"
        "os.write(1, f'{os.getpid()}\\n'.encode())\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    )
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 7
    _wait_until_gone([int(pid) for pid in output.split()])


def test_a_rank_that_is_killed_is_named_with_its_signal(start):
    launcher = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    assert "was killed by signal 9; out of memory?" in errors


def test_an_interrupt_ends_ranks_that_ignore_it(start):
    launcher = start(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.write(1, f'met {os.environ[\"RANK\"]} {os.getpid()}\\n'.encode())\n"
        "time.sleep(600)"
    )
    pids = _pids(launcher)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    _wait_until_gone(pids)
