"""The FP8 gradient communication of one engine over its life: steps, logs, checkpoints, proof."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from typing import Any

from fp4_plugin.comm.spec import CommunicationSpec
from fp4_plugin.comm.transport import members_of
from fp4_plugin.errors import MismatchError, NotRunYet
from fp4_plugin.integrations.deepspeed.agreement import Groups, gather
from fp4_plugin.integrations.deepspeed.communication_memory import Memory
from fp4_plugin.integrations.deepspeed.gradients import reduce_gradients_in_fp8
from fp4_plugin.integrations.deepspeed.reduction_scope import exact_reductions
from fp4_plugin.integrations.deepspeed.timeouts import device_of, use_job_timeout

__all__ = ["EngineCommunication"]

logger = logging.getLogger("fp4_plugin")

# Fractions cost a pass over the gradients: counted in every so many-th step, and the first.
_SAMPLING_INTERVAL = 10


class EngineCommunication:
    """Makes `engine` reduce its gradients in FP8 and keeps account of it.

    memory: what error feedback and the automatic factor keep from step to step. Raises
    UnsupportedError that names what this DeepSpeed version lacks.
    """

    def __init__(self, engine: Any, spec: CommunicationSpec, groups: Groups) -> None:
        # Weakly: the engine's module is the key of a registry that leads here.
        self._engine_ref = weakref.ref(engine)
        self._spec = spec
        self._groups = groups
        self._num_ranks = max(engine.dp_world_size, engine.seq_dp_world_size)
        self._reducer = reduce_gradients_in_fp8(engine, spec)
        self.memory = Memory(engine, self._reducer, self._num_ranks)
        use_job_timeout(engine)
        self._skipped_steps = engine.skipped_steps
        self._written_bytes = 0
        self._num_calls = 0
        self._steps_without = 0
        self._non_finite: dict[int, list[Any]] = {}
        self._exact_before = exact_reductions()

    @property
    def _engine(self) -> Any:
        engine = self._engine_ref()
        if engine is None:
            raise NotRunYet("the engine whose gradients were reduced no longer exists")
        return engine

    def verify(self) -> None:
        """Raise MismatchError if a step has been made and its gradients were not reduced in FP8."""
        traffic = self._reducer.traffic
        if self._num_ranks == 1 or traffic.calls:
            return
        if traffic.exact_calls:
            if self._engine.global_rank == 0:
                logger.warning('fp4: "gradient_communication": %s', self._state())
            return
        others = ", ".join(self._exact_sums()) or "none"
        raise MismatchError(
            f'"gradient_communication" was asked for, but in the first step no gradient of the '
            f"{self._num_ranks} data-parallel ranks went through it. An optimizer or engine that "
            f"reduces gradients in its own way cannot be served; other reductions seen: {others}"
        )

    def after_step(self) -> None:
        """To be called once an optimizer step is over, also if it was skipped."""
        engine, traffic = self._engine, self._reducer.traffic
        skipped = engine.skipped_steps > self._skipped_steps
        self._skipped_steps = engine.skipped_steps
        self._report_non_finite(skipped)
        self._notice_bypass()
        self.memory.after_step(skipped)
        if self._reducer.factor is not None and self._num_ranks > 1:
            self._reducer.factor.step(members_of(engine.seq_data_parallel_group))
        self._write_monitor()
        traffic.sampling = engine.global_steps % _SAMPLING_INTERVAL == 0

    def report(self) -> dict[str, Any]:
        """The entry of the manifest; counts are those of this rank."""
        factor = self._reducer.factor
        return {
            "state": self._state(),
            "asked": self._spec.describe(),
            **self._reducer.traffic.report(),
            "non_finite_of_other_ranks": self._non_finite,
            "steps_without_reduction": self._steps_without,
            "exact_float_sums_of_process": self._exact_sums(),
            **({} if factor is None else {"automatic_factor": factor.value}),
        }

    def _state(self) -> str:
        traffic = self._reducer.traffic
        if self._num_ranks == 1:
            return "idle: one data-parallel rank, nothing to send"
        if traffic.exact_calls and not traffic.calls:
            why = ", ".join(f"{count} x {why}" for why, count in traffic.exact_calls.items())
            return f"idle: no reduction was made in FP8 so far, all were exact ({why})"
        return "active"

    def _notice_bypass(self) -> None:
        """Some optimizers (1-bit Adam) reduce in their own way after a while."""
        traffic = self._reducer.traffic
        num_calls = traffic.calls.total() + traffic.exact_calls.total()
        had_one_before, had_none = self._num_calls > 0, num_calls == self._num_calls
        self._num_calls = num_calls
        if self._num_ranks > 1 and had_none:
            self._steps_without += 1
            if had_one_before and self._steps_without == 1:
                logger.warning(
                    'fp4: rank %d: step %d: no gradient went through "gradient_communication" '
                    "any more; whatever reduces them now, it is not FP8",
                    self._engine.global_rank,
                    self._engine.global_steps,
                )

    def _exact_sums(self) -> dict[str, int]:
        """Elements of exact float sums since this engine was made, by the function that asked."""
        return dict(exact_reductions() - self._exact_before)

    def exchange_reports(self) -> None:
        """Let rank 0 know what was not finite elsewhere; all ranks call this together."""
        import torch.distributed as dist

        found = gather(self._reducer.traffic.report()["non_finite"], self._groups)
        self._non_finite = {
            rank: events for rank, events in found.items() if events and rank != dist.get_rank()
        }

    def _report_non_finite(self, skipped: bool) -> None:
        """Name the parameters whose gradients were not finite before they were sent."""
        traffic = self._reducer.traffic
        if device_of(self._engine).type != "cpu" and not skipped and self._norm_is_finite():
            traffic.forget()  # asking the device in every step would cost more than it tells
            return
        for event in traffic.settle():
            logger.warning(
                "fp4: rank %d: step %d: %d gradient blocks are not finite, in %s",
                self._engine.global_rank,
                self._engine.global_steps,
                event.blocks,
                ", ".join(event.parameters[:8]) or "parameters unknown",
            )

    def _norm_is_finite(self) -> bool:
        norm = self._engine.get_global_grad_norm()
        return norm is None or math.isfinite(float(norm))

    def _write_monitor(self) -> None:
        """Wire bytes of this step, and the fractions when they were counted, on rank 0."""
        engine, traffic = self._engine, self._reducer.traffic
        if engine.global_rank != 0 or not engine.monitor.enabled or not traffic.calls:
            return
        values: Mapping[str, float | None] = {
            "wire_bytes": traffic.wire_bytes - self._written_bytes,
            "wire_ratio_to_bf16": traffic.wire_bytes / traffic.bf16_bytes,
            "non_finite_blocks": traffic.non_finite_blocks,
            **(
                {f"{k}_fraction": v for k, v in traffic.fractions().items()}
                if traffic.sampling
                else {}
            ),
        }
        self._written_bytes = traffic.wire_bytes
        engine.monitor.write_events(
            [
                (f"Train/Samples/fp4_gradient_{name}", value, engine.global_samples)
                for name, value in values.items()
                if value is not None
            ]
        )
