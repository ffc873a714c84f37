"""One job, stopped in every way there is, against the same job left in peace: bit for bit.

    peace        never stopped
    1            SIGTERM to the launcher
    2            the newest checkpoint is damaged: resumes an older one; then SIGUSR1 to one rank
    3            under torchrun; in the twin's training a rank is killed, and torchrun starts again

Two ranks, ZeRO-2, BF16, two micro batches per step. Stages 1 to 3 are one history.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain import launch
from fp4_plugin.pretrain.arguments import add_arguments, options_from
from tests.distributed import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timed, pytest.mark.timeout(240)]

STEPS = 8
FLAGS = [
    *("--steps", str(STEPS), "--save-interval", "2", "--keep", "2", "--eval-interval", "4"),
    *("--seq-len", "16", "--micro-batch", "2", "--grad-accum", "2", "--eval-sequences", "4"),
    *("--log-interval", "1", "--twin", "--no-export"),
]
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]


class Job:
    """`fp4 pretrain` as a user starts it; its output goes to a file."""

    def __init__(self, folder, output, *flags, launcher=()):
        paths = ["--data", str(folder / "text"), "--cache-dir", str(folder / "cache")]
        command = [sys.executable, *launcher, "-m", "fp4_plugin.pretrain", *FLAGS, *paths]
        command += ["--output", str(folder / output), *flags]
        command += [] if launcher else ["--nproc", "2"]
        unset = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        self._log = folder / f"{output}.log"
        self._start = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def text(self):
        with self._log.open("rb") as log:
            log.seek(self._start)
            return log.read().decode()

    def wait_for(self, pattern, timeout_s=90):
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text(), re.MULTILINE):
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in time:\n{self.text()}"
            time.sleep(0.02)

    def rank(self, number):
        """The process that is rank `number` at the moment."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"no rank {number}:\n{self.text()}")

    def finish(self, exit_code=0, timeout_s=120):
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.kill()
        assert code == exit_code, self.text()
        return self.text()

    def kill(self):
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()


@contextlib.contextmanager
def _job(*arguments, **options):
    job = Job(*arguments, **options)
    try:
        yield job
    finally:
        job.kill()


def _history(folder, output, phase="checkpoints"):
    """Losses and rates to the last bit; times differ."""
    record = json.loads((folder / output / phase / "finished.json").read_text())["history"]
    return [step[:2] for step in record["steps"]], record["held_out"]


def _saved(folder, phase="checkpoints"):
    found = (folder / "stopped" / phase).glob("global_step*/fp4_checkpoint.json")
    return sorted(int(path.parent.name.removeprefix("global_step")) for path in found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interruption")
    (folder / "text").mkdir()
    for index in range(30):
        (folder / "text" / f"{index}.txt").write_text(f"line {index} of a small text\n" * 20)
    return folder


@pytest.fixture(scope="module")
def peace(folder):
    with _job(folder, "peace") as job:
        job.finish()
    return _history(folder, "peace"), _history(folder, "peace", "checkpoints_bf16_twin")


@pytest.fixture(scope="module")
def after_sigterm(folder):
    with _job(folder, "stopped") as job:
        job.wait_for(r"^paper: step 2/8")
        job.process.send_signal(signal.SIGTERM)
        return job.finish()


@pytest.fixture(scope="module")
def after_damage(folder, after_sigterm):
    newest = folder / "stopped" / "checkpoints" / f"global_step{_saved(folder)[-1]}"
    weights = newest / "mp_rank_00_model_states.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with _job(folder, "stopped", "--resume", "latest") as job:
        job.wait_for(r"^paper: step 3/8")
        job.rank(1).send_signal(signal.SIGUSR1)
        return job.finish()


@pytest.fixture(scope="module")
def after_kill(folder, after_damage):
    flags = ["--resume", "latest"]
    with _job(folder, "stopped", *flags, launcher=TORCHRUN) as job:
        job.wait_for(r"^bf16 twin: step 5/8")
        job.rank(1).kill()
        return job.finish()


def test_keep_bounds_the_checkpoints_and_the_dry_run_knows_their_size(folder, peace):
    kept = folder / "peace" / "checkpoints"
    assert sorted(path.name for path in kept.glob("global_step*")) == [
        *("global_step6", "global_step6.json", "global_step8", "global_step8.json")
    ]
    size = sum(path.stat().st_size for path in (kept / "global_step8").iterdir())
    (stated,) = re.findall(r"checkpoint +([\d,]+) bytes", (folder / "peace.log").read_text())
    assert size == pytest.approx(int(stated.replace(",", "")), rel=0.02)


def test_sigterm_saves_on_all_ranks_and_says_how_to_go_on(folder, after_sigterm):
    (steps,) = re.findall(r"saved \S+/checkpoints/global_step(\d) after \1 of 8", after_sigterm)
    assert 2 <= int(steps) < STEPS
    assert "--resume latest" in after_sigterm
    assert "Traceback" not in after_sigterm
    assert (folder / "stopped" / "losses.csv").read_text().count("\npaper,") == int(steps)


def test_a_damaged_newest_checkpoint_is_passed_over_for_an_older_one(after_damage):
    assert "Traceback" not in after_damage
    assert "damaged" in after_damage
    assert "paper: resumed from" in after_damage and "global_step2, 2 steps done" in after_damage


def test_sigusr1_to_one_rank_stops_all_of_them(folder, after_damage):
    (steps,) = re.findall(r"signal to another rank: saved \S+global_step(\d) after", after_damage)
    assert 3 <= int(steps) < STEPS
    assert int(steps) in _saved(folder)


def test_torchrun_goes_on_from_the_last_checkpoint_when_a_rank_was_killed(after_kill):
    first, second = after_kill.split("paper: finished earlier, 8 steps")
    assert "paper: resumed from" in first
    assert "bf16 twin: resumed from" in second
    assert "checkpoints_bf16_twin/global_step4, 4 steps done" in second


def test_all_of_it_together_is_bit_for_bit_the_job_that_was_left_in_peace(
    folder, peace, after_kill
):
    for expected, phase in zip(peace, ("checkpoints", "checkpoints_bf16_twin"), strict=True):
        steps, held_out = _history(folder, "stopped", phase)
        assert (steps, held_out) == expected
        assert (len(steps), [done for done, _ in held_out]) == (STEPS, [4, 8])
    tables = [(folder / run / "losses.csv").read_text() for run in ("peace", "stopped")]
    without_times = [[line.rsplit(",", 1)[0] for line in text.splitlines()] for text in tables]
    assert without_times[0] == without_times[1]
    assert (folder / "stopped" / "curves.png").is_file()


def test_another_seed_is_refused_by_name_before_anything_changes(folder, after_kill, monkeypatch):
    monkeypatch.setattr(launch, "_launch", lambda *_: pytest.fail("ranks were started"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    output = folder / "stopped"
    flags = ["--data", str(folder / "text"), "--cache-dir", str(folder / "cache"), "--nproc", "2"]
    flags += ["--output", str(output), "--seed", "5"]
    before = (output / "options.json").read_bytes()
    with pytest.raises(
        ConfigError, match=r"seed \(0 there, 5 now\).*the settings it was saved with"
    ):
        launch.start(options_from(parser.parse_args([*FLAGS, *flags, "--resume", "latest"])))
    with pytest.raises(ConfigError, match="has checkpoints of an earlier run"):
        launch.start(options_from(parser.parse_args([*FLAGS, *flags])))
    assert (output / "options.json").read_bytes() == before
    assert (output / "report.json").is_file()
