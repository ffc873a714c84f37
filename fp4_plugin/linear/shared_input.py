"""Linears that read the same tensor (q, k and v; gate and up) share one quantised input.

Within a forward of a converted model, and within backward (which may recompute parts of it), the
last quantised input of each thread is remembered with what identifies its source: storage, view
and version counter. A hit needs the source's storage to be alive, so an address that was freed and
used again cannot match, and `_version` tells of in-place writes in between. Identity of the tensor
object is no criterion: ZeRO-3 hands every module its own alias of the same storage.

Writes through `.data`, numpy and collectives (a receive buffer) leave `_version` as it is. So
nothing is remembered beyond one forward or into the backward of the next layer, and a layer that
is called by itself shares nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from fp4_plugin.linear.operand import QuantizedInput, as_rows, quantize_input
from fp4_plugin.linear.shards import Shards
from fp4_plugin.linear.spec import LinearSpec

__all__ = ["forget_shared_input", "share_inputs_within", "shared_quantized_input"]


class _Remembered(threading.local):
    """depth: forwards of converted models that this thread is inside of."""

    depth = 0
    last: tuple[_Source, QuantizedInput] | None = None


_remembered = _Remembered()


@dataclass(frozen=True)
class _Source:
    storage: StorageWeakRef
    view: tuple[object, ...]
    recipe: tuple[object, ...]


def shared_quantized_input(
    x: torch.Tensor, spec: LinearSpec, shards: Shards | None = None
) -> QuantizedInput:
    """`quantize_input` of x: (..., K) seen as (T, K), or the result of the call before."""
    rows = as_rows(x)
    # Inference tensors have no version counter to rely on. An input that stays as it is holds x
    # itself, and the graph behind it: there is nothing to share, and much to keep alive.
    if x.is_inference() or spec.input.format is None or not _is_sharing():
        return quantize_input(rows, spec, shards)
    source = _describe(x, spec, shards)
    last = _remembered.last
    if last is not None and _is_same(last[0], source):
        return last[1]
    quantized = quantize_input(rows, spec, shards)
    _remembered.last = (source, quantized)
    return quantized


def share_inputs_within(model: nn.Module) -> None:
    """Let the FP4 layers that run inside a forward of `model` share quantised inputs."""
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)


def forget_shared_input(*_: object) -> None:
    """Drop what this thread remembers; as a module hook it takes, and ignores, its arguments."""
    _remembered.last = None


# Dynamo must run these, not trace them: what they change is no state of the model.
@_disable_dynamo
def _enter(*_: object) -> None:
    _remembered.depth += 1
    _remembered.last = None


@_disable_dynamo
def _leave(*_: object) -> None:
    _remembered.depth = max(0, _remembered.depth - 1)
    _remembered.last = None


def _is_sharing() -> bool:
    # The id of the running backward, -1 outside of one.
    return _remembered.depth > 0 or torch._C._current_graph_task_id() != -1


def _describe(x: torch.Tensor, spec: LinearSpec, shards: Shards | None) -> _Source:
    view = (x.storage_offset(), x.shape, x.stride(), x.dtype, x.device, x._version)
    recipe = (spec.input, spec.outliers, spec.keeps_transposed_input, shards)
    return _Source(StorageWeakRef(x.untyped_storage()), view, recipe)


def _is_same(old: _Source, new: _Source) -> bool:
    return (
        old.view == new.view
        and old.recipe == new.recipe
        and old.storage.cdata == new.storage.cdata
        and not old.storage.expired()
    )
