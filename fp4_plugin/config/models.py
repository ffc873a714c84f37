"""The keys of the `fp4` section. A key is here if it works, not before.

The models describe what a user writes: every key is optional, and its default is what the `paper`
recipe has.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "SECTION",
    "UNQUANTIZED",
    "GradientCommunicationConfig",
    "LinearConfig",
    "OptimizerStatesConfig",
    "SectionModel",
    "TensorParallelConfig",
]

SECTION = "fp4"
UNQUANTIZED = "bf16"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OutliersConfig(_Strict):
    """Clamp outliers of the input before it is quantised, and add them back sparsely."""

    alpha: float = Field(
        default=0.99, gt=0.5, le=1, description="Quantile that is kept; paper: 0.99, 1 is off."
    )
    compensation: Literal["sparse"] | None = Field(
        default="sparse", description="Multiply what was cut off in high precision; null drops it."
    )
    scope: Literal["row", "tensor"] = Field(
        default="row",
        description="Thresholds per token (causal) or for the whole tensor (not causal).",
    )


class OperandConfig(_Strict):
    """How one operand of the linear layers is quantised."""

    format: str = Field(
        default="e2m1", description="Number format, or bf16 to leave it unquantised."
    )
    granularity: Literal["row", "tensor"] = Field(
        default="row",
        description="One scale per row along the contraction axis, or one per tensor.",
    )
    rounding: Literal["nearest", "half_up"] = Field(
        default="nearest", description="Ties to even, or ties toward +infinity."
    )
    scale: Literal["absmax", "pow2"] = Field(
        default="absmax",
        description="Use the whole grid, or round the scale down to a power of two.",
    )


class WeightConfig(OperandConfig):
    estimator: dict[str, Any] = Field(
        default_factory=lambda: {"name": "dge"},
        description="Gradient estimator: its name and parameters; ste for none.",
    )


class InputConfig(OperandConfig):
    outliers: OutliersConfig | None = Field(
        default_factory=OutliersConfig, description="Outlier clamping; null switches it off."
    )


class GradOutputConfig(OperandConfig):
    format: str = Field(default="e5m2", description="Format that grad_output is cast to for GEMMs.")
    scale: Literal["absmax", "pow2"] = Field(
        default="pow2",
        description="pow2 keeps the rounding of E5M2 independent of the batch; absmax for 4 bits.",
    )


class LinearConfig(_Strict):
    """The linear layers: three operands, three GEMMs."""

    weight: WeightConfig = Field(default_factory=WeightConfig)
    input: InputConfig = Field(default_factory=InputConfig)
    grad_output: GradOutputConfig = Field(default_factory=GradOutputConfig)
    fprop: Literal["fp4", "fp8", "bf16"] = Field(
        default="fp4", description="Arithmetic of the forward."
    )
    dgrad: Literal["fp4", "fp8", "bf16"] = Field(
        default="fp8", description="... of the input gradient."
    )
    wgrad: Literal["fp4", "fp8", "bf16"] = Field(
        default="fp8", description="... of the weight gradient."
    )


class GradientCommunicationConfig(_Strict):
    """Gradients travel as FP8 blocks and are summed in float32."""

    format: Literal["e4m3", "e5m2"] = Field(
        default="e4m3", description="Number format on the wire: precision (e4m3) or range (e5m2)."
    )
    block_size: Literal[16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536] = (
        Field(default=1024, description="Elements that share a float32 scale.")
    )
    min_numel: int = Field(
        default=2048, ge=1, description="Reductions of fewer elements stay exact."
    )
    error_feedback: bool = Field(
        default=False,
        description="Add what rounding lost to the next gradient (ZeRO 0, 1; 4 bytes a weight).",
    )
    automatic_factor: bool = Field(
        default=False,
        description="FP8-LM's shared scale and automatic factor instead of block scales.",
    )


class OptimizerStatesConfig(_Strict):
    """AdamW keeps its moments in 16 bits (or 8) and computes in float32."""

    exp_avg: Literal["fp16", "e4m3"] = Field(
        default="fp16", description="First moment; e4m3 saves a byte and drops small entries."
    )
    exp_avg_sq: Literal["fp16_sqrt"] = Field(
        default="fp16_sqrt", description="Second moment, stored as its square root."
    )
    master_weights: Literal["fp32", "fp16"] = Field(
        default="fp32",
        description="Of 16-bit parameters. DeepSpeed keeps its own in fp32 and allows no other.",
    )
    checkpoint: Literal["portable", "native"] = Field(
        default="portable",
        description="In checkpoints: float32 as AdamW reads it, or the codes at half the size.",
    )
    compile: bool = Field(default=False, description="Fuse the step with torch.compile.")


class TensorParallelConfig(_Strict):
    """Layers that tensor parallelism cuts: numbers that do not depend on the number of ranks."""

    shared_scales: bool = Field(
        default=True, description="Scales and thresholds of whole rows, by small reductions."
    )
    exact: bool = Field(
        default=False,
        description="Also sum products before they are rounded: the same bits on any ranks, slow.",
    )


class LayerRule(_Strict):
    """Overrides for layers whose dotted name matches; holds a recipe or linear, not both."""

    match: str = Field(min_length=1, description="fnmatch pattern, e.g. '*.layers.31.*'.")
    recipe: str = Field(default="paper", description="Use this recipe for them instead.")
    linear: LinearConfig | None = Field(default=None, description="Change these keys for them.")


class SectionModel(_Strict):
    """FP4 training with fp4-plugin: the "fp4" section of a DeepSpeed configuration."""

    enabled: bool = Field(default=True, description="false leaves the model untouched.")
    recipe: str = Field(default="paper", description="Preset that the other keys override.")
    linear: LinearConfig | None = Field(
        default_factory=LinearConfig, description="The linear layers; null leaves them untouched."
    )
    layers: list[LayerRule] = Field(
        default_factory=list, description="Per-layer rules, in order; the last one wins."
    )
    gradient_communication: GradientCommunicationConfig | None = Field(
        default_factory=GradientCommunicationConfig,
        description="Reduce gradients in FP8; null leaves their reduction as it is.",
    )
    optimizer_states: OptimizerStatesConfig | None = Field(
        default_factory=OptimizerStatesConfig,
        description="AdamW with 16-bit states; null leaves the optimizer as it is.",
    )
    tensor_parallel: TensorParallelConfig = Field(
        default_factory=TensorParallelConfig, description="Under Megatron's tensor parallelism."
    )
    on_mismatch: Literal["error", "warn"] = Field(
        default="error", description="What to do if something else ran than was asked for."
    )
