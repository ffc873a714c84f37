"""The whole job on two ranks: beside its twin, under a launcher with ZeRO-3, and diverging."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest

from tests.distributed import ROOT, run_command

SMALL = ["--seq-len", "32", "--micro-batch", "2", "--eval-sequences", "6", "--log-interval", "1"]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirty short documents, some of them held out by their names."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "text").mkdir()
    for index in range(30):
        (folder / "text" / f"{index}.txt").write_text(f"line {index} of a small text\n" * 20)
    return folder


def _flags(folder, run, *more):
    paths = ["--data", str(folder / "text"), "--cache-dir", str(folder / "cache")]
    return [*SMALL, *paths, "--output", str(folder / run), *more]


def _pretrain(*flags):
    """The job as a user starts it: no launcher, no RANK."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "fp4_plugin.pretrain", *flags],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _rows(run):
    with (run / "losses.csv").open() as stream:
        return list(csv.DictReader(stream))


def _losses(run, label="paper"):
    return [float(row["loss"]) for row in _rows(run) if row["run"] == label]


@pytest.fixture(scope="module")
def twin_run(folder):
    flags = _flags(folder, "twin", "--nproc", "2", "--steps", str(NUM_STEPS), "--twin")
    result = _pretrain(*flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "twin", result


@pytest.mark.distributed
def test_the_fp4_run_and_its_twin_see_the_same_batches_and_are_compared(twin_run):
    run, result = twin_run
    report = json.loads((run / "report.json").read_text())
    paper, twin = report["runs"]
    assert (paper["run"], twin["run"]) == ("paper", "bf16 twin")
    assert (report["zero_stage"], report["world_size"]) == (2, 2)
    # Before any update only the arithmetic differs.
    assert len(_losses(run)) == len(_losses(run, "bf16 twin")) == NUM_STEPS
    assert _losses(run)[0] == pytest.approx(_losses(run, "bf16 twin")[0], abs=0.05)
    assert _losses(run) != _losses(run, "bf16 twin")
    assert abs(paper["held_out_gap_nats"]) < 0.3
    assert (run / "report.md").read_text() in result.stdout
    assert "in so short a run" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.distributed
def test_every_decoder_linear_is_proven_in_the_manifest(twin_run):
    manifest = json.loads((twin_run[0] / "fp4_manifest.json").read_text())
    # The tiny LLaMA: 4 decoder layers of 7 linears.
    assert manifest["summary"]["status"] == {"active": 28}
    assert {layer["weight"]["format"] for layer in manifest["layers"]} == {"e2m1"}


@pytest.mark.distributed
def test_the_run_leaves_curves_monitors_and_an_export(twin_run):
    run, _ = twin_run
    assert (run / "curves.png").stat().st_size > 1000
    for job in ("fp4", "bf16_twin"):
        assert (run / "monitor" / "csv_monitor" / job / "Train_loss.csv").is_file()
    config = json.loads((run / "export" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")


@pytest.mark.distributed
def test_under_a_launcher_zero_3_begins_like_zero_2_and_exports_whole_weights(folder, twin_run):
    flags = _flags(folder, "zero3", "--steps", str(NUM_STEPS), "--zero-stage", "3")
    command = [sys.executable, "-m", "fp4_plugin.pretrain", "--local_rank=0", *flags]
    first, second = run_command(command, num_ranks=2)
    assert "loads in plain transformers" in first
    assert second == ""
    expected, losses = _losses(twin_run[0]), _losses(folder / "zero3")
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=1e-2)


@pytest.mark.distributed
def test_a_diverging_run_ends_with_one_line_its_losses_and_exit_code_2(folder):
    result = _pretrain(*_flags(folder, "nan", "--nproc", "1", "--steps", "9", "--lr", "1e30"))
    assert result.returncode == 2, result.stdout + result.stderr
    # The norms keep the loss finite, so the gradients alone tell.
    assert "fp4: error: 3 optimiser steps in a row were skipped up to step 4" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(_losses(folder / "nan")) == 4
    assert not (folder / "nan" / "report.md").exists()


def test_bad_input_is_one_line_without_traceback(folder):
    result = _pretrain("--data", str(folder / "absent"), "--output", str(folder / "bad"))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line == f"fp4: error: --data {folder}/absent: no such file or folder"
