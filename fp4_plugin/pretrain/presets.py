"""Model sizes by name, each with the training settings of arXiv 2501.17116.

A preset is the one dial of `fp4 pretrain`: architecture, sequence length, batch, token budget and
learning rate follow from it, and every one of them can be overridden. All are LLaMA-2 models
(RMSNorm, rotary positions, SwiGLU, untied head, no biases). The paper gives layer shapes only by
size; 1.3b takes the shape that is usual for that count, 7b and 13b are LLaMA-2's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp4_plugin.registry import Registry

if TYPE_CHECKING:
    from transformers import LlamaConfig

__all__ = ["PRESETS", "ModelPreset", "TrainingDefaults"]


@dataclass(frozen=True)
class TrainingDefaults:
    """What the paper trains with: AdamW, 5 % warm-up, cosine down to 10 % of the peak."""

    peak_lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_fraction: float = 0.05
    min_lr_fraction: float = 0.1
    gradient_clipping: float = 1.0
    batch_sequences: int = 2048
    micro_batch: int = 1
    budget_tokens: int = 100_000_000_000


@dataclass(frozen=True)
class ModelPreset:
    """One LLaMA-2 shape; `vocab_size` counts the rows of the embedding, used or not."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    seq_len: int = 2048
    vocab_size: int = 32_000
    training: TrainingDefaults = field(default_factory=TrainingDefaults)

    def llama_config(
        self, *, vocab_size: int | None = None, seq_len: int | None = None
    ) -> LlamaConfig:
        """The transformers configuration; arguments that are not None replace the preset's."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=vocab_size or self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            max_position_embeddings=seq_len or self.seq_len,
            rms_norm_eps=1e-5,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )


# 257 byte-level ids (256 bytes and the end of a document), rounded up so that rows stay aligned.
BYTE_VOCAB_SIZE = 320

PRESETS: Registry[ModelPreset] = Registry("model preset")

_TINY_TRAINING = TrainingDefaults(
    # 100 steps of 2,048 tokens: a rate that suits so short a run, not the paper's.
    peak_lr=1e-3,
    batch_sequences=8,
    micro_batch=8,
    budget_tokens=204_800,
)
# About 20 tokens per parameter, and the batch of the paper's ablations.
_60M_TRAINING = TrainingDefaults(batch_sequences=256, micro_batch=16, budget_tokens=1_200_000_000)
_400M_TRAINING = TrainingDefaults(batch_sequences=256, micro_batch=8, budget_tokens=8_000_000_000)

for _preset in (
    ModelPreset("tiny", 256, 688, 4, 4, 256, BYTE_VOCAB_SIZE, training=_TINY_TRAINING),
    ModelPreset("60m", 512, 1376, 8, 8, training=_60M_TRAINING),
    ModelPreset("400m", 1024, 2816, 26, 16, training=_400M_TRAINING),
    ModelPreset("1.3b", 2048, 5504, 24, 16, training=TrainingDefaults(micro_batch=4)),
    ModelPreset("7b", 4096, 11008, 32, 32),
    ModelPreset("13b", 5120, 13824, 40, 40),
):
    PRESETS.register(_preset.name, _preset)
