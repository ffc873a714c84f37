"""All ranks answer one question together, so that none trains on while another stops.

Every public function here is a collective over the ranks of one engine: each has to call it, and
each gets the same answer. These are all ranks of the job, unless the caller of
`deepspeed.initialize` has given an `mpu`: then other ranks may build no engine at all, and waiting
for them would be for ever. Without a process group, or with one rank, nothing is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp4_plugin.errors import ConfigError, Fp4Error

__all__ = ["Groups", "common_problem", "gather", "groups_of", "require_agreement"]

# Process groups that make up the ranks of an engine as a grid; None is the whole job.
Groups = Sequence[Any]

_ABSENT = object()
_MAX_REPORTED = 8
_MAX_CHARACTERS = 60


def groups_of(mpu: Any) -> Groups:
    """The groups of an engine whose `deepspeed.initialize` was given `mpu` (None for none)."""
    if mpu is None:
        return (None,)
    return (mpu.get_data_parallel_group(), mpu.get_model_parallel_group())


def gather(value: Any, groups: Groups = (None,)) -> dict[int, Any]:
    """Rank -> `value` there, in rank order; `value` has to be picklable and small."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {0: value}
    found = {dist.get_rank(): value}
    for group in groups:
        parts: list[Any] = [found]
        if dist.get_world_size(group) > 1:
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group)
        found = {rank: one for part in parts for rank, one in part.items()}
    return dict(sorted(found.items()))


def common_problem(problem: Fp4Error | None, groups: Groups = (None,)) -> Fp4Error | None:
    """One error for all ranks that lists what each rank complains about; None if no rank does."""
    problems: dict[int, Fp4Error | None] = gather(problem, groups)
    found = [one for one in problems.values() if one is not None]
    if not found or len(problems) == 1:
        return problem
    ranks: dict[str, list[int]] = {}
    for rank, one in problems.items():
        if one is not None:
            ranks.setdefault(str(one), []).append(rank)
    lines = [f"on rank {_enumerate(where)}: {text}" for text, where in ranks.items()]
    return type(found[0])("\n".join(lines[:_MAX_REPORTED]))


def require_agreement(
    statement: Mapping[str, Any], cohort: int = 0, groups: Groups = (None,)
) -> None:
    """Raise ConfigError on every rank unless all ranks of each cohort state the same.

    `statement` is nested JSON objects. The error names each key path that differs, the values and
    the ranks that hold them. Only digests travel while everybody agrees.
    """
    views = set(gather((cohort, _digest(statement)), groups).values())
    if len(views) == len({one for one, _ in views}):
        return
    by_cohort: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, (one, stated) in gather((cohort, statement), groups).items():
        by_cohort.setdefault(one, {})[rank] = stated
    raise ConfigError(_describe(by_cohort.values()))


def _digest(statement: Mapping[str, Any]) -> str:
    text = json.dumps(statement, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(cohorts: Iterable[Mapping[int, Mapping[str, Any]]]) -> str:
    found = [difference for cohort in cohorts for difference in _differences(cohort, "")]
    lines = [f"  {path}: {_by_value(values)}" for path, values in found[:_MAX_REPORTED]]
    if len(found) > _MAX_REPORTED:
        lines.append(f"  ... and {len(found) - _MAX_REPORTED} more")
    return (
        "the ranks do not agree on FP4 training; give every rank the same configuration and model\n"
        + "\n".join(lines)
    )


def _differences(values: Mapping[int, Any], path: str) -> Iterator[tuple[str, Mapping[int, Any]]]:
    """(key path, rank -> value) of the outermost places where the ranks differ."""
    distinct = list(values.values())
    if all(value == distinct[0] for value in distinct):
        return
    if not all(isinstance(value, Mapping) for value in distinct):
        yield path, values
        return
    for key in dict.fromkeys(key for value in distinct for key in value):
        children = {rank: value.get(key, _ABSENT) for rank, value in values.items()}
        yield from _differences(children, f"{path}.{key}" if path else str(key))


def _by_value(values: Mapping[int, Any]) -> str:
    """As in '"row" on rank 0, 2; "tensor" on rank 1'."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(_shorten(value), []).append(rank)
    return "; ".join(f"{text} on rank {_enumerate(where)}" for text, where in ranks.items())


def _shorten(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _enumerate(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_REPORTED]))
    return shown if len(ranks) <= _MAX_REPORTED else f"{shown}, ... ({len(ranks)} ranks)"
