"""From the user's process to the ranks."""

from __future__ import annotations

import signal

import pytest
import torch

from fp4_plugin.errors import ConfigError, DataError
from fp4_plugin.pretrain import launch
from fp4_plugin.pretrain.options import PretrainOptions


@pytest.fixture
def gpus(monkeypatch):
    """A machine with four accelerators, as far as counting goes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


def test_every_accelerator_gets_a_rank(gpus):
    assert launch._num_processes(None) == 4
    assert launch._num_processes(3) == 3


def test_more_ranks_than_accelerators_are_refused(gpus):
    with pytest.raises(ConfigError, match=r"--nproc 5: this machine has 4 accelerator"):
        launch._num_processes(5)


def test_a_cpu_gets_as_many_ranks_as_asked_for(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert launch._num_processes(5) == 5
    assert launch._num_processes(None) in (1, 2)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"data": "absent.txt"}, DataError, "no such file or folder"),
        ({"tokenizer": "absent/tokenizer"}, DataError, "cannot be loaded"),
        ({"config": "absent.json"}, ConfigError, "No such file"),
        ({"recipe": "papre"}, ConfigError, "paper"),
        ({"preset": "tinny"}, ConfigError, "did you mean 'tiny'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_refused_before_a_rank_starts(
    monkeypatch, tmp_path, options, error, complaint
):
    monkeypatch.setattr(launch, "_launch", lambda *_: pytest.fail("ranks were started"))
    for name in ("data", "config"):
        if name in options:
            options = {name: tmp_path / options[name]}
    output = tmp_path / "run"
    with pytest.raises(error, match=complaint):
        launch.start(PretrainOptions(**options, output=output, cache_dir=tmp_path / "cache"))
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_launch", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "text.txt").write_text("x" * 999)
    (tmp_path / "file").write_text("")
    options = PretrainOptions(
        data=tmp_path / "text.txt", output=tmp_path / "file" / "run", cache_dir=tmp_path / "cache"
    )
    with pytest.raises(ConfigError, match="--output"):
        launch.start(options)


def test_the_exit_code_is_that_of_the_rank_that_failed(capsys):
    assert launch._exit_code(1, 2) == 2
    assert capsys.readouterr().err == ""
    assert launch._exit_code(1, -signal.SIGKILL) == 137
    assert "rank 1 was killed by signal 9; out of memory?" in capsys.readouterr().err
