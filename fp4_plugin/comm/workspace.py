"""Byte buffers for messages, kept between calls."""

from __future__ import annotations

import threading

import torch

__all__ = ["Workspace"]


class Workspace:
    """Buffers that one reducer uses again and again.

    A buffer belongs to the stream it was given back on, where the device has streams: work queued
    there has read it before later work on the same stream writes it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """A copy or a pickle starts without buffers: they are worth nothing elsewhere."""
        return Workspace, ()

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 buffer of `num_bytes`; hand it, or a part of it, back with `give_back`."""
        with self._lock:
            free = self._free.setdefault(_place(device), [])
            fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= num_bytes]
            if fitting:
                return free.pop(min(fitting, key=lambda i: free[i].numel()))[:num_bytes]
            if free:
                # The new buffer takes the place of the largest that was too small.
                free.pop(max(range(len(free)), key=lambda i: free[i].numel()))
        # A buffer outlives the inference mode it may have been made in.
        with torch.inference_mode(mode=False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self, buffer: torch.Tensor) -> None:
        if buffer.device.type == "cuda":
            # It may be freed, later, while this stream still reads it.
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        whole = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
        with self._lock:
            self._free.setdefault(_place(buffer.device), []).append(whole)

    def num_bytes(self) -> int:
        """Bytes held and not in use."""
        with self._lock:
            return sum(buffer.numel() for free in self._free.values() for buffer in free)


def _place(device: torch.device) -> tuple[torch.device, int]:
    is_cuda = device.type == "cuda"
    return device, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
