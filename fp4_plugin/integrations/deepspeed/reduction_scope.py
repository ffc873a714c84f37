"""Which of DeepSpeed's collectives reduce gradients, and of which engine.

DeepSpeed calls the same few functions for gradients, norms, overflow flags and activations, from
every engine of a process. What tells them apart is who calls: an engine that asks for FP8 gradients
enters a scope in its reducing methods (gradients.py). The functions replaced here look for a scope;
without one they pass the call on.

    deepspeed.comm.comm.cdb.all_reduce, .reduce               every stage
    deepspeed.runtime.zero.stage3.reduce_scatter_coalesced    ZeRO-3
    deepspeed.comm.comm.cdb.reduce_scatter_tensor             counted only

ZeRO-3's is replaced as a whole because it pads with uninitialised memory, which would decide about
the scale of the block it falls into; what it hands on to the last one stays exact.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch

from fp4_plugin.comm.reducer import Describe, GradientReducer, Pending
from fp4_plugin.comm.shares import segments_within
from fp4_plugin.integrations.patching import patch_function

__all__ = ["Scope", "exact_reductions", "install", "reducing"]

# (elements, ranks of the group that keep the sum) of the runs of a bucket.
Owners = Sequence[tuple[int, Sequence[int]]]

_current = threading.local()  # autograd calls hooks from threads of its own
# Sums of float tensors outside any scope: "all_reduce in <function>" -> elements. They are exact.
_exact: Counter[str] = Counter()
_MIN_COUNTED = 2048


class Run(NamedTuple):
    """Elements [start, stop) of a buffer."""

    start: int
    stop: int
    is_exact: bool


@dataclass(frozen=True)
class Scope:
    """The gradients of one engine are being reduced.

    owners: who keeps the sum, where only these ranks need it. describe: which parameters. exact:
    names of those that must not be rounded.
    """

    reducer: GradientReducer
    min_numel: int
    exact: frozenset[str] = frozenset()
    owners: Owners | None = None
    describe: Describe = tuple

    def runs(self, numel: int) -> list[Run]:
        """A flat buffer of `numel` elements, cut where what must stay exact begins and ends."""
        if not self.exact:
            return [Run(0, numel, False)]
        runs: list[Run] = []
        stop = 0
        for segment in self.describe():
            start, stop = stop, stop + segment.numel
            is_exact = segment.name in self.exact
            if runs and runs[-1].is_exact == is_exact:
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(start, stop, is_exact))
        return runs

    def accepts(self, numel: int, dtype: torch.dtype, op: Any, group: Any) -> bool:
        """Whether to reduce in FP8; what is too small is counted as exact."""
        from deepspeed import comm as dist

        if not (dtype.is_floating_point and _is_sum(op)) or dist.get_world_size(group=group) == 1:
            return False
        if numel < self.min_numel:
            self.reducer.traffic.count_exact("smaller than min_numel", numel)
            return False
        return True


@contextmanager
def reducing(scope: Scope) -> Iterator[None]:
    """Inside, reductions of this thread are gradients in `scope`.

    A method that calls another one that enters as well keeps what it knew.
    """
    outer: Scope | None = getattr(_current, "scope", None)
    is_inner = outer is not None and outer.reducer is scope.reducer
    _current.scope = outer if is_inner else scope
    try:
        yield
    finally:
        _current.scope = outer


def install() -> None:
    """Put the functions of this module in place, once per process and backend object.

    They stay: an engine that was promised FP8 gradients must not lose them to a later call.
    Raises UnsupportedError that names the symbol if this DeepSpeed lacks one.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import stage3

    for owner, name, around in (
        (comm.cdb, "all_reduce", _all_reduce),
        (comm.cdb, "reduce", _reduce),
        (comm.cdb, "reduce_scatter_tensor", _reduce_scatter),
        (stage3, "reduce_scatter_coalesced", _reduce_scatter_coalesced),
    ):
        patch_function(owner, name, around)


def exact_reductions() -> Counter[str]:
    """Elements of float sums that no engine claimed as gradients, by function that asked."""
    return _exact.copy()


# DeepSpeed's decorators hide the signatures: these are its own, in all versions since 0.14.
_ALL_REDUCE = ("tensor", "op", "group", "async_op")
_REDUCE = ("tensor", "dst", "op", "group", "async_op")
_REDUCE_SCATTER = ("output_tensor", "input_tensor", "op", "group", "async_op")


def _bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {"op": None, "group": None, "async_op": False, **given}


