"""What a linear is for, by the last part of its name: the same word in every framework.

Two manifests of one model, trained under DeepSpeed and under Megatron, are compared by these.
Megatron fuses q, k and v into one linear, and gate and up into another.
"""

from __future__ import annotations

__all__ = ["ROLES", "role_of"]

# Role -> names in Hugging Face's models and in Megatron's.
ROLES: dict[str, tuple[str, ...]] = {
    "attention in": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "linear_qkv"),
    "attention out": ("o_proj", "out_proj", "linear_proj"),
    "mlp in": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "linear_fc1"),
    "mlp out": ("down_proj", "fc2", "linear_fc2"),
    "head": ("lm_head", "output_layer"),
    "embedding": ("embed_tokens", "word_embeddings"),
}

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}


def role_of(name: str) -> str | None:
    """The role of the module with dotted `name`; None where the table has no such name."""
    return _ROLE_OF.get(name.rpartition(".")[2])
