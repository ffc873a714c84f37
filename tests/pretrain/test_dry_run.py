"""--dry-run: sizes from shapes alone."""

from __future__ import annotations

import pytest
import torch

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.job import job_shape
from fp4_plugin.pretrain.launch import start
from fp4_plugin.pretrain.model import meta_model
from fp4_plugin.pretrain.options import PretrainOptions

GIB = 1 << 30


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"),
    [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)],
)
def test_each_zero_stage_shares_one_thing_more(stage, bytes_per_parameter):
    options = PretrainOptions(preset="1.3b", zero_stage=stage)
    sizes = job_shape(options, 64).sizes()
    total = sizes.weight_bytes + sizes.gradient_bytes + sizes.optimizer_bytes
    assert total == pytest.approx(bytes_per_parameter * sizes.num_parameters, abs=3)


@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_is_as_large_whatever_the_number_of_ranks(stage):
    sizes = [
        job_shape(PretrainOptions(preset="1.3b", zero_stage=stage), ranks).sizes()
        for ranks in (8, 64)
    ]
    bytes_per_parameter = 12 if stage == 3 else 14
    expected = bytes_per_parameter * sizes[0].num_parameters
    assert [one.checkpoint_bytes for one in sizes] == [expected, expected]


def test_the_paper_run_has_the_steps_of_its_token_budget():
    shape = job_shape(PretrainOptions(preset="13b"), 64)
    assert shape.tokens_per_step == 2048 * 2048
    assert shape.schedule.total_steps == -(-100_000_000_000 // (2048 * 2048))
    assert shape.schedule.warmup_steps == round(0.05 * shape.schedule.total_steps)


def test_decoder_linears_are_counted_apart():
    shape = job_shape(PretrainOptions(), 2)
    linears = [m for n, m in meta_model(shape.model_config).named_modules() if n.endswith("_proj")]
    assert len(linears) == 7 * 4
    assert shape.sizes().num_linear_parameters == sum(linear.weight.numel() for linear in linears)


def test_it_prints_and_starts_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = PretrainOptions(preset="7b", dry_run=True, nproc=8, data=tmp_path / "absent")
    assert start(options) == 0
    output = capsys.readouterr().out
    assert "6,738,415,616" in output and "ZeRO stage 2 on 8 rank(s)" in output
    assert not torch.distributed.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_section_is_refused_before_anything_is_computed(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"fp4": {"recip": "paper"}}')
    with pytest.raises(ConfigError, match="recip"):
        start(PretrainOptions(config=config, dry_run=True))