def _all_reduce(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = _bind(_ALL_REDUCE, args, kwargs)
    scope = _scope_for("all_reduce", call["tensor"], call)
    if scope is None:
        return original(*args, **kwargs)
    return _run_by_run(original, scope, call, scope.reducer.all_reduce)


def _reduce(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = _bind(_REDUCE, args, kwargs)
    scope = _scope_for("reduce", call["tensor"], call)
    if scope is None:
        return original(*args, **kwargs)
    return _run_by_run(original, scope, call, scope.reducer.reduce)


def _run_by_run(
    original: Callable[..., Any],
    scope: Scope,
    call: Mapping[str, Any],
    reduce: Callable[..., Any],
) -> Any:
    """The call by `original` for what must stay exact, by `reduce` (or to owners) for the rest."""
    flat = call["tensor"].view(-1)
    extra = {"dst": call["dst"]} if "dst" in call else {}
    runs = scope.runs(len(flat))
    is_one = len(runs) == 1
    for start, stop, is_exact in runs:
        part = flat[start:stop]
        describe = _describe_within(scope, start, stop)
        if is_exact:
            scope.reducer.traffic.count_exact("tied parameters", stop - start)
            original(part, **extra, group=call["group"])
        elif scope.owners is not None:
            owners = _owners_within(scope.owners, start, stop)
            scope.reducer.reduce_to_owners(part, owners, call["group"], describe=describe)
        else:
            pending = reduce(
                part,
                **extra,
                group=call["group"],
                async_op=call["async_op"] and is_one,
                describe=describe,
            )
            if is_one:
                return pending
    return Pending() if call["async_op"] else None


def _describe_within(scope: Scope, start: int, stop: int) -> Describe:
    return lambda: segments_within(scope.describe(), [(start, stop)])


def _owners_within(owners: Owners, start: int, stop: int) -> list[tuple[int, Sequence[int]]]:
    found = []
    begin = 0
    for numel, ranks in owners:
        end = begin + numel
        shared = min(end, stop) - max(begin, start)
        if shared > 0:
            found.append((shared, ranks))
        begin = end
    return found


def _reduce_scatter(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = _bind(_REDUCE_SCATTER, args, kwargs)
    if getattr(_current, "scope", None) is None:
        _count_exact("reduce_scatter", call["input_tensor"], call["op"])
    return original(*args, **kwargs)


def _scope_for(name: str, tensor: torch.Tensor, call: Mapping[str, Any]) -> Scope | None:
    """The scope whose reducer takes this call; None if DeepSpeed is to make it itself."""
    scope: Scope | None = getattr(_current, "scope", None)
    if scope is None:
        _count_exact(name, tensor, call["op"])
    elif scope.accepts(tensor.numel(), tensor.dtype, call["op"], call["group"]):
        return scope
    return None


def _reduce_scatter_coalesced(
    original: Callable[..., Any], tensors: Sequence[torch.Tensor], group: Any = None
) -> list[torch.Tensor]:
    """For each tensor this rank's part of the mean over the group.

    The part of rank r are the elements from r * ceil(numel / ranks), as many or as are left.
    """
    from deepspeed import comm as dist

    scope: Scope | None = getattr(_current, "scope", None)
    numel = sum(tensor.numel() for tensor in tensors)
    if scope is None or not scope.accepts(numel, tensors[0].dtype, None, group):
        return original(tensors, group)
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    bounds = [_partition_bounds(tensor.numel(), size) for tensor in tensors]
    flats = [tensor.reshape(-1) for tensor in tensors]
    shares = [
        [flat[slice(*of_tensor[owner])] for flat, of_tensor in zip(flats, bounds, strict=True)]
        for owner in range(size)
    ]
    sizes = [len(part) for part in shares[rank]]
    output = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    describe = scope.describe

    def describe_shares() -> list[Any]:
        ends = [0]
        for flat in flats:
            ends.append(ends[-1] + len(flat))
        segments = describe()
        return [
            segments_within(
                segments,
                [
                    (start + of_tensor[owner][0], start + of_tensor[owner][1])
                    for start, of_tensor in zip(ends, bounds, strict=False)
                ],
            )
            for owner in range(size)
        ]

    scope.reducer.reduce_scatter_v(
        [output], shares, group, scale=1.0 / size, describe=describe_shares
    )
    return list(output.split(sizes))


def _partition_bounds(numel: int, size: int) -> list[tuple[int, int]]:
    chunk = math.ceil(numel / size)
    return [(min(r * chunk, numel), min((r + 1) * chunk, numel)) for r in range(size)]


def _is_sum(op: Any) -> bool:
    """Both DeepSpeed's and torch's enumerations spell it so; None stands for their default."""
    return op is None or getattr(op, "name", None) == "SUM"


def _count_exact(name: str, tensor: torch.Tensor, op: Any) -> None:
    if tensor.is_floating_point() and _is_sum(op) and tensor.numel() >= _MIN_COUNTED:
        _exact[f"{name} in {_caller()}"] += tensor.numel()


def _caller() -> str:
    """The first function up the stack that is no part of a communication module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("deepspeed.comm", "deepspeed.utils", "fp4_plugin", "torch.")):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown function"
