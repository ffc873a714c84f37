"""The ranks and the engine, as far as they can be seen without training."""

from __future__ import annotations

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
