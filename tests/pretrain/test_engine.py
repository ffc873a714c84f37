"""The ranks and the engine, as far as they can be seen without training."""

from __future__ import annotations

import pytest
from torch import nn

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain import engine
from fp4_plugin.pretrain.presets import PRESETS
from fp4_plugin.pretrain.schedule import WarmupCosine
from tests.distributed import run_ranks


def _timeouts_of_all_groups():
    from datetime import timedelta

    import torch.distributed as dist

    from fp4_plugin.pretrain.engine import _share_timeout

    dist.init_process_group("gloo", timeout=timedelta(seconds=7))
    groups = [dist.group.WORLD, dist.new_group([0])]
    _share_timeout()
    return [group._get_backend(group._device_types[0]).options._timeout.seconds for group in groups]


def test_groups_that_deepspeed_makes_wait_no_longer_than_asked_for():
    assert run_ranks(_timeouts_of_all_groups, num_ranks=1) == [[7, 7]]


@pytest.mark.parametrize("refusal", [AssertionError("Nope is no optimizer"), ValueError("stage 7")])
def test_what_deepspeed_refuses_is_wrong_input(monkeypatch, refusal):
    def initialize(**_):
        raise refusal

    deepspeed = pytest.importorskip("deepspeed")
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(engine, "build_model", lambda *_: nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=f"DeepSpeed refuses this configuration: .*{refusal}"):
        engine.create_engine(PRESETS["tiny"].llama_config(), {}, WarmupCosine(2, 1, 0.1), seed=0)
