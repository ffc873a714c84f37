"""The protocol: sweep first, one rate for all arms, every run made once, kept and reported."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from fp4_plugin.bench.ablation import study
from fp4_plugin.bench.ablation.report import write_report
from fp4_plugin.bench.ablation.results import ResultStore
from fp4_plugin.bench.ablation.study import run_study
from fp4_plugin.errors import DataError, UnsupportedError
from tests.bench.studies import RecordedTraining, tiny_options


def test_bf16_chooses_the_learning_rate_before_any_arm_runs(tmp_path):
    options = tiny_options(tmp_path, learning_rates=(4e-3, 1e-3, 2e-3), seeds=(5, 6))
    training = RecordedTraining({1e-3: 2.2, 2e-3: 2.1, 4e-3: 2.3})
    found = run_study(options, training)
    sweep, arms = training.asked[:3], training.asked[3:]
    assert [(s.arm, s.seed, s.learning_rate) for s in sweep] == [
        ("bf16", 5, 1e-3), ("bf16", 5, 2e-3), ("bf16", 5, 4e-3),
    ]  # fmt: skip
    assert found.learning_rate == 2e-3
    assert {s.learning_rate for s in arms} == {2e-3}
    assert [(s.arm, s.seed) for s in arms] == [
        ("bf16", 6),  # seed 5 at this rate was run by the sweep
        ("bf16_perturbed", 5), ("bf16_perturbed", 6), ("bf16_dge_slope", 5), ("bf16_dge_slope", 6),
        ("paper", 5), ("paper", 6),
    ]  # fmt: skip
    assert found.losses("bf16").keys() == found.losses("paper").keys() == {5, 6}


def test_a_stopped_study_goes_on_where_it_was(tmp_path):
    options = tiny_options(tmp_path)
    training = RecordedTraining()

    def stopping(settings, source):
        if settings.arm == "paper":
            raise KeyboardInterrupt
        return training(settings, source)

    with pytest.raises(KeyboardInterrupt):
        run_study(options, stopping)
    resumed = RecordedTraining()
    first = run_study(options, resumed)
    assert [s.arm for s in resumed.asked] == ["paper"]
    again = RecordedTraining()
    assert run_study(options, again) == first
    assert again.asked == []


def test_a_changed_setting_runs_again_beside_the_old_results(tmp_path):
    run_study(tiny_options(tmp_path), RecordedTraining())
    training = RecordedTraining()
    run_study(tiny_options(tmp_path, steps=3), training)
    assert len(training.asked) == 5
    assert len(list((tmp_path / "out/runs").iterdir())) == 10


def test_a_changed_text_runs_again(tmp_path):
    options = tiny_options(tmp_path)
    run_study(options, RecordedTraining())
    options.data.write_text(options.data.read_text().replace("x + ", "x * "))
    training = RecordedTraining()
    run_study(options, training)
    assert len(training.asked) == 5


def test_result_files_are_whole_or_absent(tmp_path, monkeypatch):
    options = tiny_options(tmp_path)

    def failing(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(ValueError, match="No space left"):
        run_study(options, RecordedTraining())
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


def test_a_damaged_result_is_named_and_not_silently_redone(tmp_path):
    options = tiny_options(tmp_path)
    found = run_study(options, RecordedTraining())
    path = ResultStore(options.output).path(found.runs[0].settings)
    path.write_text(path.read_text()[:20])
    with pytest.raises(DataError, match=path.name):
        run_study(options, RecordedTraining())


def test_diverged_rates_lose_the_sweep_and_diverged_arms_are_reported(tmp_path):
    options = tiny_options(tmp_path, learning_rates=(1e-3, 1e-2))
    found = run_study(options, RecordedTraining({"paper": None, 1e-2: None}))
    assert found.learning_rate == 1e-3
    report = write_report(found)
    assert "| paper | 1 of 1 runs diverged |" in report.text()
    assert "paper: 1 of 1 runs diverged" in report.text()
    record = json.loads((tmp_path / "out/report.json").read_text())
    assert record["arms"]["paper"]["verdict"] == "diverged"
    assert "paper,0,0.001,diverged,,1," in (tmp_path / "out/runs.csv").read_text()


def test_a_sweep_without_a_finite_loss_is_an_error(tmp_path):
    with pytest.raises(UnsupportedError, match="lower --learning-rates"):
        run_study(tiny_options(tmp_path), RecordedTraining({"bf16": None}))


def test_a_killed_worker_is_explained_and_keeps_what_was_finished(tmp_path, monkeypatch):
    done = RecordedTraining()

    class DyingPool:
        def submit(self, train, settings, source):
            future = Future()
            if settings.arm == "paper":
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(done(settings, source))
            return future

    monkeypatch.setattr(study, "_workers", lambda jobs: contextlib.nullcontext(DyingPool()))
    with pytest.raises(UnsupportedError, match="fewer --jobs"):
        run_study(tiny_options(tmp_path, jobs=2))
    # The sweep at least; arms that finished in the same instant may come after the failure.
    assert len(list((tmp_path / "out/runs").iterdir())) >= 2


def test_every_run_is_in_the_table_of_runs_once(tmp_path):
    found = run_study(tiny_options(tmp_path), RecordedTraining())
    write_report(found)
    rows = (tmp_path / "out/runs.csv").read_text().splitlines()
    assert rows[0].startswith("arm,seed,learning_rate,status,held_out_loss")
    assert len(rows) == 1 + 5
    assert len(set(rows)) == len(rows)
