"""FP8 gradients for torch's DistributedDataParallel: one line after wrapping the model.

model.register_comm_hook(None, fp4_plugin.comm.ddp_hook)
model.register_comm_hook(comm.DdpState(block_size=512), fp4_plugin.comm.ddp_hook)
"""

# No `from __future__ import annotations` here: DDP looks at the types of a hook's signature.

from functools import lru_cache
from typing import Any

import torch

from fp4_plugin.comm.codec import BlockCodec
from fp4_plugin.comm.reducer import GradientReducer
from fp4_plugin.comm.traffic import Traffic
from fp4_plugin.comm.transport import all_reduce_exactly, members_of
from fp4_plugin.errors import ConfigError

__all__ = ["DdpState", "ddp_hook"]


class DdpState:
    """Settings and counters of one DDP model.

    group: the process group the model was wrapped with. Buckets smaller than `min_numel` elements
    are averaged exactly. `traffic` counts what was sent.
    """

    def __init__(
        self,
        group: Any = None,
        format: str = "e4m3",
        block_size: int = 1024,
        min_numel: int = 2048,
    ) -> None:
        self.group = group
        self.min_numel = min_numel
        self._reducer = GradientReducer(BlockCodec.named(format, block_size))
        self._stream: torch.cuda.Stream | None = None

    @property
    def traffic(self) -> Traffic:
        return self._reducer.traffic

    def average(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by its mean over the group."""
        members = members_of(self.group)
        buffer.div_(members.size)
        if buffer.numel() >= self.min_numel:
            self._reducer.all_reduce(buffer, members.group)
        else:
            self.traffic.count_exact("all_reduce", buffer.numel())
            all_reduce_exactly(buffer, members)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that reductions run on, beside the backward pass."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


def ddp_hook(
    state: DdpState | torch.distributed.ProcessGroup | None,
    bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket of gradients in FP8; for `DistributedDataParallel.register_comm_hook`.

    state: a DdpState; or, as in torch's own hooks, the process group of the model, None for all
    ranks, with the default settings. Raises ConfigError for anything else, and CommunicationError
    as `GradientReducer`.
    """
    state = _state_of(state)
    buffer = bucket.buffer()
    if buffer.device.type != "cuda":
        state.average(buffer)
        return _completed(buffer)
    stream = state.stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream):
        buffer.record_stream(stream)
        state.average(buffer)
        return _completed(buffer)


def _completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that DDP waits for on its own stream, where there are streams."""
    is_cuda = buffer.device.type == "cuda"
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if is_cuda else None
    )
    future.set_result(buffer)
    return future


def _state_of(state: object) -> DdpState:
    if isinstance(state, DdpState):
        return state
    if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
        raise ConfigError(
            f"ddp_hook was registered with {state!r}: its first argument is a DdpState, a process "
            "group or None"
        )
    return _default_state(state)


@lru_cache(maxsize=16)
def _default_state(group: Any) -> DdpState:
    return DdpState(group)
