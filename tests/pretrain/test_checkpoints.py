"""Which checkpoint a run goes on from, which ones it removes, and which are of another run."""

from __future__ import annotations

import json
import math

import pytest

from fp4_plugin.checkpoint import CHECKPOINT_NAME, Manifest, describe_file
from fp4_plugin.errors import CheckpointError, ConfigError
from fp4_plugin.pretrain.checkpoints import RunCheckpoints, resume_requests, was_restarted
from fp4_plugin.pretrain.job import prepare_job
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.pretrain.run_record import RunRecord, run_settings
from fp4_plugin.pretrain.training import History, StepRecord

SETTINGS = {"seed": 0, "seq_len": 8, "micro_batch": 2, "grad_accum": 1, "world_size": 2}


def _history(num_steps):
    steps = [StepRecord(i + 1, math.pi / (i + 1), 1e-3 / 3, 0.1 + i) for i in range(num_steps)]
    return History(steps, [(num_steps, 2 / 3)], skipped_steps=2, skipped_in_a_row=1)


def _checkpoints(folder, keep=None, **settings):
    return RunCheckpoints(folder, SETTINGS | settings, total_steps=100, keep=keep)


def _save(checkpoints, steps):
    """What a save of all ranks leaves, with one small file."""
    tag = checkpoints.write_record(RunRecord(checkpoints.settings, _history(steps)))
    folder = checkpoints.folder / tag
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.pt").write_bytes(b"x" * 100)
    Manifest(tag, tag, {"weights.pt": describe_file(folder / "weights.pt")}).write(folder)
    return folder


@pytest.fixture
def two(tmp_path):
    """A folder with two checkpoints, and where they are."""
    checkpoints = _checkpoints(tmp_path / "checkpoints")
    return checkpoints, _save(checkpoints, 3), _save(checkpoints, 20)


def test_a_record_comes_back_bit_for_bit(tmp_path):
    record = RunRecord(SETTINGS, _history(7), {"export_losses": None})
    record.write(tmp_path / "a" / "record.json")
    assert RunRecord.read(tmp_path / "a" / "record.json") == record
    position = json.loads((tmp_path / "a" / "record.json").read_text())["position"]
    assert position == {"steps": 7, "samples": 7 * 4, "tokens": 7 * 4 * 8}


def test_there_is_nothing_to_resume_at_first(tmp_path):
    assert _checkpoints(tmp_path / "absent").find(["latest"]) is None
    (tmp_path / "half" / ".fp4_saving.1").mkdir(parents=True)
    assert _checkpoints(tmp_path / "half").find(["latest"]) is None
    assert _checkpoints(tmp_path).find([]) is None


