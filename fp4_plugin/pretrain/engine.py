"""The DeepSpeed side of a run: process group, accelerator and one engine per training.

`import fp4_plugin` has armed the hook on `deepspeed.initialize` by the time this module loads, so
an `fp4` section in the configuration is all it takes; nothing here knows about FP4.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from fp4_plugin.errors import ConfigError, Fp4Error, UnsupportedError
from fp4_plugin.pretrain.model import build_model, decay_groups
from fp4_plugin.pretrain.schedule import WarmupCosine

__all__ = [
    "PeerError",
    "Ranks",
    "close_engine",
    "create_engine",
    "join_process_group",
    "require_deepspeed",
]

logger = logging.getLogger(__name__)


class PeerError(Fp4Error, RuntimeError):
    """Another rank stopped the run and has said why."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise mean of `values` over all ranks; the same bits on every rank."""
        torch.distributed.all_reduce(values)
        return values / self.world_size

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the others wait. If it raises an Fp4Error, all ranks stop.

        Rank 0 raises the error itself, the others `PeerError`: none is left in a collective.
        """
        error: Fp4Error | None = None
        if self.is_first:
            try:
                action()
            except Fp4Error as raised:
                error = raised
        failed = torch.tensor(float(error is not None), device=self.device)
        torch.distributed.broadcast(failed, src=0)
        if error is not None:
            raise error
        if failed:
            raise PeerError("rank 0 stopped the run")


def require_deepspeed() -> None:
    """Raise UnsupportedError, with the command that helps, if the job's packages are missing."""
    for package in ("deepspeed", "transformers"):
        try:
            __import__(package)
        except ImportError as error:
            raise UnsupportedError(
                f"fp4 pretrain needs {package} ({error}): pip install 'fp4-plugin[deepspeed,hf]'"
            ) from error


def join_process_group(timeout_minutes: float) -> Ranks:
    """Join the group the launcher describes; a collective that takes longer than this fails."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    is_cpu = accelerator.device_name() == "cpu"
    if is_cpu:
        _skip_shared_memory_op()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device(local_rank)
    deepspeed.init_distributed(timeout=timedelta(minutes=timeout_minutes), verbose=False)
    # The CPU accelerator numbers NUMA nodes; torch knows one CPU.
    device = torch.device("cpu" if is_cpu else accelerator.device_name(local_rank))
    group = torch.distributed
    return Ranks(group.get_rank(), group.get_world_size(), device)


def _skip_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling `deepspeed_shm_comm`, which only inference uses.

    The build takes minutes, needs ninja and a compiler, and if killed leaves a lock that blocks
    every later job without a message. The table is private API: without it nothing is lost.
    """
    import deepspeed.ops

    compatible_ops = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible_ops, dict):
        compatible_ops["deepspeed_shm_comm"] = False
    else:
        logger.warning("this deepspeed may compile its shared-memory op at the first start")


def create_engine(
    model_config: Any, ds_config: dict[str, Any], schedule: WarmupCosine, seed: int
) -> Any:
    """A DeepSpeed engine around a new model; a `scheduler` in the JSON replaces `schedule`.

    Raises ConfigError for a configuration that DeepSpeed refuses.
    """
    import deepspeed

    torch.manual_seed(seed)
    try:
        model = build_model(model_config, ds_config, seed)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=decay_groups(model),
            config=ds_config,
            lr_scheduler=None if "scheduler" in ds_config else schedule.scheduler(),
        )
    except Fp4Error:
        raise
    except (AssertionError, ValueError) as error:  # its ways to say that a value is wrong
        logger.debug("the traceback of DeepSpeed's error", exc_info=True)
        raise ConfigError(f"DeepSpeed refuses this configuration: {error!r}") from error
    _share_timeout()
    return engine


def _share_timeout() -> None:
    """Give every process group the timeout of the default one.

    DeepSpeed reduces gradients in groups of its own, which it makes with torch's timeout: a rank
    that hangs would hold up the others for half an hour whatever was asked for. torch has no public
    way to ask for the groups or to change them; without the private one they keep that half hour.
    """
    from torch.distributed import distributed_c10d as c10d

    try:
        default = c10d._get_default_group()
        device = default._device_types[0]
        timeout = default._get_backend(device).options._timeout
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timeout, group)
    except (AttributeError, IndexError) as error:
        logger.warning("--timeout-minutes does not reach DeepSpeed's own groups (%s)", error)


def close_engine(engine: Any) -> None:
    """Free the engine's memory before the next one is made."""
    from deepspeed.accelerator import get_accelerator

    engine.destroy()
    engine.module = None
    gc.collect()
    get_accelerator().empty_cache()
