"""The LLaMA of a run: built for the ZeRO stage, with weights that depend on the seed alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["build_model", "decay_groups", "gathered", "meta_model"]


def meta_model(config: LlamaConfig) -> LlamaForCausalLM:
    """The model without storage: names, shapes, nothing else."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config)


def build_model(config: LlamaConfig, ds_config: dict[str, Any], seed: int) -> LlamaForCausalLM:
    """The model of the run in its compute dtype; partitioned while it is built under ZeRO-3."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    # Imported before zero.Init: it replaces torch functions that this import inspects.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=stage == 3):
        model = AutoModelForCausalLM.from_config(config, dtype=_compute_dtype(ds_config))
    _initialize_weights(model, config.initializer_range, seed)
    for module in model.modules():
        if isinstance(module, LlamaRotaryEmbedding):
            _restore_float32_buffers(module, LlamaRotaryEmbedding(config))
    return model


def _restore_float32_buffers(module: nn.Module, reference: nn.Module) -> None:
    """Give `module` the buffers of `reference`, on its own device.

    zero.Init makes every new tensor in the compute dtype: rotary frequencies in BF16 turn far
    positions by whole radians, and the model would not be the one that transformers loads.
    """
    for name, buffer in reference.named_buffers():
        setattr(module, name, buffer.to(getattr(module, name).device))


def _compute_dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """What DeepSpeed will cast the weights to; building in it saves the wider copy."""
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(kind, {}).get("enabled"):
            return dtype
    return torch.float32


def _initialize_weights(model: nn.Module, std: float, seed: int) -> None:
    """Norm weights 1, matrices N(0, std), one random stream per parameter.

    Done here for every stage, because under `zero.Init` the initialisation of transformers meets
    empty shards; so the first weights are the same bits for every ZeRO stage and world size.
    """
    for index, parameter in enumerate(model.parameters()):
        with gathered([parameter], modifier_rank=0) as owner, torch.no_grad():
            if not owner:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed((seed << 20) + index)
            values = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            parameter.copy_(values)


@contextlib.contextmanager
def gathered(parameters: list[nn.Parameter], modifier_rank: int | None = None) -> Iterator[bool]:
    """Whole parameters for the block, whatever the ZeRO stage; yields whether this rank has them.

    With `modifier_rank`, only that rank gets True under ZeRO-3, and its changes reach the others.
    Collective: every rank must enter with the same parameters.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield True
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(parameters, modifier_rank=modifier_rank):
        yield modifier_rank is None or torch.distributed.get_rank() == modifier_rank


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two optimiser groups: matrices with the configured weight decay, norm weights without."""
    # `ds_shape` is the whole shape under ZeRO-3, where `shape` is that of an empty shard.
    shapes = [(p, getattr(p, "ds_shape", p.shape)) for p in model.parameters()]
    return [
        {"params": [p for p, shape in shapes if len(shape) >= 2]},
        {"params": [p for p, shape in shapes if len(shape) < 2], "weight_decay": 0.0},
    ]
