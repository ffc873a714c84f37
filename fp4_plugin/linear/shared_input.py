"""Linears that read the same tensor (q, k and v; gate and up) share one quantised input.

The last quantised input of each thread is remembered with what identifies its source: storage,
view and version counter. A hit needs the source's storage to be alive, so an address that was
freed and used again cannot match, and `_version` tells of in-place writes in between. Identity of
the tensor object is no criterion: ZeRO-3 hands every module its own alias of the same storage.

Writes through `.data` and those of collectives (a receive buffer) leave `_version` as it is, so a
converted model forgets whenever its forward begins or ends, and every FP4 layer when its backward
begins: on CUDA autograd recomputes checkpointed layers in a thread of its own, which the hooks of
the model do not reach. So nothing is kept alive between steps either. A lone FP4Linear without
gradients that is fed from such a buffer needs `forget_shared_input` after each write.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp4_plugin.linear.operand import QuantizedInput, as_rows, quantize_input
from fp4_plugin.linear.spec import LinearSpec

__all__ = ["forget_shared_input", "shared_quantized_input"]

_remembered = threading.local()


@dataclass(frozen=True)
class _Source:
    storage: StorageWeakRef
    view: tuple[object, ...]
    recipe: tuple[object, ...]


def shared_quantized_input(x: torch.Tensor, spec: LinearSpec) -> QuantizedInput:
    """`quantize_input` of x: (..., K) seen as (T, K), or the result of the call before."""
    rows = as_rows(x)
    # Inference tensors have no version counter to rely on. An input that stays as it is holds x
    # itself, and the graph behind it: there is nothing to share, and much to keep alive.
    if x.is_inference() or spec.input.format is None:
        return quantize_input(rows, spec)
    source = _describe(x, spec)
    last: tuple[_Source, QuantizedInput] | None = getattr(_remembered, "last", None)
    if last is not None and _is_same(last[0], source):
        return last[1]
    quantized = quantize_input(rows, spec)
    _remembered.last = (source, quantized)
    return quantized


def forget_shared_input(*_: object) -> None:
    """Drop what this thread remembers; as a module hook it takes, and ignores, its arguments."""
    _remembered.last = None


def _describe(x: torch.Tensor, spec: LinearSpec) -> _Source:
    view = (x.storage_offset(), x.shape, x.stride(), x.dtype, x.device, x._version)
    recipe = (spec.input, spec.outliers, spec.keeps_transposed_input)
    return _Source(StorageWeakRef(x.untyped_storage()), view, recipe)


def _is_same(old: _Source, new: _Source) -> bool:
    return (
        old.view == new.view
        and old.recipe == new.recipe
        and old.storage.cdata == new.storage.cdata
        and not old.storage.expired()
    )
