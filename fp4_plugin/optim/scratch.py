"""A tensor worked on piece by piece, in memory that is used again for the next piece."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp4_plugin.optim.state_format import BLOCK_SIZE, StateFormat, num_blocks

__all__ = ["CompilerWorkspace", "Scratch", "decode_tensor", "encode_tensor", "max_blocks", "pieces"]

# A piece's float32 copies (three or four of them) should stay in a CPU's cache, and must stay far
# below the 64 MB that a step may take; a GPU needs larger pieces to be busy.
_BLOCKS_ON_CPU = 512
_BLOCKS_ELSEWHERE = 2048


def max_blocks(device: torch.device) -> int:
    """Blocks in the largest piece."""
    return _BLOCKS_ON_CPU if device.type == "cpu" else _BLOCKS_ELSEWHERE


def pieces(numel: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
    """Cut a flat tensor: (its elements, their blocks, elements per block) of each piece.

    All pieces hold whole blocks, except the last one where `numel` is not a multiple of BLOCK_SIZE.
    """
    step = max_blocks(device)
    whole = numel // BLOCK_SIZE
    for block in range(0, whole, step):
        end = min(block + step, whole)
        yield slice(block * BLOCK_SIZE, end * BLOCK_SIZE), slice(block, end), BLOCK_SIZE
    if numel > whole * BLOCK_SIZE:
        yield slice(whole * BLOCK_SIZE, numel), slice(whole, whole + 1), numel - whole * BLOCK_SIZE


class Scratch:
    """Temporary tensors by name: the same memory each time, grown to the largest piece so far."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], torch.Tensor] = {}

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of `x`; what it holds is anything."""
        key = (name, x.device)
        if key not in self._memory or self._memory[key].numel() < x.numel():
            self._memory[key] = torch.empty(x.numel(), dtype=dtype, device=x.device)
        return self._memory[key][: x.numel()].view(x.shape)


class CompilerWorkspace:
    """Temporary tensors of a compiled function, which mostly turn into registers."""

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(x, dtype=dtype)


def encode_tensor(values: torch.Tensor, fmt: StateFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 values -> codes of the same shape and the scales of their blocks, to nearest."""
    flat = values.detach().reshape(-1)
    codes = torch.empty(flat.shape, dtype=fmt.dtype, device=flat.device)
    scale = torch.ones(num_blocks(flat.numel()), dtype=torch.float32, device=flat.device)
    scratch = Scratch()
    for elements, blocks, width in pieces(flat.numel(), flat.device):
        x = flat[elements].to(torch.float32, copy=True).view(-1, width)
        fmt.encode(x, codes[elements].view(-1, width), scale[blocks].view(-1, 1), None, scratch)
    return codes.view(values.shape), scale


def decode_tensor(codes: torch.Tensor, scale: torch.Tensor, fmt: StateFormat) -> torch.Tensor:
    """The inverse of `encode_tensor`: float32 of the shape of `codes`."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    flat, flat_codes = values.view(-1), codes.reshape(-1)
    for elements, blocks, width in pieces(flat.numel(), flat.device):
        fmt.decode(
            flat_codes[elements].view(-1, width),
            scale[blocks].view(-1, 1),
            flat[elements].view(-1, width),
        )
    return values
