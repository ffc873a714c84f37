"""What an engine with FP4 linears does more than DeepSpeed's own.

Methods are wrapped on this engine object only, so that two engines in one process may differ:
`_take_model_step`, which `engine.step` and the pipeline engine's `train_batch` both come down to,
to verify the first step and to account for the gradients of each; and those for checkpoints.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from fp4_plugin.activation import Activation
from fp4_plugin.errors import Fp4Error, MismatchError, NotRunYet
from fp4_plugin.integrations.deepspeed.agreement import Groups, common_problem
from fp4_plugin.integrations.deepspeed.checkpoint_facts import run_facts
from fp4_plugin.integrations.deepspeed.checkpoints import attach_checkpoints
from fp4_plugin.integrations.deepspeed.communication import EngineCommunication
from fp4_plugin.integrations.patching import require_parameters, require_symbols
from fp4_plugin.telemetry.manifest import MANIFEST_NAME, write_manifest

__all__ = ["attach", "require_seams"]

logger = logging.getLogger(__name__)

_SEAMS = (
    *("_take_model_step", "save_checkpoint", "load_checkpoint", "global_rank", "global_steps"),
    *("autotp_size", "pipeline_parallelism", "zero_optimization_stage"),
    *("checkpoint_engine", "load_universal_checkpoint", "mp_world_size", "seq_dp_world_size"),
    *("save_non_zero_checkpoint", "save_zero_checkpoint", "has_moe_layers", "basic_optimizer"),
    "use_node_local_storage",
    "_config",
)
# Sections of the DeepSpeed JSON that name a folder for logs.
_FILE_MONITORS = ("csv_monitor", "tensorboard")


def require_seams(engine: Any) -> None:
    """Raise UnsupportedError that names the symbol where this DeepSpeed lacks one we rely on."""
    require_symbols(engine, _SEAMS)
    require_parameters(engine, "save_checkpoint", ["save_dir", "tag", "save_latest"])
    require_parameters(engine, "load_checkpoint", ["load_dir", "tag", "load_optimizer_states"])


def attach(
    engine: Any,
    activation: Activation,
    communication: EngineCommunication | None = None,
    groups: Groups = (None,),
) -> None:
    """Make `engine.fp4` the activation, verify the first step, make checkpoints trustworthy."""
    engine.fp4 = activation
    _account_for_steps(engine, activation, communication, groups)
    attach_checkpoints(engine, activation, communication, groups)


def _account_for_steps(
    engine: Any,
    activation: Activation,
    communication: EngineCommunication | None,
    groups: Groups,
) -> None:
    original = engine._take_model_step
    is_verified = False

    @functools.wraps(original)
    def take_model_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_verified
        # A step skipped for fp16 overflow ran its GEMMs all the same, and comes through here too.
        result = original(*args, **kwargs)
        if communication is not None:
            communication.after_step()
        if not is_verified:
            is_verified = True
            _leave_manifest_beside_logs(engine, activation)
            _verify_on_all_ranks(activation, groups)
        return result

    engine._take_model_step = take_model_step


def _verify_on_all_ranks(activation: Activation, groups: Groups) -> None:
    """Raise MismatchError on every rank, also where all is well, if it is not well somewhere."""
    problem = common_problem(_complaint(activation), groups)
    if problem is None:
        return
    message = f"the first step did not run as planned: {problem}"
    if activation.config.on_mismatch == "error":
        raise MismatchError(message)
    logger.warning("fp4: %s", message)


def _complaint(activation: Activation) -> Fp4Error | None:
    """What is wrong on this rank. A layer without tokens (an expert, say) or gradient is logged."""
    try:
        unproven = activation.verify()
    except (MismatchError, NotRunYet) as error:
        return error
    if unproven:
        shown = "; ".join(f"{report.name}: {report.reason}" for report in unproven[:5])
        logger.warning("fp4: %d layers are unproven after the first step: %s", len(unproven), shown)
    return None


def _leave_manifest_beside_logs(engine: Any, activation: Activation) -> None:
    """What the first step ran, in the folder of each file monitor that the JSON switches on."""
    if engine.global_rank != 0:
        return
    for name in _FILE_MONITORS:
        monitor = getattr(engine._config.monitor_config, name, None)
        if monitor is None or not monitor.enabled or not monitor.output_path:
            continue
        path = Path(monitor.output_path) / monitor.job_name / MANIFEST_NAME
        try:
            write_manifest(path, activation.manifest(**run_facts(engine)))
        except OSError as error:
            logger.warning("fp4: cannot write %s: %s", path, error.strerror)
