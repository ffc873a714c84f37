"""One training job under Megatron: what its functions hand over, and the proof after a step.

get_model                built    layers are FP4 already (model.py); gradients get their reducer
 or, where it is not the
 one that builds         convert  the same, with layers that are still Megatron's
get_megatron_optimizer   stepper  the optimizer keeps 16-bit states
train_step               stepped  the first one is verified, a manifest is left
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4_plugin.activation import Activation, activation_of
from fp4_plugin.config import Fp4Config
from fp4_plugin.errors import ConfigError, NotRunYet
from fp4_plugin.integrations.deepspeed.agreement import gather, require_agreement
from fp4_plugin.integrations.megatron.gradients import GradientCommunication
from fp4_plugin.integrations.megatron.optimizer import OptimizerStates
from fp4_plugin.telemetry.manifest import MANIFEST_NAME, write_manifest

__all__ = ["MegatronJob"]

logger = logging.getLogger("fp4_plugin")


class MegatronJob:
    """config: the section. Its methods are called by every rank, at the same places."""

    def __init__(self, config: Fp4Config) -> None:
        self._config = config
        self._activations: list[Activation] = []
        self._gradients: GradientCommunication | None = None
        self._states: OptimizerStates | None = None
        self._steps = 0
        self.has_models = False

    def convert(self, models: Sequence[Any], tp_size: int) -> None:
        """As `built`, and turns their linears into FP4 layers first: no parameter is replaced."""
        from fp4_plugin.integrations.megatron.model import convert_megatron_model

        for model in models:
            convert_megatron_model(_unwrapped(model), self._config)
        self.built(models, tp_size)

    def built(self, models: Sequence[Any], tp_size: int) -> None:
        """models: the chunks of this rank, wrapped for data parallelism or not.

        Raises ConfigError on all ranks if they have different sections, or no FP4 layer among them.
        """
        self.has_models = True
        found = [activation_of(model) for model in models]
        activations = [activation for activation in found if activation is not None]
        require_agreement({"config_hash": self._config.hash()})
        num_layers = sum(len(activation.runs) for activation in activations)
        wants_layers = self._config.enabled and self._config.resolved()["linear"] is not None
        if wants_layers and not any(gather(num_layers).values()):
            self._complain("no rank has a linear layer to convert: check the model and 'layers'")
        spec = self._config.communication_spec
        is_trained = any(hasattr(model, "ddp_config") for model in models)
        if self._config.enabled and spec is not None and is_trained:
            self._gradients = GradientCommunication(models, spec, tp_size)
        for activation in activations:
            activation.communication = self._gradients
            _say(activation.banner())
        self._activations += activations

    def stepper(self, optimizer: Any) -> None:
        """optimizer: Megatron's, before its first step. Raises as `OptimizerStates`."""
        asked = self._config.optimizer_states
        if not self._config.enabled or asked is None:
            return
        self._states = OptimizerStates(optimizer, asked)
        for activation in self._activations:
            activation.optimizer_states = self._states
        _say(f"fp4: optimizer states are {asked['exp_avg']} and {asked['exp_avg_sq']}")

    def stepped(self, folder: Path | None) -> None:
        """After a step; after the first one, raise MismatchError unless what was planned ran.

        folder: where rank 0 leaves its manifest, None for nowhere.
        """
        self._steps += 1
        if self._gradients is not None:
            self._gradients.after_step(self._steps)
        if self._steps == 1:
            self._verify()
            self.leave_manifest(folder)

    def leave_manifest(self, folder: Path | None) -> None:
        """Write what has run so far into `folder`, for rank 0; it holds this rank's chunks."""
        if folder is None or not self._activations or not _is_first_rank():
            return
        for index, activation in enumerate(self._activations):
            stem, dot, suffix = MANIFEST_NAME.partition(".")
            name = MANIFEST_NAME if index == 0 else f"{stem}_{index}{dot}{suffix}"
            write_manifest(folder / name, activation.manifest(framework="megatron"))

    def _verify(self) -> None:
        if not self.has_models and self._config.enabled:
            self._complain("a step was made, and no model was seen before: nothing is in FP4")
        for activation in self._activations:
            try:
                unproven = activation.verify()
            except NotRunYet:
                if self._config.on_mismatch == "error" and activation.runs:
                    raise
                unproven = activation.reports()
            for report in unproven:
                if _is_first_rank():
                    logger.warning("fp4: %s is not proven yet: %s", report.name, report.reason)
        parts = (("gradients", self._gradients), ("optimizer states", self._states))
        others = [f"{name}: {part.report()['state']}" for name, part in parts if part is not None]
        num_layers = sum(len(activation.runs) for activation in self._activations)
        _say("; ".join([f"fp4: step 1: {num_layers} layers of this rank ran in FP4", *others]))

    def _complain(self, message: str) -> None:
        if self._config.on_mismatch == "error":
            raise ConfigError(message)
        if _is_first_rank():
            logger.warning("fp4: %s", message)


def _unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel, Float16Module and their like."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _say(message: str) -> None:
    """As Megatron does: on standard output of the first rank."""
    if _is_first_rank():
        print(message, flush=True)


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0
