"""The table, its files and the picture."""

from __future__ import annotations

import csv
import errno
import json
import os

import pytest

from fp4_plugin.errors import ConfigError, MismatchError
from fp4_plugin.pretrain.artifacts import RunFolder
from fp4_plugin.pretrain.curves import draw_curves
from fp4_plugin.pretrain.report import Comparison, summarize, write_losses, write_report
from fp4_plugin.pretrain.training import History, StepRecord


def _history(num_steps, loss, seconds=1.0):
    steps = [StepRecord(i + 1, loss if i >= 10 else 9.0, 1e-3, seconds) for i in range(num_steps)]
    return History(steps, [(num_steps, loss + 0.5)])


def test_the_final_loss_is_the_mean_of_the_last_ten_steps_and_the_time_leaves_out_the_first():
    history = _history(20, 2.0, seconds=0.5)
    history.steps[0] = StepRecord(1, 9.0, 1e-3, 60.0)
    summary = summarize("paper", history)
    assert (summary.train_loss, summary.held_out_loss, summary.seconds_per_step) == (2.0, 2.5, 0.5)


def test_gaps_and_the_ratio_are_against_the_twin():
    run, twin = (
        summarize("paper", _history(20, 2.1, 0.9)),
        summarize("twin", _history(20, 2.0, 0.6)),
    )
    first, second = Comparison(run, twin).rows()
    assert first["train_gap_nats"] == pytest.approx(0.1)
    assert first["train_gap_percent"] == pytest.approx(5.0)
    assert first["held_out_gap_nats"] == pytest.approx(0.1)
    assert first["held_out_gap_percent"] == pytest.approx(4.0)
    assert first["time_ratio"] == pytest.approx(1.5)
    assert (second["train_gap_nats"], second["time_ratio"]) == (0.0, 1.0)
    table = Comparison(run, twin).markdown()
    assert (
        "| paper | 2.1000 | +0.1000 (+5.00 %) | 2.6000 | +0.1000 (+4.00 %) | 0.900 | 1.50x |"
        in table
    )


def test_a_run_without_twin_has_no_gap():
    (row,) = Comparison(summarize("paper", _history(20, 2.1)), None).rows()
    assert not [key for key in row if "gap" in key or "ratio" in key]


def test_the_files_hold_what_the_table_shows(tmp_path):
    histories = [("paper", _history(20, 2.1)), ("bf16 twin", _history(20, 2.0))]
    comparison = Comparison(*(summarize(label, history) for label, history in histories))
    write_report(tmp_path, comparison, {"seed": 3})
    write_losses(tmp_path / "losses.csv", histories)
    draw_curves(tmp_path / "curves.png", histories)
    record = json.loads((tmp_path / "report.json").read_text())
    assert (record["seed"], record["runs"]) == (3, comparison.rows())
    with (tmp_path / "report.csv").open() as stream:
        assert [float(row["train_loss"]) for row in csv.DictReader(stream)] == [2.1, 2.0]
    with (tmp_path / "losses.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["run"], row["step"]) for row in (rows[0], rows[-1])] == [
        ("paper", "1"),
        ("bf16 twin", "20"),
    ]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_missing_artefact_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(MismatchError) as raised:
        folder.require(manifest=True, twin=True, export=True)
    names = ("losses.csv", "report.md", "fp4_manifest.json", "curves.png", "*.safetensors")
    assert all(name in str(raised.value) for name in names)


def test_what_an_earlier_run_left_cannot_pass_for_this_one(tmp_path):
    folder = RunFolder(tmp_path)
    for path in (folder.manifest, folder.losses, *folder.reports, tmp_path / "mine.txt"):
        path.write_text("old")
    folder.export.mkdir()
    folder.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_checkpoints_are_never_removed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.options.write_text("{}")
    (folder.twin_checkpoints / "global_step4").mkdir(parents=True)
    (folder.checkpoints / ".fp4_replaced.1").mkdir(parents=True)
    for shown in ("checkpoints/.fp4_replaced.1", "checkpoints_bf16_twin/global_step4"):
        with pytest.raises(ConfigError, match=f"has checkpoints .*{shown}.*--resume latest"):
            folder.prepare()
        next(folder.checkpoints.glob("*"), folder.checkpoints).rmdir()
    assert (folder.twin_checkpoints / "global_step4").is_dir()


def test_records_and_halves_of_checkpoints_go_with_the_other_files(tmp_path):
    folder = RunFolder(tmp_path)
    folder.options.write_text("{}")
    (folder.checkpoints / ".fp4_saving.1").mkdir(parents=True)
    (folder.checkpoints / "finished.json").write_text("{}")
    folder.prepare()
    assert not folder.checkpoints.exists()


def test_a_run_that_is_resumed_keeps_all_but_its_end(tmp_path):
    folder = RunFolder(tmp_path)
    kept = [folder.options, folder.losses, folder.manifest, folder.ds_config]
    for path in (*kept, folder.curves, *folder.reports):
        path.write_text("old")
    (folder.checkpoints / "global_step4").mkdir(parents=True)
    folder.prepare([folder.ds_config], resuming=True)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, folder.checkpoints])


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    folder = RunFolder(tmp_path)
    folder.ds_config.write_text("{}")
    folder.export.mkdir()
    (folder.export / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"ds_config\.json, export would be replaced"):
        folder.prepare()
    assert folder.ds_config.is_file() and (folder.export / "mine.txt").is_file()


@pytest.mark.parametrize("name", ["ds_config.json", "export", "export/tokenizer.json"])
def test_what_the_run_reads_is_not_removed_first(tmp_path, name):
    folder = RunFolder(tmp_path)
    folder.export.mkdir()
    for path in (folder.options, folder.ds_config, folder.export / "tokenizer.json"):
        path.write_text("{}")
    with pytest.raises(ConfigError, match="copy it elsewhere"):
        folder.prepare([tmp_path / name])
    folder.prepare([tmp_path / "another.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["options.json"]


def test_a_full_disk_is_an_error_with_the_name_of_the_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"--output .*: No space left on device"):
        with RunFolder(tmp_path).writing():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
