"""`--dry-run`: what a job would need, computed from shapes alone (meta device, no process group).

Bytes per device follow the ZeRO paper for mixed precision with Adam: 2 bytes of weight and 2 of
gradient per parameter in BF16/FP16 (4 in FP32), and 12 of optimiser (FP32 master and two moments; 8
where the weights are FP32 themselves). Stage 1 shares the optimiser among the ranks, stage 2 the
gradients too, stage 3 also the weights. Activations and buffers come on top and are not counted.
A checkpoint holds the weights and the optimiser once, by all ranks together; under stage 3 the
weights are those of the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp4_plugin.pretrain.model import meta_model
from fp4_plugin.pretrain.sample_order import BatchLayout

__all__ = ["DryRun", "dry_run"]

GIB = 1 << 30


@dataclass(frozen=True)
class DryRun:
    """Sizes of a job. Bytes are per device, those of a checkpoint of all ranks together."""

    num_parameters: int
    num_linear_parameters: int
    zero_stage: int
    world_size: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    checkpoint_bytes: int
    tokens_per_step: int
    total_steps: int

    def lines(self) -> list[str]:
        total = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        parts = (
            ("weights", self.weight_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("together", total),
        )
        return [
            f"parameters       {self.num_parameters:,} "
            f"({self.num_linear_parameters:,} in decoder linears)",
            f"ZeRO stage {self.zero_stage} on {self.world_size} rank(s), bytes per device "
            "without activations:",
            *(f"  {name:<14} {count:>18,}  {count / GIB:8.2f} GiB" for name, count in parts),
            f"checkpoint       {self.checkpoint_bytes:,} bytes each "
            f"({self.checkpoint_bytes / GIB:.2f} GiB)",
            f"tokens per step  {self.tokens_per_step:,}",
            f"steps            {self.total_steps:,} "
            f"({self.tokens_per_step * self.total_steps:,} tokens)",
        ]


def dry_run(
    model_config: Any, ds_config: dict[str, Any], layout: BatchLayout, total_steps: int
) -> DryRun:
    """The sizes of the job that this configuration describes."""
    model = meta_model(model_config)
    count = sum(parameter.numel() for parameter in model.parameters())
    linear = sum(p.numel() for name, p in model.named_parameters() if "_proj." in name)
    stage, ranks = ds_config.get("zero_optimization", {}).get("stage", 0), layout.world_size
    is_half = any(ds_config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
    width, optimizer_width = (2, 12) if is_half else (4, 8)
    return DryRun(
        num_parameters=count,
        num_linear_parameters=linear,
        zero_stage=stage,
        world_size=ranks,
        weight_bytes=_share(count * width, ranks if stage >= 3 else 1),
        gradient_bytes=_share(count * width, ranks if stage >= 2 else 1),
        optimizer_bytes=_share(count * optimizer_width, ranks if stage >= 1 else 1),
        checkpoint_bytes=count * (optimizer_width + (width if stage < 3 else 0)),
        tokens_per_step=layout.global_batch * model_config.max_position_embeddings,
        total_steps=total_steps,
    )


def _share(num_bytes: int, num_ranks: int) -> int:
    return -(-num_bytes // num_ranks)
