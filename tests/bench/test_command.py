"""`fp4 bench ablation` from the command line to its files."""

from __future__ import annotations

import pytest

from fp4_plugin.bench.ablation.arms import ARMS
from fp4_plugin.cli.main import main
from tests.bench.studies import TEXT


@pytest.fixture
def command(tmp_path):
    corpus = tmp_path / "corpus.py"
    corpus.write_text(TEXT)
    return [
        "bench", "ablation", "--data", str(corpus), "--cache-dir", str(tmp_path / "cache"),
        "--output", str(tmp_path / "out"), "--hidden", "32", "--layers", "1", "--seq-len", "32",
        "--batch", "2", "--steps", "2", "--held-out-sequences", "4", "--learning-rates", "0.001",
        "0.01",
    ]  # fmt: skip


def test_every_arm_trains_and_the_report_is_left_and_printed(tmp_path, capsys, command):
    assert main([*command, "--seeds", "0", "--jobs", "1", "--arms", *ARMS]) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "out/report.md").read_text()
    assert text in printed
    assert all(f"\n| {arm} | " in text for arm in ARMS)
    assert "diverged" not in text


@pytest.mark.slow
def test_workers_give_the_same_bits_as_one_process(tmp_path, capsys, command):
    small = [*command, "--seeds", "0", "--arms", "paper"]
    assert main([*small, "--jobs", "1"]) == 0
    alone = (tmp_path / "out/report.json").read_text()
    assert main([*small, "--jobs", "2", "--output", str(tmp_path / "two")]) == 0
    assert (tmp_path / "two/report.json").read_text() == alone
    capsys.readouterr()


def test_help_teaches_protocol_arms_and_files(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "ablation", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for word in ("noise floor", "bf16_dge_slope", "runs.csv", "examples:", "not a win", *ARMS):
        assert word in text


def test_a_misspelt_arm_is_one_line_with_the_nearest_name(capsys, command):
    assert main([*command, "--arms", "w4a4_tensr"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'w4a4_tensor'" in error


def test_missing_text_is_one_line(capsys, command):
    command[command.index("--data") + 1] = "nowhere"
    assert main(command) == 2
    assert "nowhere: no such file" in capsys.readouterr().err
