"""`fp4 bench comm`: what it measures on real ranks, what it says, and that no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4_plugin.bench.comm import launch
from fp4_plugin.bench.comm.gradients import Deviation, deviation, heavy_tailed
from fp4_plugin.bench.comm.measure import Measured
from fp4_plugin.bench.comm.report import CommReport, statement
from fp4_plugin.bench.comm.settings import OPERATIONS, CommOptions
from fp4_plugin.bench.comm.verdict import Spread, break_even_bits_per_s, judge, ratios
from fp4_plugin.cli.main import main
from fp4_plugin.errors import CommunicationError

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["bench", "comm", "--ranks", "2", "--sizes", "8192", "1001", "--rounds", "5"]


def message_bytes(numel: int, block_size: int) -> int:
    """By hand: a header, a float32 per block, a byte per element, rounded up to 16."""
    return -(-(16 + 4 * -(-numel // block_size) + numel) // 16) * 16


@pytest.mark.distributed
def test_two_ranks_measure_bytes_error_and_time(tmp_path, capsys):
    path = tmp_path / "results" / "comm.json"
    codecs = ["--formats", "e4m3", "e5m2", "--block-sizes", "256"]
    assert main([*SMALL, *codecs, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    rows = {
        (row["operation"], row["elements"], row["sent_as"]): row
        for row in json.loads(path.read_text())["measurements"]
    }
    # 1001 elements are padded to 1002, a multiple of the ranks.
    labels = ["bf16", "fp32", "e4m3/256", "e5m2/256"]
    assert set(rows) == {(o, n, s) for o in OPERATIONS for n in (8192, 1002) for s in labels}
    for (operation, elements, label), row in rows.items():
        one = message_bytes(4096, int(label.split("/")[1])) if "/" in label else 0
        if elements == 8192 and one:
            trips = 2 if operation == "all_reduce" else 1
            assert row["wire_bytes_per_rank"] == trips * one
        # Worst measured at these sizes: e4m3 29.2 and e5m2 22.8 dB; a ratio of 10 is 20 dB.
        floor = {"e4m3": 28.0, "e5m2": 22.0, "bf16": 50.0, "fp32": 140.0}[label.split("/")[0]]
        assert row["snr_db"] is None or row["snr_db"] >= floor
        assert row["snr_db"] is not None or label == "fp32"
        assert len(row["rounds"]) == 5
        assert min(row["rounds"]) > 0
        assert row["time_ratio"]["low"] <= row["time_ratio"]["median"] <= row["time_ratio"]["high"]
        if one:
            assert row["statement"] in printed
            assert row["codec_seconds"]["median"] > 0
    assert 0.5 <= rows["all_reduce", 8192, "e4m3/256"]["bytes_ratio"] <= 0.53
    assert 0.25 <= rows["reduce_to_owners", 8192, "e4m3/256"]["bytes_ratio"] <= 0.28
    for word in ("time / bf16", "worst block", "Estimate", "loopback"):
        assert word in printed


def test_error_is_that_of_a_plain_loop_in_float64():
    reference = heavy_tailed(2500, seed=3, rank=0).double()
    value = (reference.float() * 1.01).float()
    found = deviation(reference, value)
    exact, error = reference.numpy(), value.numpy().astype(np.float64) - reference.numpy()
    blocks = [slice(start, start + 1024) for start in range(0, 2500, 1024)]
    worst = max(np.linalg.norm(error[b]) / np.linalg.norm(exact[b]) for b in blocks)
    assert found.worst_block == pytest.approx(worst, rel=1e-12)
    assert found.snr_db == pytest.approx(
        20 * np.log10(np.linalg.norm(exact) / np.linalg.norm(error))
    )
    assert deviation(reference, reference.clone()).snr_db is None


def test_gradients_are_heavy_tailed_and_differ_from_rank_to_rank():
    first, second = (heavy_tailed(1 << 16, seed=0, rank=rank).double() for rank in (0, 1))
    assert torch.equal(first, heavy_tailed(1 << 16, seed=0, rank=0).double())
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.05
    magnitudes = first.view(-1, 4096)
    kurtosis = (magnitudes**4).mean(1) / (magnitudes**2).mean(1) ** 2
    assert float(kurtosis.median()) > 6  # 3 for a normal distribution
    assert magnitudes.abs().mean(1).max() > 10 * magnitudes.abs().mean(1).min()


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.2, 1.5, 3.0], "does not pay"),
        ([0.5, 0.6, 0.7], "pays"),
        ([0.5, 0.6, 1.0], "cannot be told"),
        ([0.2, 0.3, 0.3, 0.3, 1.1], "cannot be told"),
        ([1.5, 1.6, 0.9], "cannot be told"),
        ([0.5, 0.6], "cannot be told"),
        ([0.5] * 9 + [7.0], "pays"),
        ([0.5] * 8 + [7.0] * 2, "cannot be told"),
    ],
)
def test_a_claim_needs_the_whole_spread_on_one_side(values, verdict):
    assert judge(Spread.of(values)) == verdict


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40))
def test_a_win_is_never_claimed_within_the_spread(values):
    above = sum(value >= 1 for value in values)
    if judge(Spread.of(values)) == "pays":
        assert len(values) >= 3
        assert above <= len(values) // 10


def test_ratios_are_made_round_by_round():
    spread = ratios([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert (spread.low, spread.median, spread.high) == (1.0, 2.0, 3.0)


def test_break_even_is_bytes_saved_by_codec_time():
    assert break_even_bits_per_s(1_000_000, 8e-3) == pytest.approx(1e9)
    assert break_even_bits_per_s(0, 8e-3) is None
    assert break_even_bits_per_s(-16, 8e-3) is None


def report_row(seconds: list[float], wire_bytes: int = 500):
    """Ours beside a BF16 that takes 1 s and sends 1000 bytes; the codec takes 1 ms."""
    error = Deviation(1.0, 1e-3, 0.02)
    bf16 = Measured("all_reduce", 2, 4000, "bf16", (1.0,) * len(seconds), 1000, error)
    ours = replace(bf16, label="e4m3/1024", seconds=tuple(seconds), wire_bytes=wire_bytes)
    codec = replace(bf16, label="e4m3/1024 codec", seconds=(1e-3,), wire_bytes=None, deviation=None)
    return CommReport(CommOptions(), [bf16, ours, codec]).rows[1]


def test_statements_say_plainly_what_was_measured_and_what_is_estimated():
    slow = statement(report_row([2.0, 3.0, 4.0]))
    assert "compression does not pay here: 3.00 times the time of BF16" in slow
    assert "Estimate: it pays on links below 4 Mbit/s per rank" in slow
    assert "compression pays here" in statement(report_row([0.5, 0.6, 0.7]))
    unclear = statement(report_row([0.5, 0.6, 1.7]))
    assert "cannot be told" in unclear
    assert "compression pays here:" not in unclear
    assert "pays on no link" in statement(report_row([0.5, 0.6, 0.7], wire_bytes=1000))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sizes", "0"], "--sizes 0: must be from 1"),
        (["--sizes", "-4"], "--sizes -4: must be from 1"),
        (["--sizes", "8", "8"], "each once"),
        (["--ranks", "1"], "with one rank there is nothing to send"),
        (["--ranks", "2", "1000"], "--ranks 1000: must be from 2 to"),
        (["--formats", "e4m4"], "did you mean 'e4m3'"),
        (["--formats", "e2m1"], "'e2m1' cannot travel: allowed are"),
        (["--block-sizes", "1000"], "a power of two"),
        (["--operations", "gather"], "allowed are all_reduce, reduce_scatter, reduce_to_owners"),
        (["--rounds", "2"], "--rounds 2: must be from 5"),
        (["--timeout-minutes", "nan"], "--timeout-minutes nan"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(capsys, flags, words):
    assert main(["bench", "comm", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_without_gloo_there_is_a_clear_error(capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert main(SMALL) == 2
    assert "needs torch.distributed with gloo" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "comm", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples:", "how to read it:", "an estimate", "two_hosts.py", *OPERATIONS):
        assert word in text


@pytest.fixture
def started(monkeypatch):
    """The processes of all ranks that were started."""
    processes = []
    start = launch._start

    def start_and_note(*arguments):
        processes.append(start(*arguments))
        return processes[-1]

    monkeypatch.setattr(launch, "_start", start_and_note)
    return processes


@pytest.mark.distributed
def test_ranks_that_take_too_long_are_ended(started):
    options = CommOptions(sizes=(4096,), rounds=5, timeout_minutes=1e-4)
    with pytest.raises(CommunicationError, match="2 ranks did not finish within 0.0001 minutes"):
        launch.run_ranks(options, 2)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_named_and_takes_the_others_along(monkeypatch, started, failing):
    start = launch._start

    def start_one_wrongly(folder, rank, num_ranks):
        name = "fp4_plugin.no_such_module" if rank == failing else launch.worker.__name__
        monkeypatch.setattr(launch, "_WORKER", name)
        return start(folder, rank, num_ranks)

    monkeypatch.setattr(launch, "_start", start_one_wrongly)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=f"rank {failing} of 2 failed: .*no_such_module"):
        launch.run_ranks(CommOptions(sizes=(4096,), rounds=5), 2)
    assert time.monotonic() - began < 30  # it did not wait for the timeout
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(stop):
    code = "import sys; from fp4_plugin.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *SMALL, "--rounds", "10000"]
    parent = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        ranks = wait_for(lambda: ids if len(ids := children(parent.pid)) == 2 else None)
        parent.send_signal(stop)
        assert parent.wait(timeout=20) == (130 if stop == signal.SIGINT else -stop)
        assert wait_for(lambda: not any(is_alive(pid) for pid in ranks))
    finally:
        parent.kill()
        parent.wait()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    # Z: ended, and nobody has asked for its exit code yet.
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(probe, timeout_s: float = 20.0):
    """What `probe` returns once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := probe()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return found
