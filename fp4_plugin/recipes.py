"""Named presets of the `fp4` section; every key can be overridden.

paper        arXiv 2501.17116: E2M1 with one scale per token and output channel, DGE, outlier
             clamping with sparse compensation, E5M2 gradients, FP8 gradient communication,
             AdamW with 16-bit states
bf16         the twin to compare with: nn.Linear is left untouched
fp8          E4M3 forward, E5M2 gradients, one scale per row
w4a8, w8a4   only one operand of fprop in 4 bits (ablation arms of the paper)
w4a4_ste     both in 4 bits, cast directly: no DGE, no clamping
w4a4_tensor  the same with one scale per tensor
msamp        what the authors' released code does differently, for comparison: power-of-two
             scales, ties toward +inf, clamping without compensation. With our row scales; its
             scale axis for weights, per-tensor re-cast and NaN -> 6 are not emulated
"""

from __future__ import annotations

from typing import Any

from fp4_plugin.registry import Registry

__all__ = ["RECIPES", "RECIPE_NOTES"]

_STE = {"name": "ste"}
_DGE = {"name": "dge", "k": 5.0, "max_slope": 3.0, "renormalize": False}
_OUTLIERS = {"alpha": 0.99, "compensation": "sparse", "scope": "row"}

_FP8_GRADIENTS = {"format": "e4m3", "block_size": 1024}
_FP16_STATES = {"exp_avg": "fp16", "exp_avg_sq": "fp16_sqrt", "master_weights": "fp32"}


def _operand(fmt: str, **others: Any) -> dict[str, Any]:
    plain = {"format": fmt, "granularity": "row", "rounding": "nearest", "scale": "absmax"}
    return {**plain, **others}


def _linear(
    weight: dict[str, Any],
    input: dict[str, Any],
    estimator: dict[str, Any],
    fprop: str,
    communication: dict[str, Any] | None = None,
    optimizer_states: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "gradient_communication": communication,
        "optimizer_states": optimizer_states,
        "linear": {
            "weight": {**weight, "estimator": estimator},
            "input": {"outliers": None, **input},
            # E5M2 has range to spare, so a power-of-two scale costs no precision. It leaves the
            # rounding of an element independent of its neighbours: a batch cut into micro-batches
            # keeps its gradient (4.5e-3 apart instead of 2.7e-2 with absmax scales).
            "grad_output": _operand("e5m2", scale="pow2"),
            "fprop": fprop,
            "dgrad": "fp8",
            "wgrad": "fp8",
        },
    }


RECIPES: Registry[dict[str, Any]] = Registry("recipe")
RECIPES.register(
    "paper",
    _linear(
        _operand("e2m1"),
        _operand("e2m1", outliers=_OUTLIERS),
        _DGE,
        "fp4",
        communication=_FP8_GRADIENTS,
        optimizer_states=_FP16_STATES,
    ),
)
RECIPES.register("bf16", {"linear": None, "gradient_communication": None, "optimizer_states": None})
RECIPES.register("fp8", _linear(_operand("e4m3"), _operand("e4m3"), _STE, "fp8"))
RECIPES.register("w4a8", _linear(_operand("e2m1"), _operand("e4m3"), _DGE, "fp8"))
RECIPES.register("w8a4", _linear(_operand("e4m3"), _operand("e2m1"), _STE, "fp8"))
RECIPES.register("w4a4_ste", _linear(_operand("e2m1"), _operand("e2m1"), _STE, "fp4"))
_tensor_wide = _operand("e2m1", granularity="tensor")
RECIPES.register("w4a4_tensor", _linear(_tensor_wide, _tensor_wide, _STE, "fp4"))
_msamp = _operand("e2m1", rounding="half_up", scale="pow2")
RECIPES.register(
    "msamp",
    _linear(_msamp, {**_msamp, "outliers": {**_OUTLIERS, "compensation": None}}, _DGE, "fp4"),
)

# What a reader of the manifest must know about a recipe.
RECIPE_NOTES: dict[str, str] = {
    "msamp": (
        "emulates power-of-two scales, ties toward +inf and clamping without compensation; not "
        "emulated: weight scales along the contraction axis, per-tensor re-cast, NaN -> 6"
    ),
}
