"""FP4 layers by Megatron's own `--spec`, for a script that is started without our launcher:

    FP4_PLUGIN_CONFIG=fp4.json torchrun ... pretrain_gpt.py ... \\
        --transformer-impl local --spec fp4_plugin.integrations.megatron.spec layer_spec

`layer_spec` is Megatron's local layer for dense models, which turns its own linears into FP4 layers
once it is built. A layer sees neither the optimizer nor the gradients of others nor its place in
the model: what needs these is refused, and the launcher has it. Each layer proves itself: from the
second forward on it raises MismatchError if its GEMMs did not run as planned.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from fp4_plugin.config import Fp4Config, parse_section
from fp4_plugin.errors import ConfigError, NotRunYet
from fp4_plugin.integrations.megatron.launch import read_section
from fp4_plugin.integrations.megatron.model import convert_megatron_model

__all__ = ["VARIABLE", "FP4TransformerLayer", "layer_spec"]

VARIABLE = "FP4_PLUGIN_CONFIG"


def _read_config() -> Fp4Config:
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(
            f"--spec fp4_plugin.integrations.megatron.spec reads the section from the file that "
            f"the environment variable {VARIABLE} names, and it is not set: export "
            f"{VARIABLE}=fp4.json on every node"
        )
    config = parse_section(read_section(Path(path)))
    for key, value in (
        ("gradient_communication", config.communication_spec),
        ("optimizer_states", config.optimizer_states),
        ("layers", config.layers or None),
    ):
        if config.enabled and value is not None:
            raise ConfigError(
                f'{path}: "{key}" needs the launcher (python -m fp4_plugin.integrations.megatron), '
                f"a layer made by --spec cannot honour it: "
                + ("leave it out" if key == "layers" else "set it to null")
            )
    return config


_CONFIG = _read_config()


class FP4TransformerLayer(TransformerLayer):
    """Megatron's TransformerLayer with FP4 linears; parameters and state-dict names are the same.

    Raises as `convert_megatron_model`.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        activation = convert_megatron_model(self, _CONFIG)
        # No attribute of a module: an activation refers to its model, and is no part of it.
        self.__dict__["_fp4_unproven"] = activation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in Megatron."""
        activation = self.__dict__["_fp4_unproven"]
        if activation is not None and self.training:
            try:
                if not activation.verify():
                    self.__dict__["_fp4_unproven"] = None
            except NotRunYet:
                pass  # no backward yet: the first step, or a pipeline that is filling
        return super().forward(*args, **kwargs)


layer_spec = ModuleSpec(
    module=FP4TransformerLayer, submodules=get_gpt_layer_local_spec().submodules
)
