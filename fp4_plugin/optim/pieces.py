"""Tensors cut and packed into pieces of whole blocks, so that a step costs about the same for one
large tensor and for many small ones.

A large tensor is cut into pieces that are views of it. What remains of it, and smaller tensors,
share pieces: they are copied to scratch memory, each from the start of a block on, and the results
are copied back. So there are a few dozen operations per piece instead of per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fp4_plugin.optim.scratch import Scratch, max_blocks
from fp4_plugin.optim.state_format import BLOCK_SIZE, num_blocks

__all__ = ["SCALE", "Fields", "for_each_piece"]

# Ends the names of fields that have one element per block.
SCALE = "_scale"

# Blocks from which on copying a part costs more than the operations of a piece of its own.
_WORTH_A_PIECE = 64

# The flat tensors that belong together, by name: all of one size, scales of its number of blocks.
Fields = Mapping[str, torch.Tensor]


def for_each_piece(
    tensors: Iterable[Fields],
    scratch: Scratch,
    run: Callable[[Fields], None],
    constant: tuple[str, ...] = (),
) -> None:
    """Call `run` for pieces that cover all `tensors`, with each field as (blocks, BLOCK_SIZE).

    Scales are (blocks, 1). `run` changes its tensors in place, except those named in `constant`.
    Elements that fill up a block are zero. The tensors must agree in names, dtypes and device.
    """
    for pack in _packs(tensors):
        if len(pack) == 1 and pack[0].is_whole:
            run({name: _as_blocks(name, pack[0].slice(name)) for name in pack[0].fields})
        else:
            _run_copied(pack, scratch, run, constant)


@dataclass(frozen=True)
class _Part:
    """Elements start .. stop of a tensor; `start` is that of a block."""

    fields: Fields
    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.stop - self.start)

    @property
    def is_whole(self) -> bool:
        return (self.stop - self.start) % BLOCK_SIZE == 0

    def slice(self, name: str) -> torch.Tensor:
        field = self.fields[name]
        if name.endswith(SCALE):
            start, stop = self.start // BLOCK_SIZE, num_blocks(self.stop)
        else:
            start, stop = self.start, self.stop
        return field if stop - start == field.numel() else field[start:stop]


def _packs(tensors: Iterable[Fields]) -> Iterator[list[_Part]]:
    """Lists of parts: one that is worth a piece of its own, or several for one piece."""
    pack: list[_Part] = []
    room = 0
    for part in _parts(tensors):
        if part.is_whole and part.num_blocks >= _WORTH_A_PIECE:
            yield [part]
            continue
        if part.num_blocks > room:
            if pack:
                yield pack
            pack, room = [], max_blocks()
        pack.append(part)
        room -= part.num_blocks
    if pack:
        yield pack


def _parts(tensors: Iterable[Fields]) -> Iterator[_Part]:
    for fields in tensors:
        numel = next(x.numel() for name, x in fields.items() if SCALE not in name)
        step = max_blocks() * BLOCK_SIZE
        whole = numel - numel % BLOCK_SIZE
        if whole < _WORTH_A_PIECE * BLOCK_SIZE:
            whole = numel
        for start in range(0, whole, step):
            yield _Part(fields, start, min(start + step, whole))
        if whole < numel:
            yield _Part(fields, whole, numel)


def _run_copied(
    pack: list[_Part],
    scratch: Scratch,
    run: Callable[[Fields], None],
    constant: tuple[str, ...],
) -> None:
    rows = [part.num_blocks for part in pack]
    # What a part fills of its blocks, and what it leaves of the last one, in turn.
    filled = [part.stop - part.start for part in pack]
    sizes = [
        size
        for count, used in zip(rows, filled, strict=True)
        for size in (used, count * BLOCK_SIZE - used)
    ]
    piece, results = {}, []
    for name, example in pack[0].fields.items():
        is_scale = name.endswith(SCALE)
        numel = sum(rows if is_scale else sizes)
        flat = scratch.take(f"copied {name}", (numel,), example.dtype, example.device)
        if is_scale:
            places = flat.split_with_sizes(rows)
        else:
            split = flat.split_with_sizes(sizes)
            places = split[::2]
            torch._foreach_zero_(split[1::2])
        originals = [part.slice(name) for part in pack]
        torch._foreach_copy_(places, originals)
        piece[name] = _as_blocks(name, flat)
        if name not in constant:
            results.append((originals, places))
    run(piece)
    for originals, places in results:
        torch._foreach_copy_(originals, places)


def _as_blocks(name: str, flat: torch.Tensor) -> torch.Tensor:
    return flat.view(-1, 1 if name.endswith(SCALE) else BLOCK_SIZE)
