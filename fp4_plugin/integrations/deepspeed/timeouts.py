"""The time limit that a job was given, for the groups it reduces gradients over.

DeepSpeed makes these with `new_group`, which does not pass the limit of `init_distributed` on: a
peer that stops would be waited for half an hour, whatever the user has asked for.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from fp4_plugin.comm.transport import timeout_of

__all__ = ["device_of", "use_job_timeout"]

logger = logging.getLogger("fp4_plugin")


def use_job_timeout(engine: Any) -> None:
    """Give the data-parallel groups of `engine` the timeout of the whole job.

    Does nothing where torch has no function for it (it is not public), or the groups have the limit
    already.
    """
    import torch.distributed as dist

    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    device = device_of(engine)
    limit = timeout_of(dist.group.WORLD, device)
    if set_timeout is None or limit is None:
        logger.warning("fp4: collectives of gradients keep the default timeout of their groups")
        return
    for group in _data_parallel_groups(engine):
        if timeout_of(group, device) not in (limit, None):
            set_timeout(limit, group)


def device_of(engine: Any) -> torch.device:
    """Where the engine's gradients are; a pipeline stage may have none."""
    devices = (parameter.device for parameter in engine.module.parameters())
    return next(devices, torch.device("cpu"))


def _data_parallel_groups(engine: Any) -> list[Any]:
    experts = getattr(engine, "expert_data_parallel_group", None) or {}
    groups = [engine.data_parallel_group, engine.seq_data_parallel_group, *experts.values()]
    if engine.mpu is not None:
        groups.append(engine.mpu.get_data_parallel_group())
    return [group for group in groups if group is not None]
