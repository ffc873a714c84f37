"""What an armed `deepspeed.initialize` does.

    1. resolve the configuration, parse its "fp4" section, refuse conflicts: nothing touched yet
    2. name the optimizer with 16-bit states, or turn the caller's into one, where it is asked for
    3. DeepSpeed builds the engine, exactly as without us
    4. all ranks compare their sections, and stop together if they differ
    5. the linears that the engine will really run become FP4 linears, in place
    6. the engine's methods that reduce gradients get an FP8 reducer
    7. all ranks compare what they converted; `engine.fp4` is the activation

Conversion comes after the engine because AutoTP replaces modules while it is built and would throw
FP4 linears away without a word; and because a call that DeepSpeed refuses leaves the model alone.
It changes classes, never a parameter, so ZeRO's partitions, hooks and states stay what they are.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from fp4_plugin.activation import Activation, activate
from fp4_plugin.config import Fp4Config, find_section, parse_section
from fp4_plugin.errors import ConfigError, Fp4Error, UnsupportedError
from fp4_plugin.integrations.deepspeed.agreement import (
    Groups,
    common_problem,
    gather,
    groups_of,
    require_agreement,
)
from fp4_plugin.integrations.deepspeed.communication import EngineCommunication
from fp4_plugin.integrations.deepspeed.ds_config import refuse_conflicts, resolve_config
from fp4_plugin.integrations.deepspeed.engine import attach, require_seams
from fp4_plugin.integrations.deepspeed.optimizer import known_to_deepspeed, prepare_optimizer
from fp4_plugin.integrations.deepspeed.optimizer_states import attach_optimizer_states

__all__ = [
    "finish_engine",
    "initialize",
    "initialize_with_fp4",
    "is_serving",
    "parsed_section",
]

logger = logging.getLogger("fp4_plugin")

_is_serving: ContextVar[bool] = ContextVar("fp4_plugin_is_serving", default=False)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` that honours the "fp4" section; same arguments, same result.

    Raises UnsupportedError where DeepSpeed is not installed.
    """
    from fp4_plugin.integrations.deepspeed.hook import is_armed

    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise UnsupportedError(
            "fp4_plugin.initialize needs DeepSpeed: pip install 'fp4-plugin[deepspeed]'"
        ) from error
    if is_armed():
        result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
        return result
    return initialize_with_fp4(deepspeed.initialize, *args, **kwargs)


def initialize_with_fp4(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """Call `original` (DeepSpeed's `initialize`) and convert the engine that it returns.

    Raises ConfigError for a bad section, a conflicting DeepSpeed feature, a model without a linear
    to convert, or ranks that disagree: the first two before a process group or a weight exists.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    ds_config = resolve_config(call.arguments)
    config = parsed_section(ds_config)
    prepare_optimizer(call.arguments, ds_config, config)
    with known_to_deepspeed(), _serving():
        result: tuple[Any, Any, Any, Any] = original(*call.args, **call.kwargs)
    finish_engine(result[0], config, call.arguments.get("mpu"))
    return result


def is_serving() -> bool:
    """Whether `initialize_with_fp4` waits for DeepSpeed's `initialize` to return.

    A DeepSpeed that is patched at the source (patched.py) then has nothing to do.
    """
    return _is_serving.get()


@contextlib.contextmanager
def _serving() -> Iterator[None]:
    token = _is_serving.set(True)
    try:
        yield
    finally:
        _is_serving.reset(token)


def finish_engine(engine: Any, config: Fp4Config | None, mpu: Any) -> None:
    """Convert an engine that DeepSpeed has built; raises as `initialize_with_fp4`.

    config: the parsed section, None where there is none. mpu: that of the call.
    """
    groups = groups_of(mpu)
    require_agreement({} if config is None else {"fp4": config.resolved()}, groups=groups)
    if config is not None and config.enabled:
        activation, communication = _prepare_on_all_ranks(engine, config, groups)
        attach(engine, activation, communication, groups)
    else:
        attach_optimizer_states(engine, None)  # asked for by name
    if config is not None and not config.enabled:
        _say('fp4: "enabled" is false: the model is left as it is')


def parsed_section(ds_config: Mapping[str, Any] | None) -> Fp4Config | None:
    """The parsed section, or None where there is none.

    Raises ConfigError for a wrong section, or one that does not go with the rest of `ds_config`.
    """
    section = None if ds_config is None else find_section(ds_config)
    if ds_config is None or section is None:
        return None
    config = parse_section(section)
    refuse_conflicts(ds_config, config)
    return config


def _prepare_on_all_ranks(
    engine: Any, config: Fp4Config, groups: Groups
) -> tuple[Activation, EngineCommunication | None]:
    """Convert `engine.module`, prepare reductions; where one rank cannot, all raise one error."""
    activation: Activation | None = None
    communication: EngineCommunication | None = None
    problem: Fp4Error | None = None
    try:
        activation = _convert(engine, config)
        spec = config.communication_spec
        if spec is not None:
            communication = EngineCommunication(engine, spec, groups)
            activation.communication = communication
        activation.optimizer_states = attach_optimizer_states(engine, config.optimizer_states)
    except Fp4Error as error:
        problem = error
    except Exception as error:
        # Whatever it is: the other ranks must not wait for this one.
        problem = UnsupportedError(f"conversion failed with {type(error).__name__}: {error}")
        problem.__cause__ = error
    problem = common_problem(problem, groups)
    if problem is not None:
        raise problem
    assert activation is not None
    _compare_layers(engine, activation, groups)
    _say(activation.banner())
    return activation, communication


def _convert(engine: Any, config: Fp4Config) -> Activation:
    require_seams(engine)
    options: dict[str, Any] = {}
    if engine.autotp_size() > 1:
        from fp4_plugin.integrations.deepspeed.tensor_parallel import fp4_forms

        options["forms"] = fp4_forms(engine.module)
    if engine.pipeline_parallelism:
        options["allow_empty"] = True  # this stage may hold no linear where another one does
    # Under ZeRO-3 saved weight codes would add up to a whole model on every rank.
    keep_weight_codes = engine.zero_optimization_stage() < 3
    return activate(engine.module, config, keep_weight_codes=keep_weight_codes, **options)


def _compare_layers(engine: Any, activation: Activation, groups: Groups) -> None:
    """The ranks of a pipeline stage hold the same layers; all stages together hold at least one."""
    stage = engine.stage_id if engine.pipeline_parallelism else 0
    require_agreement({"layers": dict.fromkeys(activation.runs, "fp4")}, stage, groups)
    num_layers = sum(gather(len(activation.runs), groups).values())
    asks_for_layers = activation.config.resolved()["linear"] is not None
    if num_layers == 0 and asks_for_layers and activation.config.on_mismatch == "error":
        raise ConfigError("no pipeline stage has a linear layer to convert")


def _say(message: str) -> None:
    """Once, on rank 0: to this package's logger, or to stderr where nobody has set up logging.

    DeepSpeed's own logger shows warnings only, and a job must not leave open what it runs.
    """
    if not _is_rank_zero():
        return
    if logger.hasHandlers():
        logger.info(message)
    else:
        print(message, file=sys.stderr, flush=True)


def _is_rank_zero() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0
