"""FP8 gradient communication of one DeepSpeed engine, all ZeRO stages.

The methods in which an engine (or its optimizer) reduces gradients are shadowed on that object, so
that two engines in one process may differ. Their code stays DeepSpeed's: they only run inside a
scope (reduction_scope.py), in which the collective they call finds this engine's reducer.

    stage 0, BF16_Optimizer, pipelines   engine.allreduce_bucket                    all-reduce
    stages 1 and 2, by default           allreduce_and_copy_with_multiple_ranks     to owners only
      use_multi_rank_bucket_allreduce    allreduce_bucket, with a rank              reduce
        false
      reduce_scatter false               gradient_reduction_w_predivide             all-reduce
    stage 3                              __avg_scatter_grads                        reduce-scatter
      reduce_scatter false               __avg_scatter_contiguous_grads             all-reduce

DeepSpeed's default for stages 1 and 2 is an all-reduce although each rank keeps its own partition
only; here a partition is sent to its owner alone, which halves the bytes again. Gradients that
pipeline stages share stay exact.
"""

from __future__ import annotations

import bisect
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fp4_plugin.comm.error_feedback import ErrorFeedback
from fp4_plugin.comm.factor import AutomaticFactor
from fp4_plugin.comm.reducer import GradientReducer
from fp4_plugin.comm.spec import CommunicationSpec
from fp4_plugin.comm.traffic import Segment
from fp4_plugin.integrations.deepspeed.reduction_scope import Owners, Scope, install, reducing
from fp4_plugin.integrations.patching import require_symbols

__all__ = ["reduce_gradients_in_fp8"]

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3"
# Where DeepSpeed may keep a gradient on its way.
_GRADIENT_ATTRIBUTES = ("grad", "grad_accum", "_hp_grad")
_UNKNOWN = "a parameter that is no part of the module"


def reduce_gradients_in_fp8(engine: Any, spec: CommunicationSpec) -> GradientReducer:
    """From now on `engine` reduces its gradients with the reducer that is returned.

    Raises UnsupportedError that names what this DeepSpeed version lacks.
    """
    parameters = dict(engine.module.named_parameters())
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in parameters.items()}
    reducer = GradientReducer(
        spec.codec,
        factor=AutomaticFactor() if spec.automatic_factor else None,
        feedback=ErrorFeedback(sizes) if spec.error_feedback else None,
    )
    install()
    seams = _Seams(reducer, spec.min_numel, parameters, _tied_parameters(engine))
    seams.shadow(engine, "allreduce_bucket", "bucket")
    seams.count_sparse(engine)
    optimizer = engine.optimizer
    if isinstance(optimizer, _classes("stage3", "DeepSpeedZeroOptimizer_Stage3")):
        seams.shadow_stage3(optimizer)
    elif isinstance(optimizer, _classes("stage_1_and_2", "DeepSpeedZeroOptimizer")):
        seams.shadow_stages_1_and_2(optimizer)
    return reducer


def _tied_parameters(engine: Any) -> list[Any]:
    """Parameters that other pipeline stages hold copies of.

    Each stage reduces its copy's gradient in a bucket of its own, where FP8 would round it
    differently, and the copies would drift apart.
    """
    if not engine.pipeline_parallelism:
        return []
    return [weight for weight, _ in engine.module.get_tied_weights_and_groups()]


def _classes(module: str, name: str) -> type:
    zero = importlib.import_module(f"deepspeed.runtime.zero.{module}")
    require_symbols(zero, [name])
    found: type = getattr(zero, name)
    return found


