"""From a model that Megatron has built to FP4 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fp4_plugin.activation import Activation, activate
from fp4_plugin.config import Fp4Config, parse_section
from fp4_plugin.errors import UnsupportedError
from fp4_plugin.integrations.megatron.layers import TensorParallel, fp4_forms

__all__ = ["convert_megatron_model", "refuse_conflicts"]

# Attributes of Megatron's models that hold the linear from hidden states to logits.
_HEADS = ("output_layer", "lm_head")


def convert_megatron_model(model: nn.Module, section: Mapping[str, Any] | Fp4Config) -> Activation:
    """Turn the linears of `model`, fresh from its constructor, into FP4 layers in place.

    The output layer and the embeddings keep high precision. Raises ConfigError for a wrong section
    and, except for a pipeline stage, for a model without a linear to convert; UnsupportedError for
    a configuration of Megatron that excludes FP4 layers.
    """
    config = parse_section(section)
    transformer = getattr(model, "config", None)
    refuse_conflicts(transformer, config)
    settings = TensorParallel(**config.tensor_parallel)
    is_stage = getattr(transformer, "pipeline_model_parallel_size", 1) > 1
    return activate(
        model, config, forms=fp4_forms(settings), heads=_heads(model), allow_empty=is_stage
    )


def _heads(model: nn.Module) -> list[nn.Module]:
    found = (getattr(module, name, None) for module in model.modules() for name in _HEADS)
    return [head for head in found if isinstance(head, nn.Module)]


def refuse_conflicts(transformer: Any, config: Fp4Config) -> None:
    """Raise UnsupportedError where Megatron's TransformerConfig and the section contradict.

    Megatron's own "fp4" and "fp8" are Transformer Engine's: beside our layers they would be a
    second quantisation, or (in its local layers) nothing at all.
    """
    if not config.enabled:
        return
    for name in ("fp4", "fp8"):
        if getattr(transformer, name, None):
            raise UnsupportedError(
                f"Megatron's {name}={getattr(transformer, name)!r} and the fp4_plugin section both "
                f"quantise linear layers: take --{name}-format out of the command, or the section"
            )
    linear = config.resolved()["linear"] or {}
    outliers = (linear.get("input") or {}).get("outliers") or {}
    if getattr(transformer, "context_parallel_size", 1) > 1 and outliers.get("scope") == "tensor":
        raise UnsupportedError(
            "linear.input.outliers.scope 'tensor' needs all tokens of a sequence on one rank, but "
            f"context_parallel_size is {transformer.context_parallel_size}: use scope 'row'"
        )
    if getattr(transformer, "enable_cuda_graph", False) and outliers.get("scope") == "tensor":
        raise UnsupportedError(
            "linear.input.outliers.scope 'tensor' has shapes that depend on the data, which a CUDA "
            "graph cannot hold: use scope 'row', or leave CUDA graphs off"
        )
