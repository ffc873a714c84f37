"""A tiny Llama under DeepSpeed, as the tests of this folder train it on every rank.

Hidden size 256, so that clamping at alpha = .99 has elements to clamp. All functions run inside a
rank (tests/distributed.py) and import DeepSpeed late, as users' programs do.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fp4_plugin  # noqa: F401  (arms deepspeed.initialize)

__all__ = [
    "DECODER_LINEARS",
    "HIDDEN",
    "SEQUENCE",
    "UPSTREAM_FAULTS",
    "VOCABULARY",
    "Trainer",
    "batch",
    "deepspeed_version",
    "ds_config",
    "full_gradient",
    "gemm_calls",
    "relative_error",
    "skip_if_broken_upstream",
    "sound",
    "tiny_llama",
    "upstream_fault",
]

# As many tokens as features: a square layer must not be taken for the output head.
VOCABULARY, HIDDEN, SEQUENCE = 256, 256, 32
NUM_LAYERS = 2
LEARNING_RATE = 3e-4  # the paper's
DECODER_LINEARS = 7 * NUM_LAYERS

_ACCUMULATES_WRONGLY = "==0.17.*", "ZeRO-2 adds up micro-batches wrongly, with exact gradients too"
_SKIPS_ALONE = "==0.17.*", "ZeRO-1 in fp16: the rank that overflows skips the step alone, and hangs"
_DOES_NOT_LOAD = "==0.17.*", "a checkpoint of stage 0 in BF16 does not load"
_NOT_CLEARED = "==0.17.*", "stage 0 in BF16 never clears its gradients"
_NOT_REDUCED = "==0.18.*", "BF16_Optimizer reduces before it takes the gradients: ranks keep theirs"
_ASSERTS = "==0.16.*", "BF16_Optimizer asserts that the norm is finite, before anything is reported"
_NO_EXPERT_NORM = "<0.19", "stage 0 cannot add up the norms of experts on a CPU"
# Layouts that these DeepSpeed releases get wrong themselves, without this package.
UPSTREAM_FAULTS = {
    "zero2 fp16, accumulation": [_ACCUMULATES_WRONGLY],
    "zero1 fp16, infinite": [_SKIPS_ALONE],
    "BF16_Optimizer": [_NOT_REDUCED],
    "zero0 bf16, infinite, reported": [_ASSERTS, _NOT_CLEARED],
    "zero0 checkpoint": [_DOES_NOT_LOAD],
    "experts zero0": [_NO_EXPERT_NORM],
}


def deepspeed_version():
    """The release that is installed, without importing it."""
    return Version(Version(importlib.metadata.version("deepspeed")).base_version)


def upstream_fault(layout, version=None):
    """Why `layout` cannot be tested on this DeepSpeed release; None if it can."""
    version = version or deepspeed_version()
    for releases, reason in UPSTREAM_FAULTS.get(layout, []):
        if version in SpecifierSet(releases):
            return f"DeepSpeed {version}: {reason}"
    return None


def sound(layouts):
    """Those of `layouts` that this DeepSpeed release gets right: only these are to be run."""
    return [layout for layout in layouts if upstream_fault(layout) is None]


def skip_if_broken_upstream(layout):
    reason = upstream_fault(layout)
    if reason is not None:
        pytest.skip(reason)


def tiny_llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=512,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
    )


def ds_config(stage, fp4=None, micro_batch=2, accumulation=1, precision="bf16", **sections):
    """A DeepSpeed configuration; `precision` None trains in float32.

    All of it is new: DeepSpeed <= 0.18 takes "torch_adam" out of what it gets, and the next engine
    with the same dictionary would compile another Adam.
    """
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        # torch_adam: no compiled optimizer, hence no compiler.
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "steps_per_print": 1 << 30,
        **sections,
    }
    if precision is not None:
        config.setdefault(precision, {"enabled": True})
    return copy.deepcopy(config if fp4 is None else config | {"fp4": fp4})


def batch(step, rows=2, rank=None):
    """(rows, SEQUENCE) tokens of one rank's micro-batch `step`, learnable: a noisy count."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    noise = torch.randint(0, 3, (rows, SEQUENCE), generator=generator)
    return (start + torch.arange(SEQUENCE) + noise) % VOCABULARY


def _sharded_tiny_llama(config):
    """Built under zero.Init, then given the weights and buffers of the one built without.

    Random initialisation differs there, and floating-point buffers (RoPE's frequencies) are made
    in BF16, which DeepSpeed does not do to a model that it gets whole.
    """
    import deepspeed

    whole = tiny_llama()
    weights, buffers = whole.state_dict(), dict(whole.named_buffers())
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = tiny_llama()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(weights[name])
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]
    return model


class Trainer:
    """One engine and what a training loop needs of it."""

    def __init__(self, config=None, *, model=None, zero_init=False, **arguments):
        import deepspeed

        model = model or (_sharded_tiny_llama(config) if zero_init else tiny_llama())
        # A copy: see ds_config.
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=copy.deepcopy(config),
            **arguments,
        )

    def forward_backward(self, tokens):
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        return loss.item()

    def step(self, tokens):
        loss = self.forward_backward(tokens)
        self.engine.step()
        return loss

    def train(self, steps, first=0):
        return [self.step(batch(first + step)) for step in range(steps)]

    def close(self):
        self.engine.destroy()


def full_gradient(engine):
    """{name: float32 gradient of the whole parameter}, averaged over ranks; a collective."""
    from deepspeed.utils import safe_get_full_grad

    return {
        name: safe_get_full_grad(parameter).float().clone()
        for name, parameter in engine.module.named_parameters()
    }


def gemm_calls(engine):
    """{gemm: calls summed over the FP4 layers}; every layer has to count the same."""
    records = [module.fp4.record for module in engine.module.modules() if hasattr(module, "fp4")]
    calls = {}
    for label in ("fprop", "dgrad", "wgrad"):
        per_layer = {record.gemms[label].calls for record in records}
        assert len(per_layer) <= 1, (label, per_layer)
        calls[label] = sum(per_layer) * len(records)
    return calls


def relative_error(gradient, reference):
    """Largest over parameters of ||g - r|| / ||r||."""
    return max(
        ((gradient[name] - reference[name]).norm() / reference[name].norm()).item()
        for name in reference
    )
