"""Signals as flags: real signals to this process, and to one that has to die of the second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from fp4_plugin.checkpoint import Preemption
from fp4_plugin.checkpoint import preemption as module
from fp4_plugin.errors import UnsupportedError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_is_a_flag_and_the_old_handlers_come_back(number):
    old = signal.getsignal(number)
    with Preemption() as preemption:
        assert (preemption.requested, preemption.received) == (False, None)
        os.kill(os.getpid(), number)
        assert (preemption.requested, preemption.received) == (True, number.name)
    assert signal.getsignal(number) is old
    assert preemption.requested


def test_the_first_signal_is_the_one_that_is_named_and_sigterm_after_sigusr1_is_a_first_one(clock):
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        clock.now += 999
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.received == "SIGUSR1"


def test_a_second_sigterm_does_what_it_did_before_unless_it_is_the_same_request(clock):
    calls = []
    old = signal.signal(signal.SIGTERM, lambda *_: calls.append("old"))
    try:
        with Preemption() as preemption:
            for _ in range(2):  # the scheduler's, and the launcher's copy of it
                os.kill(os.getpid(), signal.SIGTERM)
            assert (preemption.requested, calls) == (True, [])
            clock.now += 6
            os.kill(os.getpid(), signal.SIGTERM)
            assert calls == ["old"]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_handler_that_somebody_else_put_in_meanwhile_stays():
    def other(*_):
        pass

    old = signal.getsignal(signal.SIGUSR1)
    try:
        with Preemption():
            signal.signal(signal.SIGUSR1, other)
        assert signal.getsignal(signal.SIGUSR1) is other
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_installing_twice_is_installing_once():
    old = signal.getsignal(signal.SIGTERM)
    preemption = Preemption()
    preemption.install()
    preemption.install()
    preemption.restore()
    assert signal.getsignal(signal.SIGTERM) is old


def test_another_thread_is_told_why_it_cannot():
    errors = []

    def attempt():
        try:
            Preemption().install()
        except UnsupportedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, name="loader")
    thread.start()
    thread.join()
    (message,) = errors
    assert "main thread only; this is 'loader'" in message


SECOND_ONE_ENDS = """
import multiprocessing, os, signal, time
from fp4_plugin.checkpoint import preemption
preemption._ONE_REQUEST_SECONDS = 0.0
with preemption.Preemption() as asked:
    # A worker of a data loader: ended by SIGTERM as ever. Not in its first moment: CPython drops
    # signals that come between fork and its own clean-up in the child.
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    worker = context.Process(target=lambda: (runs.set(), time.sleep(60)))
    worker.start()
    runs.wait(20)
    worker.terminate()
    worker.join(20)
    print(worker.exitcode, asked.requested, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print(asked.received, flush=True)
    time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    print("never", flush=True)
"""


def test_by_default_the_second_sigterm_ends_the_process_and_forked_children_know_no_flag():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SECOND_ONE_ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [f"{-signal.SIGTERM} False", "SIGTERM"], done.stderr
    assert done.returncode == -signal.SIGTERM
