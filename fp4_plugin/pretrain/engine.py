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
from typing import Any, TypeVar

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

_T = TypeVar("_T")


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

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; the same answer on every rank."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def on_first(self, action: Callable[[], _T]) -> _T:
        """What `action` returns on rank 0, given to all. If it raises an Fp4Error, all ranks stop.

        Rank 0 raises the error itself, the others `PeerError`: none is left in a collective. What
        it returns can be pickled.
        """
        error: Fp4Error | None = None
        outcome: list[Any] = [False, None]
        if self.is_first:
            try:
                outcome = [True, action()]
            except Fp4Error as raised:
                error = raised
        torch.distributed.broadcast_object_list(outcome, src=0, device=self.device)
        if error is not None:
            raise error
        succeeded, result = outcome
        if not succeeded:
            raise PeerError("rank 0 stopped the run")
        return result

    def leave(self) -> None:
        """Leave the process group, all ranks together; nothing can be sent afterwards.

        Without this, threads of gloo are still at work when the interpreter ends, and abort the
        process in two of five cases. No rank closes its sockets while another reads from them.
        """
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    def abandon(self) -> None:
        """Leave the process group after an error, whatever the other ranks do.

        Only where it is gloo's, whose abort would hide the exit code; NCCL might wait for others.
        """
        if self.device.type == "cpu":
            torch.distributed.destroy_process_group()


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
    timeout = timedelta(minutes=timeout_minutes)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        _join_after_restart(accelerator.communication_backend_name(), timeout)
    deepspeed.init_distributed(timeout=timeout, verbose=False)
    # The CPU accelerator numbers NUMA nodes; torch knows one CPU.
    device = torch.device("cpu" if is_cpu else accelerator.device_name(local_rank))
    group = torch.distributed
    return Ranks(group.get_rank(), group.get_world_size(), device)


def _join_after_restart(backend: str, timeout: timedelta) -> None:
    """Make the process group under keys of its own; DeepSpeed takes the one it finds.

    torchrun's workers share a store with the ones before them, who have left the addresses of their
    sockets in it: in about one restart of two a rank reads such a key before its peer has replaced
    it, and connects to nobody (torch 2.13).
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    attempt = f"fp4_restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(attempt, store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


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
