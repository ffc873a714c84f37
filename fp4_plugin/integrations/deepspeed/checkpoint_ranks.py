"""What saving and loading need of other ranks: fail together, agree, notice that one is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fp4_plugin.activation import Activation
from fp4_plugin.checkpoint.files import disk_problem
from fp4_plugin.errors import CheckpointError, Fp4Error
from fp4_plugin.integrations.deepspeed.agreement import Groups, common_problem
from fp4_plugin.integrations.deepspeed.communication import EngineCommunication

__all__ = [
    "EngineCheckpoints",
    "do_together",
    "gather_parameters_again",
    "require_equal",
    "without_peers",
]

Result = TypeVar("Result")


class EngineCheckpoints:
    """What saving and loading know: an engine, its FP4 parts, and the ranks to agree with."""

    def __init__(
        self,
        engine: Any,
        activation: Activation,
        communication: EngineCommunication | None,
        groups: Groups,
    ) -> None:
        self._engine = engine
        self._activation = activation
        self._communication = communication
        self._groups = groups

    @property
    def _rank(self) -> int:
        return int(self._engine.global_rank)


def do_together(action: Callable[[], Result], groups: Groups, doing: str = "") -> Result:
    """`action()`; where it fails on one rank, all ranks raise that rank's error.

    doing: what to say of an error that is not ours, as in "loading failed: ".
    """
    problem: Fp4Error | None = None
    result: Result
    try:
        result = action()
    except Fp4Error as error:
        problem = error
    except OSError as error:
        problem = disk_problem("use", error.filename2 or error.filename or "a file", error)
        problem = _caused(CheckpointError(f"{doing}{problem}"), error)
    except Exception as error:
        problem = _caused(CheckpointError(f"{doing}{type(error).__name__}: {error}"), error)
    everyones = common_problem(problem, groups)
    if everyones is not None:
        raise everyones from (problem.__cause__ if problem is not None else None)
    return result


def _caused(problem: CheckpointError, error: Exception) -> CheckpointError:
    problem.__cause__ = error
    return problem


def gather_parameters_again(engine: Any) -> None:
    """What ZeRO-3 does at the end of a save and a load, for a rank that left it early.

    The other ranks wait for this one there.
    """
    epilogue = getattr(engine.optimizer, "checkpoint_event_epilogue", None)
    if epilogue is not None:
        epilogue()


def require_equal(what: str, values: Mapping[int, Any]) -> None:
    """Raise CheckpointError unless all ranks gave the same value for `what`."""
    if len(set(values.values())) > 1:
        given = "; ".join(f"{value!r} on rank {rank}" for rank, value in values.items())
        raise CheckpointError(
            f"the ranks do not agree on the {what} of the checkpoint: {given[:1000]}; give every "
            f"rank the same"
        )


@contextlib.contextmanager
def without_peers(doing: str) -> Iterator[None]:
    """Say what was going on when a collective fails because another rank is gone."""
    try:
        yield
    except Fp4Error:
        raise
    except RuntimeError as error:  # torch.distributed has no other class for it on all backends
        raise CheckpointError(
            f"{doing} failed, a rank has ended or does not answer: {type(error).__name__}: "
            f"{error}. See the output of the other ranks; start the job again from the last good "
            f"checkpoint"
        ) from error