class _Seams:
    """Shadows methods of one engine and its optimizer."""

    def __init__(
        self,
        reducer: GradientReducer,
        min_numel: int,
        parameters: Mapping[str, Any],
        tied: Sequence[Any],
    ) -> None:
        self._reducer = reducer
        self._min_numel = min_numel
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = list(parameters.values())
        self._tied = frozenset(self._names[id(parameter)] for parameter in tied)

    def shadow_stages_1_and_2(self, optimizer: Any) -> None:
        for name, subject in (
            ("gradient_reduction_w_predivide", "tensor"),
            ("allreduce_bucket", "bucket"),
            ("allreduce_and_copy_with_multiple_ranks", "small_bucket"),
        ):
            self.shadow(optimizer, name, subject)

    def shadow_stage3(self, optimizer: Any) -> None:
        for name, subject in (
            (f"{_STAGE3}__avg_scatter_grads", "params_to_reduce"),
            (f"{_STAGE3}__avg_scatter_contiguous_grads", "buffer_to_reduce"),
            ("allreduce_bucket", "bucket"),
        ):
            self.shadow(optimizer, name, subject)

    def shadow(self, owner: Any, name: str, subject: str) -> None:
        """Run `owner.name` inside this engine's scope; it reduces its first argument, `subject`."""
        require_symbols(owner, [name])
        original = getattr(owner, name)

        @functools.wraps(original)
        def shadowing(*args: Any, **kwargs: Any) -> Any:
            held = args[0] if args else kwargs[subject]
            owners = _owners(held, kwargs.get("bucket_ranks"))
            scope = Scope(
                self._reducer,
                self._min_numel,
                self._tied,
                owners,
                lambda: self._describe(owner, held),
            )
            with reducing(scope):
                return original(*args, **kwargs)

        setattr(owner, name, shadowing)

    def count_sparse(self, engine: Any) -> None:
        """Sparse gradients are gathered, not added up: they stay exact, and are counted."""
        require_symbols(engine, ["sparse_allreduce"])
        original = engine.sparse_allreduce

        @functools.wraps(original)
        def counting(sparse: Any, *args: Any, **kwargs: Any) -> Any:
            self._reducer.traffic.count_exact("sparse gradients", sparse.values.numel())
            return original(sparse, *args, **kwargs)

        engine.sparse_allreduce = counting

    def _describe(self, owner: Any, held: Any) -> list[Segment]:
        """Which parameters lie where in `held`: parameters, gradients, or slices of buffers."""
        pieces = [held] if isinstance(held, torch.Tensor) else list(held)
        if all(id(piece) in self._names for piece in pieces):
            return [
                Segment(self._names[id(piece)], 0, getattr(piece, "ds_numel", piece.numel()))
                for piece in pieces
            ]
        regions = self._regions(_in_bucket(owner) or self._parameters)
        return [segment for piece in pieces for segment in _locate(piece, regions)]

    def _regions(self, parameters: Sequence[Any]) -> list[_Region]:
        """Where in memory the gradients of `parameters` are at this moment, in ascending order."""
        found = []
        for parameter in parameters:
            for attribute in _GRADIENT_ATTRIBUTES:
                gradient = getattr(parameter, attribute, None)
                if isinstance(gradient, torch.Tensor) and gradient.layout == torch.strided:
                    start = gradient.data_ptr()
                    end = start + gradient.numel() * gradient.element_size()
                    found.append(_Region(start, end, self._names.get(id(parameter), _UNKNOWN)))
        return sorted(found)


class _Region(NamedTuple):
    """Addresses [start, end) that hold the gradient of one parameter."""

    start: int
    end: int
    name: str


def _locate(piece: torch.Tensor, regions: Sequence[_Region]) -> Iterator[Segment]:
    """The segments of `piece`, a contiguous run of memory; gaps are segments without a name."""
    size = piece.element_size()
    at, end = piece.data_ptr(), piece.data_ptr() + piece.numel() * size
    index = max(0, bisect.bisect_right(regions, at, key=lambda region: region.start) - 1)
    for region in regions[index:]:
        if region.end <= at:
            continue
        if region.start >= end:
            break
        if region.start > at:
            yield Segment(_UNKNOWN, 0, (region.start - at) // size)
            at = region.start
        stop = min(region.end, end)
        yield Segment(region.name, (at - region.start) // size, (stop - at) // size)
        at = stop
    if at < end:
        yield Segment(_UNKNOWN, 0, (end - at) // size)


def _in_bucket(optimizer: Any) -> list[Any]:
    """The parameters whose gradients the optimizer has collected; [] where it keeps no such list.

    Others may still point to memory that a bucket has used again.
    """
    buckets = getattr(optimizer, "ipg_buckets", None)  # DeepSpeed 0.17 and later
    if buckets is not None:
        entries = [entry for bucket in buckets.values() for entry in bucket.params]
    else:
        entries = list(getattr(optimizer, "params_in_ipg_bucket", ()))
    groups = getattr(optimizer, "bit16_groups", None)
    if groups is None:
        return entries
    return [groups[group][index] for group, index, *_ in entries]


def _owners(bucket: Any, ranks: Any) -> Owners | None:
    """(elements, ranks that keep them) of each tensor in the bucket, if `ranks` are given."""
    if ranks is None:
        return None
    return [
        (tensor.numel(), [rank] if isinstance(rank, int) else sorted(rank))
        for tensor, rank in zip(bucket, ranks, strict=True)
    ]
