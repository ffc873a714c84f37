"""Run a training script of Megatron-LM with FP4 layers:

    torchrun -m fp4_plugin.integrations.megatron pretrain_gpt.py ... --fp4-plugin-config fp4.json

The file holds the section itself, or a DeepSpeed configuration that has it under "fp4". The script
stays as it is: three functions of megatron.training are wrapped, those that build the model, make
the optimizer and do a step. The first step is verified, and rank 0 leaves fp4_manifest.json in the
folder of --save, else of --tensorboard-dir.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4_plugin.config import Fp4Config, parse_section
from fp4_plugin.errors import ConfigError, Fp4Error, UnsupportedError
from fp4_plugin.integrations.deepspeed.ds_config import read_config, section_in
from fp4_plugin.integrations.patching import Patch, patch_function

__all__ = [
    "FLAG",
    "config_from_file",
    "install",
    "job_folder",
    "main",
    "read_section",
    "tensor_parallel_size",
]

FLAG = "--fp4-plugin-config"
# Megatron's own, which need Transformer Engine and quantise the same layers.
_CLASHING = ("--fp4-format", "--fp4-recipe", "--fp4-param-gather", "--fp4-quantizer-factory")


def main(argv: Sequence[str] | None = None) -> int:
    """The script's name comes first, its own arguments follow. Returns 2 for a wrong request."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m fp4_plugin.integrations.megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", type=Path, help="pretrain_gpt.py of a Megatron-LM checkout")
    parser.add_argument(FLAG, type=Path, required=True, metavar="FILE", help="JSON, see above")
    options, rest = parser.parse_known_args(arguments)
    try:
        config = config_from_file(options.fp4_plugin_config, rest)
        if not options.script.is_file():
            raise ConfigError(f"there is no script {options.script}")
        # As `python script.py` would: the checkout's megatron.training is found beside it.
        sys.path.insert(0, str(options.script.resolve().parent))
        install(config)
    except Fp4Error as error:
        print(f"fp4: error: {error}", file=sys.stderr)
        return 2
    sys.argv = [str(options.script), *rest]
    runpy.run_path(str(options.script), run_name="__main__")
    return 0


def config_from_file(path: Path, arguments: Sequence[str]) -> Fp4Config:
    """The section in `path`, for a job with the command line `arguments`.

    Raises ConfigError for a wrong section, and for arguments that ask for Megatron's own FP4.
    """
    _refuse_clashes(arguments)
    return parse_section(read_section(path))


def _refuse_clashes(arguments: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.split("=")[0]
        if name in _CLASHING:
            raise ConfigError(
                f"{name} is Megatron's own FP4, by Transformer Engine, and {FLAG} is ours: both "
                "would quantise the same layers; take one of them out"
            )


def read_section(path: Path) -> Mapping[str, Any]:
    """The section in `path`, which is a file of its own or a DeepSpeed configuration.

    Raises ConfigError if it cannot be read or holds none.
    """
    return section_in(read_config(path), path)


def install(config: Fp4Config) -> list[Patch]:
    """Wrap megatron.training; a second call changes nothing. Undo each patch to take it back.

    Raises UnsupportedError where Megatron-LM has no such functions.
    """
    from fp4_plugin.integrations.megatron.job import MegatronJob

    training = _megatron_training()
    job = MegatronJob(config)

    def get_model(original: Any, model_provider_func: Any, *args: Any, **kwargs: Any) -> Any:
        from fp4_plugin.integrations.megatron.model import convert_megatron_model

        def provide(*provider_args: Any, **provider_kwargs: Any) -> Any:
            model = model_provider_func(*provider_args, **provider_kwargs)
            convert_megatron_model(model, config)
            return model

        models = original(provide, *args, **kwargs)
        job.built(models, tensor_parallel_size())
        return models

    def get_megatron_optimizer(
        original: Any, optimizer_config: Any, model_chunks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not job.has_models:  # pretrain_gpt.py of 0.19 builds its model without get_model
            job.convert(model_chunks, tensor_parallel_size())
        optimizer = original(optimizer_config, model_chunks, *args, **kwargs)
        job.stepper(optimizer)
        return optimizer

    def train_step(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        job.stepped(job_folder())
        return result

    return [
        patch_function(training, "get_model", get_model, ["model_provider_func"]),
        patch_function(training, "get_megatron_optimizer", get_megatron_optimizer),
        patch_function(training, "train_step", train_step),
    ]


def tensor_parallel_size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_world_size())


def job_folder() -> Path | None:
    """Where a job of Megatron leaves files, if it leaves any."""
    from megatron.training import get_args

    arguments = get_args()
    found = getattr(arguments, "save", None) or getattr(arguments, "tensorboard_dir", None)
    return Path(found) if found else None


def _megatron_training() -> Any:
    try:
        from megatron.training import training
    except ImportError as error:
        raise UnsupportedError(
            f"megatron.training cannot be imported ({error}): the script has to be that of a "
            "Megatron-LM checkout, and the packages that it needs have to be installed"
        ) from error
    return training