def test_latest_a_tag_and_paths_name_checkpoints(two, tmp_path, monkeypatch):
    checkpoints, third, twentieth = two
    elsewhere = _checkpoints(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    for request, steps in [
        ("latest", 20),
        ("global_step3", 3),
        (str(third), 3),
        ("checkpoints/global_step20", 20),
    ]:
        point = checkpoints.find([request])
        assert point.record.history == _history(steps)
        assert (point.folder / (point.tag or "global_step20")).samefile(
            third if steps == 3 else twentieth
        )
    assert elsewhere.find([str(third)]).record.steps == 3
    assert elsewhere.find([str(checkpoints.folder)]).record.steps == 20
    # A job that was started again, before its own first checkpoint: what it began with.
    assert elsewhere.find(["latest", str(third)]).record.steps == 3


def test_what_does_not_exist_is_named_beside_what_does(two):
    with pytest.raises(
        CheckpointError, match=r"--resume global_step5.*global_step20, global_step3"
    ):
        two[0].find(["global_step5"])


def test_if_all_are_damaged_nothing_starts_from_the_beginning_in_silence(two):
    checkpoints, *folders = two
    for folder in folders:
        (folder / "weights.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the checkpoints .* is complete"):
        checkpoints.find(["latest"])


def test_a_checkpoint_without_its_record_is_passed_over_or_says_what_is_missing(two, caplog):
    checkpoints, third, twentieth = two
    twentieth.with_suffix(".json").unlink()
    point = checkpoints.find(["latest"])
    assert (point.path, point.tag, point.record.steps) == (third, third.name, 3)
    assert "passed over" in caplog.text and "global_step20.json is missing" in caplog.text
    with pytest.raises(CheckpointError, match=r"global_step20\.json is missing.*position"):
        checkpoints.find([twentieth.name])
    twentieth.with_suffix(".json").write_text("{")
    third.with_suffix(".json").write_text("")
    with pytest.raises(CheckpointError, match=r"global_step20\.json is damaged(.|\n)*step3\.json"):
        checkpoints.find(["latest"])


def test_a_damaged_record_of_the_end_is_as_if_there_were_none(two):
    checkpoints, *_ = two
    checkpoints.write_finished(RunRecord(SETTINGS, _history(100), {}))
    assert checkpoints.finished() is not None
    (checkpoints.folder / "finished.json").write_text('{"a":')
    assert checkpoints.finished() is None


def test_a_record_of_another_step_than_the_engine_is_refused(two):
    checkpoints, third, _ = two
    assert checkpoints.loaded(third, 3).record.steps == 3
    with pytest.raises(CheckpointError, match="is at step 4, the record beside it at step 3"):
        checkpoints.loaded(third, 4)


@pytest.mark.parametrize("key", SETTINGS)
def test_another_setting_is_named_with_both_values(two, key):
    checkpoints = _checkpoints(two[0].folder, **{key: 7})
    with pytest.raises(ConfigError, match=rf"of another run: {key} \({SETTINGS[key]} there, 7 now"):
        checkpoints.find(["latest"])


def test_a_shorter_run_than_was_done_is_refused(two):
    checkpoints = RunCheckpoints(two[0].folder, SETTINGS, total_steps=19)
    with pytest.raises(ConfigError, match=r"steps \(20 done there, 19 in all now\)"):
        checkpoints.find(["latest"])


def test_a_finished_training_is_found_if_it_is_as_long_as_this_one(tmp_path):
    checkpoints = _checkpoints(tmp_path)
    assert checkpoints.finished() is None
    checkpoints.write_finished(RunRecord(SETTINGS, _history(100), {"is_converted": True}))
    assert checkpoints.finished().facts == {"is_converted": True}
    longer = RunCheckpoints(tmp_path, SETTINGS, total_steps=200)
    assert longer.finished() is None


def test_keep_leaves_the_newest_and_never_the_last_good_one_less(tmp_path):
    checkpoints = _checkpoints(tmp_path, keep=2)
    for steps in (10, 20, 30):
        newest = _save(checkpoints, steps)
        checkpoints.remove_old(newest)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["global_step20", "global_step20.json", "global_step30", "global_step30.json"]
    # One whose file is cut off is no reason to remove a good one.
    (tmp_path / "global_step30" / "weights.pt").write_bytes(b"")
    checkpoints.remove_old(_save(checkpoints, 40))
    assert {"global_step20", "global_step40"} <= {path.name for path in tmp_path.iterdir()}


def test_the_checkpoint_just_written_stays_even_if_the_clock_went_back(tmp_path, monkeypatch):
    checkpoints = _checkpoints(tmp_path, keep=1)
    _save(checkpoints, 10)
    newest = _save(checkpoints, 20)
    record = json.loads((newest / CHECKPOINT_NAME).read_text())
    Manifest("global_step20", "b", {}, created=record["created"] - 9999).write(newest)
    (newest / "weights.pt").unlink()
    checkpoints.remove_old(newest)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step20"]


@pytest.mark.parametrize(
    ("environment", "resume", "expected"),
    [
        ({}, None, ()),
        ({}, "global_step5", ("global_step5",)),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}, None, ()),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None, ("latest",)),
        ({"SLURM_RESTART_COUNT": "2"}, "a/b", ("latest", "a/b")),
        ({"SLURM_RESTART_COUNT": "2"}, "latest", ("latest",)),
        ({"SLURM_RESTART_COUNT": "many"}, None, ()),
    ],
)
def test_a_job_that_was_started_again_resumes_by_itself(environment, resume, expected):
    assert resume_requests(resume, restarted=was_restarted(environment)) == expected


def _settings(tmp_path, **options):
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    given = {"seq_len": 8, "steps": 10, "data": tmp_path / "text.txt"} | options
    job = prepare_job(PretrainOptions(**given, cache_dir=tmp_path / "cache"), world_size=2)
    return run_settings(job, job.shape.label, job.shape.ds_config)


def _differing(one, other):
    return {key for key in {*one, *other} if one.get(key) != other.get(key)}


def test_what_must_stay_the_same_has_names_that_a_person_knows(tmp_path):
    base = _settings(tmp_path)
    (tmp_path / "other.txt").write_text("other text\n" * 100)
    for options, keys in [
        ({"seed": 1}, {"seed"}),
        ({"lr": 0.5}, {"optimizer.params.lr"}),
        ({"grad_accum": 2, "micro_batch": 2}, {"grad_accum", "micro_batch"}),
        ({"zero_stage": 1}, {"zero_optimization.stage"}),
        ({"recipe": "fp8"}, {"run"}),
        ({"steps": 20}, {"total_steps"}),
        ({"data": tmp_path / "other.txt"}, {"data", "held-out data"}),
        ({"tensorboard": True, "eval_interval": 2, "timeout_minutes": 1.0}, set()),
    ]:
        assert _differing(base, _settings(tmp_path, **options)) == keys, options


def test_a_schedule_of_the_users_own_does_not_depend_on_the_number_of_steps(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"scheduler": {"type": "WarmupLR", "params": {}}}))
    short, long = (_settings(tmp_path, config=config, steps=steps) for steps in (10, 20))
    assert short == long
