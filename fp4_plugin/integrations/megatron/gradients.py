"""FP8 gradients in Megatron's DistributedDataParallel, with and without the distributed optimizer.

A bucket group reduces its buckets in `start_grad_sync`, at the end of a step or, overlapped, as
soon as all of its gradients are there. That method stays Megatron's, checks and scaling included:
while it runs, the collective that it calls for a bucket is noted instead of made, and made
afterwards in FP8.

    without the distributed optimizer   torch.distributed.all_reduce    all-reduce
    with it                             dist_reduce_scatter_func        reduce-scatter

Parameters that tensor-parallel ranks hold copies of (norms, biases of row-parallel layers) are
reduced exactly: in FP8 a scale belongs to a block of the bucket, whose other parameters differ
from rank to rank, so that the copies would be rounded differently and drift apart.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fp4_plugin.comm.reducer import GradientReducer, Pending
from fp4_plugin.comm.spec import CommunicationSpec
from fp4_plugin.errors import MismatchError, UnsupportedError
from fp4_plugin.integrations.patching import require_symbols

__all__ = ["GradientCommunication", "refuse_conflicts"]

# Fractions cost a pass over the gradients: counted in every so many-th step, and the first.
_SAMPLING_INTERVAL = 10


def refuse_conflicts(ddp_config: Any, spec: CommunicationSpec) -> None:
    """Raise UnsupportedError for what `spec` and Megatron's settings cannot have together."""
    for name, value in (
        ("error_feedback", spec.error_feedback),
        ("automatic_factor", spec.automatic_factor),
    ):
        if value:
            raise UnsupportedError(
                f"gradient_communication.{name} keeps numbers from step to step, which Megatron's "
                f"checkpoints do not hold: set it to false"
            )
    if getattr(ddp_config, "use_megatron_fsdp", False):
        raise UnsupportedError(
            '"gradient_communication" is there for Megatron\'s DistributedDataParallel; Megatron '
            "FSDP (--use-megatron-fsdp) reduces gradients in its own way: set it to null"
        )
    if getattr(ddp_config, "num_distributed_optimizer_instances", 1) > 1:
        raise UnsupportedError(
            '"gradient_communication" with num_distributed_optimizer_instances = '
            f"{ddp_config.num_distributed_optimizer_instances}: FP8 gradients are reduced over one "
            "instance; use one, or set it to null"
        )
    if getattr(ddp_config, "reduce_scatter_with_fp32_accumulation", False):
        raise UnsupportedError(
            '"gradient_communication" and --ddp-reduce-scatter-with-fp32-accumulation replace the '
            "same collective, and both sum in float32: take one of them out"
        )


class GradientCommunication:
    """Makes the bucket groups of `models` reduce in FP8, and keeps account of it.

    models: DistributedDataParallel of Megatron; what has no bucket groups is left alone. Raises
    UnsupportedError that names what this version of Megatron lacks.
    """

    def __init__(self, models: Sequence[Any], spec: CommunicationSpec, tp_size: int) -> None:
        self._spec = spec
        self._reducer = GradientReducer(spec.codec)
        self._num_ranks = 1
        for model in models:
            if hasattr(model, "ddp_config"):
                refuse_conflicts(model.ddp_config, spec)
            for group in (
                *getattr(model, "bucket_groups", ()),
                *getattr(model, "expert_parallel_bucket_groups", ()),
            ):
                self._shadow(group, keeps_copies=tp_size > 1)

    def _shadow(self, group: Any, keeps_copies: bool) -> None:
        require_symbols(group, ["start_grad_sync", "buckets", "ddp_config"])
        self._num_ranks = max(self._num_ranks, _ranks_of(group).size())
        buckets = [_Bucket(bucket, keeps_copies) for bucket in group.buckets]
        plain = type(group).start_grad_sync

        @functools.wraps(plain)
        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> None:
            with _noting(buckets, self._takes) as calls:
                plain(group, *args, **kwargs)
            if not calls:
                return  # it has been started before
            pending = [self._reduce(call) for call in calls]
            if group.ddp_config.overlap_grad_reduce:
                group.grad_reduce_handle = _All([group.grad_reduce_handle, *pending])

        group.start_grad_sync = types.MethodType(start_grad_sync, group)

    def _takes(self, numel: int, group: Any) -> bool:
        if group.size() == 1:
            return False
        if numel < self._spec.min_numel:
            self._reducer.traffic.count_exact("smaller than min_numel", numel)
            return False
        return True

    def _reduce(self, call: _Call) -> Any:
        bucket = call.bucket
        if call.is_mean:
            bucket.grads.mul_(1.0 / call.group.size())
        copies = bucket.take_copies()
        if copies is not None:
            self._reducer.traffic.count_exact("copied on tensor-parallel ranks", len(copies))
            dist.all_reduce(copies, group=call.group)
        if call.output is None:
            pending = self._reducer.all_reduce(bucket.grads, call.group, async_op=call.async_op)
        else:
            pending = self._reducer.reduce_scatter(
                call.output, bucket.grads, call.group, async_op=call.async_op
            )

        def finish() -> None:
            if pending is not None:
                pending.wait()
            if copies is not None:
                bucket.put_copies(copies, call.output)

        if call.async_op:
            return Pending(finish)
        finish()
        return None

    def after_step(self, step: int) -> None:
        """To be called once a step is over."""
        self._reducer.traffic.sampling = step % _SAMPLING_INTERVAL == 0

    def verify(self) -> None:
        """Raise MismatchError if a step has been made and no gradient went through here."""
        traffic = self._reducer.traffic
        if self._num_ranks > 1 and not traffic.calls and not traffic.exact_calls:
            raise MismatchError(
                f'"gradient_communication" was asked for, but in the first step no gradient of the '
                f"{self._num_ranks} data-parallel ranks went through it"
            )

    def report(self) -> dict[str, Any]:
        """The entry of the manifest; counts are those of this rank."""
        return {
            "state": self._state(),
            "asked": self._spec.describe(),
            **self._reducer.traffic.report(),
        }

    def _state(self) -> str:
        traffic = self._reducer.traffic
        if self._num_ranks == 1:
            return "idle: one data-parallel rank, nothing to send"
        if not traffic.calls:
            why = ", ".join(f"{count} x {why}" for why, count in traffic.exact_calls.items())
            return f"idle: no reduction was made in FP8 so far ({why or 'none at all'})"
        return "active"


