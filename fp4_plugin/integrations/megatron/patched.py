"""What a Megatron-LM calls whose source carries patches/megatron-lm-*.patch.

Its training.py calls `attach` where model and optimizer are made and no checkpoint is loaded yet,
and `stepped` after each step. No function of Megatron's is replaced: compare launch.py, which does
the same to a checkout that stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4_plugin.integrations.deepspeed.hook import disarm
from fp4_plugin.integrations.megatron.job import MegatronJob
from fp4_plugin.integrations.megatron.launch import (
    config_from_file,
    job_folder,
    tensor_parallel_size,
)

__all__ = ["attach", "stepped"]

_job: MegatronJob | None = None


def attach(path: str, models: Sequence[Any], optimizer: Any) -> None:
    """Turn `models` (chunks, wrapped or not) into FP4 models, as the section in `path` says.

    optimizer: Megatron's, or None where nothing is trained. Raises as `config_from_file`,
    `convert_megatron_model` and `OptimizerStates`.
    """
    global _job
    disarm()  # importing this package armed it, and who patches a source wants no hook
    job = MegatronJob(config_from_file(Path(path), sys.argv[1:]))
    job.convert(models, tensor_parallel_size())
    if optimizer is not None:
        job.stepper(optimizer)
    _job = job


def stepped() -> None:
    """After a step: the first one is verified, and leaves the manifest. Raises MismatchError."""
    assert _job is not None, "attach comes first"
    _job.stepped(job_folder())