class _Bucket:
    """One of Megatron's buckets, and where in it the parameters are that other ranks copy."""

    def __init__(self, bucket: Any, keeps_copies: bool) -> None:
        self.grads: torch.Tensor = bucket.grad_data
        self._copies: list[tuple[int, int]] = []
        if keeps_copies:
            copied = [p for p in bucket.params if not _is_cut(p)]
            self._copies = sorted(self._place(parameter.main_grad) for parameter in copied)

    def _place(self, grad: torch.Tensor) -> tuple[int, int]:
        start = int(grad.storage_offset() - self.grads.storage_offset())
        return start, start + grad.numel()

    def take_copies(self) -> torch.Tensor | None:
        """What `put_copies` puts back: their gradients, one after the other."""
        if not self._copies:
            return None
        return torch.cat([self.grads[start:stop] for start, stop in self._copies])

    def put_copies(self, values: torch.Tensor, output: torch.Tensor | None) -> None:
        """Into the bucket, or, as far as they lie there, into this rank's part of it."""
        first, last = 0, len(self.grads)
        if output is not None:
            first = int(output.storage_offset() - self.grads.storage_offset())
            last = first + output.numel()
        sizes = [stop - start for start, stop in self._copies]
        for (start, stop), value in zip(self._copies, values.split(sizes), strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                self.grads[low:high] = value[low - start : high - start]


def _is_cut(parameter: torch.Tensor) -> bool:
    """Whether each tensor-parallel rank has another part of it; experts are never copied."""
    is_expert = not getattr(parameter, "allreduce", True)
    return is_expert or bool(getattr(parameter, "tensor_model_parallel", False))


@dataclass(frozen=True)
class _Call:
    """A collective that Megatron asked for. output: this rank's part, for a reduce-scatter."""

    bucket: _Bucket
    output: torch.Tensor | None
    group: Any
    is_mean: bool
    async_op: bool


class _All:
    """Several handles as one; None is one that is complete."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = [handle for handle in handles if handle is not None]

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


@contextmanager
def _noting(buckets: Sequence[_Bucket], takes: Callable[[int, Any], bool]) -> Iterator[list[_Call]]:
    """Inside, collectives on whole buckets that `takes` accepts are noted instead of made.

    Others are passed on: other threads may call the same functions meanwhile.
    """
    from megatron.core.distributed import param_and_grad_buffer as module

    require_symbols(module, ["dist_reduce_scatter_func"])
    calls: list[_Call] = []
    all_reduce, reduce_scatter = dist.all_reduce, module.dist_reduce_scatter_func

    def note(names: Sequence[str], original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            call: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
            tensor = call.get("tensor")
            bucket = next((one for one in buckets if one.grads is tensor), None)
            group = call.get("group") or dist.group.WORLD
            if bucket is None or not takes(bucket.grads.numel(), group):
                return original(*args, **kwargs)
            is_mean = call.get("op") == dist.ReduceOp.AVG
            asynchronous = bool(call.get("async_op", False))
            calls.append(_Call(bucket, call.get("output"), group, is_mean, asynchronous))
            return Pending()

        return noted

    dist.all_reduce = note(("tensor", "op", "group", "async_op"), all_reduce)
    module.dist_reduce_scatter_func = note(
        ("output", "tensor", "op", "group", "async_op"), reduce_scatter
    )
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce
        module.dist_reduce_scatter_func = reduce_scatter


def _ranks_of(group: Any) -> Any:
    """The process group that a bucket group reduces over."""
    name = "intra_distributed_optimizer_instance_group"
    found = getattr(group, name, None)
    return group.data_parallel_group if found is None else found
