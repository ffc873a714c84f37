"""Sections that are right, wrong in themselves, and wrong only together, as data."""

from __future__ import annotations

from typing import Any

__all__ = ["CONTRADICTIONS", "FULL", "INVALID", "RECIPE_NAMES", "VALID"]

RECIPE_NAMES = ["paper", "bf16", "fp8", "w4a8", "w8a4", "w4a4_ste", "w4a4_tensor", "msamp"]

# The section of the design document, as far as its keys work in this version.
FULL = {
    "enabled": True,
    "recipe": "paper",
    "linear": {
        "weight": {
            "format": "e2m1",
            "granularity": "row",
            "estimator": {"name": "dge", "k": 5, "max_slope": 3.0},
        },
        "input": {
            "format": "e2m1",
            "granularity": "row",
            "outliers": {"alpha": 0.99, "compensation": "sparse", "scope": "row"},
        },
        "grad_output": {"format": "e5m2", "granularity": "row"},
        "fprop": "fp4",
        "dgrad": "fp8",
        "wgrad": "fp8",
    },
    "layers": [{"match": "*.layers.31.*", "recipe": "bf16"}],
    "gradient_communication": {
        "format": "e4m3",
        "block_size": 1024,
        "min_numel": 2048,
        "error_feedback": False,
        "automatic_factor": False,
    },
    "optimizer_states": {
        "exp_avg": "fp16",
        "exp_avg_sq": "fp16_sqrt",
        "master_weights": "fp32",
        "checkpoint": "portable",
        "compile": False,
    },
    "on_mismatch": "error",
}

VALID: dict[str, dict[str, Any]] = {
    "empty": {},
    "full": FULL,
    "disabled": {"enabled": False},
    "warn": {"on_mismatch": "warn"},
    **{f"recipe-{name}": {"recipe": name} for name in RECIPE_NAMES},
    "no-outliers": {"linear": {"input": {"outliers": None}}},
    "clamp-only": {"linear": {"input": {"outliers": {"compensation": None}}}},
    "tensor-scope": {"linear": {"input": {"outliers": {"scope": "tensor"}}}},
    "alpha": {"linear": {"input": {"outliers": {"alpha": 0.999}}}},
    "dge-k": {"linear": {"weight": {"estimator": {"k": 3}}}},
    "renormalize": {"linear": {"weight": {"estimator": {"renormalize": True}}}},
    "ste": {"linear": {"weight": {"estimator": {"name": "ste"}}}},
    "e1m2": {"linear": {"weight": {"format": "e1m2"}, "input": {"format": "e3m0"}}},
    "pow2": {"linear": {"weight": {"scale": "pow2"}, "input": {"rounding": "half_up"}}},
    "bf16-backward": {"linear": {"dgrad": "bf16", "wgrad": "bf16"}},
    "fp4-backward": {"linear": {"grad_output": {"format": "e2m1"}, "dgrad": "fp4", "wgrad": "fp4"}},
    "w8a4": {"linear": {"weight": {"format": "e4m3"}, "fprop": "fp8"}},
    "exact-gradients": {"gradient_communication": None},
    "gradients-alone": {"recipe": "bf16", "gradient_communication": {"format": "e5m2"}},
    "fp32-states": {"optimizer_states": None},
    "states-alone": {"recipe": "bf16", "optimizer_states": {"exp_avg": "e4m3"}},
    "native-states": {"optimizer_states": {"checkpoint": "native", "compile": True}},
    "fp16-master": {"optimizer_states": {"master_weights": "fp16"}},
    "rule-linear": {"layers": [{"match": "*", "linear": {"wgrad": "bf16"}}]},
    "two-rules": {"layers": [{"match": "a", "recipe": "fp8"}, {"match": "b", "recipe": "bf16"}]},
}

# Wrong in themselves: id -> (section, what the message must name).
INVALID: dict[str, tuple[Any, list[str]]] = {
    "top": ({"recpie": "paper"}, ["fp4.recpie", "'recipe'"]),
    "linear": ({"linear": {"wieght": {}}}, ["fp4.linear.wieght", "'weight'"]),
    "operand": ({"linear": {"weight": {"fromat": "e2m1"}}}, ["linear.weight.fromat", "'format'"]),
    "outliers": (
        {"linear": {"input": {"outliers": {"alhpa": 0.99}}}},
        ["fp4.linear.input.outliers.alhpa", "'alpha'"],
    ),
    "weight-outliers": ({"linear": {"weight": {"outliers": None}}}, ["linear.weight.outliers"]),
    "input-estimator": (
        {"linear": {"input": {"estimator": {"name": "ste"}}}},
        ["linear.input.estimator"],
    ),
    "estimator-key": (
        {"linear": {"weight": {"estimator": {"name": "dge", "max_slop": 3.0}}}},
        ["linear.weight.estimator.max_slop", "'max_slope'"],
    ),
    "ste-key": (
        {"linear": {"weight": {"estimator": {"name": "ste", "k": 5}}}},
        ["linear.weight.estimator.k"],
    ),
    "estimator-name": (
        {"linear": {"weight": {"estimator": {"name": "dgee"}}}},
        ["linear.weight.estimator", "dgee", "'dge'"],
    ),
    "estimator-type": (
        {"linear": {"weight": {"estimator": "dge"}}},
        ["linear.weight.estimator"],
    ),
    "estimator-null": ({"linear": {"weight": {"estimator": None}}}, ["linear.weight.estimator"]),
    "k-type": (
        {"linear": {"weight": {"estimator": {"name": "dge", "k": "5"}}}},
        ["linear.weight.estimator.k"],
    ),
    "renormalize-type": (
        {"linear": {"weight": {"estimator": {"name": "dge", "renormalize": 1}}}},
        ["linear.weight.estimator.renormalize"],
    ),
    "format": ({"linear": {"weight": {"format": "e2m1x"}}}, ["linear.weight.format", "'e2m1'"]),
    "format-type": ({"linear": {"weight": {"format": 4}}}, ["linear.weight.format"]),
    "format-null": ({"linear": {"weight": {"format": None}}}, ["linear.weight.format"]),
    "scale-format": ({"linear": {"weight": {"format": "e8m0"}}}, ["linear.weight.format", "e8m0"]),
    "granularity": (
        {"linear": {"input": {"granularity": "rows"}}},
        ["linear.input.granularity", "rows", "'row'"],
    ),
    "rounding": ({"linear": {"input": {"rounding": "even"}}}, ["linear.input.rounding", "nearest"]),
    "scale": ({"linear": {"input": {"scale": "pow3"}}}, ["linear.input.scale", "'pow2'"]),
    "fprop": ({"linear": {"fprop": "fp16"}}, ["fp4.linear.fprop", "fp16", "'bf16'"]),
    "wgrad": ({"linear": {"wgrad": 8}}, ["fp4.linear.wgrad"]),
    "compensation": (
        {"linear": {"input": {"outliers": {"compensation": "spars"}}}},
        ["linear.input.outliers.compensation", "'sparse'"],
    ),
    "scope": (
        {"linear": {"input": {"outliers": {"scope": "token"}}}},
        ["linear.input.outliers.scope", "'row'"],
    ),
    "alpha-high": (
        {"linear": {"input": {"outliers": {"alpha": 1.5}}}},
        ["linear.input.outliers.alpha", "1.5"],
    ),
    "alpha-low": (
        {"linear": {"input": {"outliers": {"alpha": 0.5}}}},
        ["linear.input.outliers.alpha", "0.5"],
    ),
    "alpha-percent": (
        {"linear": {"input": {"outliers": {"alpha": 99}}}},
        ["linear.input.outliers.alpha", "99"],
    ),
    "alpha-text": (
        {"linear": {"input": {"outliers": {"alpha": "0.99"}}}},
        ["linear.input.outliers.alpha"],
    ),
    "alpha-bool": (
        {"linear": {"input": {"outliers": {"alpha": True}}}},
        ["linear.input.outliers.alpha"],
    ),
    "outliers-number": ({"linear": {"input": {"outliers": 0.99}}}, ["linear.input.outliers"]),
    "outliers-false": ({"linear": {"input": {"outliers": False}}}, ["linear.input.outliers"]),
    "enabled-text": ({"enabled": "true"}, ["fp4.enabled", "true"]),
    "enabled-number": ({"enabled": 1}, ["fp4.enabled"]),
    "recipe-name": ({"recipe": "papr"}, ["fp4.recipe", "papr", "'paper'"]),
    "recipe-type": ({"recipe": 4}, ["fp4.recipe"]),
    "recipe-null": ({"recipe": None}, ["fp4.recipe"]),
    "on-mismatch": ({"on_mismatch": "eror"}, ["fp4.on_mismatch", "eror", "'error'"]),
    "linear-list": ({"linear": []}, ["fp4.linear"]),
    "weight-null": ({"linear": {"weight": None}}, ["fp4.linear.weight"]),
    "layers-object": ({"layers": {}}, ["fp4.layers"]),
    "layers-text": ({"layers": ["*.q_proj"]}, ["fp4.layers[0]"]),
    "gradients-format": (
        {"gradient_communication": {"format": "e2m1"}},
        ["fp4.gradient_communication.format", "'e4m3' or 'e5m2'", "e2m1"],
    ),
    "gradients-block": (
        {"gradient_communication": {"block_size": 1000}},
        ["fp4.gradient_communication.block_size", "1000", "1024"],
    ),
    "gradients-key": (
        {"gradient_communication": {"min_nume": 1}},
        ["fp4.gradient_communication.min_nume", "'min_numel'"],
    ),
    "gradients-min": (
        {"gradient_communication": {"min_numel": 0}},
        ["fp4.gradient_communication.min_numel", "0"],
    ),
    "gradients-true": ({"gradient_communication": True}, ["fp4.gradient_communication", "true"]),
    "states-format": (
        {"optimizer_states": {"exp_avg": "fp8"}},
        ["fp4.optimizer_states.exp_avg", "'fp16' or 'e4m3'", "fp8"],
    ),
    "states-second": (
        {"optimizer_states": {"exp_avg_sq": "fp16"}},
        ["fp4.optimizer_states.exp_avg_sq", "'fp16_sqrt'"],
    ),
    "states-key": (
        {"optimizer_states": {"exp_avg_square": "fp16_sqrt"}},
        ["fp4.optimizer_states.exp_avg_square", "'exp_avg_sq'"],
    ),
    "states-master": (
        {"optimizer_states": {"master_weights": "bf16"}},
        ["fp4.optimizer_states.master_weights", "'fp32' or 'fp16'"],
    ),
    "states-compile": (
        {"optimizer_states": {"compile": "yes"}},
        ["fp4.optimizer_states.compile", "true or false"],
    ),
    "states-true": ({"optimizer_states": True}, ["fp4.optimizer_states", "true"]),
    "rule-key": (
        {"layers": [{"match": "*", "recipee": "bf16"}]},
        ["fp4.layers[0].recipee", "'recipe'"],
    ),
    "rule-linear-key": (
        {"layers": [{"match": "a", "recipe": "bf16"}, {"match": "*", "linear": {"fprob": "fp4"}}]},
        ["fp4.layers[1].linear.fprob", "'fprop'"],
    ),
    "rule-format": (
        {"layers": [{"match": "*", "linear": {"weight": {"format": "e2m1x"}}}]},
        ["fp4.layers[0].linear.weight.format", "'e2m1'"],
    ),
    "rule-estimator": (
        {"layers": [{"match": "*", "linear": {"weight": {"estimator": {"name": "dgee"}}}}]},
        ["fp4.layers[0].linear.weight.estimator", "'dge'"],
    ),
    "rule-estimator-key": (
        {"layers": [{"match": "*", "linear": {"weight": {"estimator": {"name": "dge", "kk": 1}}}}]},
        ["fp4.layers[0].linear.weight.estimator.kk"],
    ),
    "rule-recipe": (
        {"layers": [{"match": "*", "recipe": "bf17"}]},
        ["fp4.layers[0].recipe", "'bf16'"],
    ),
    "rule-without-match": ({"layers": [{"recipe": "bf16"}]}, ["fp4.layers[0].match"]),
    "rule-match-type": ({"layers": [{"match": 3, "recipe": "bf16"}]}, ["fp4.layers[0].match"]),
    "rule-empty": ({"layers": [{"match": "*"}]}, ["fp4.layers[0]"]),
    "rule-recipe-null": ({"layers": [{"match": "*", "recipe": None}]}, ["fp4.layers[0]"]),
    "rule-match-empty": ({"layers": [{"match": "", "recipe": "bf16"}]}, ["fp4.layers[0].match"]),
    "estimator-name-type": (
        {"linear": {"weight": {"estimator": {"name": ["dge"]}}}},
        ["linear.weight.estimator"],
    ),
    "rule-both": (
        {"layers": [{"match": "*", "recipe": "bf16", "linear": {"wgrad": "bf16"}}]},
        ["fp4.layers[0]"],
    ),
}

# Keys of the design that do nothing yet are not accepted: they would be a promise.
for _key, _value in {
    "schedule": [],
    "telemetry": {"enabled": True},
    "seed": 0,
}.items():
    INVALID[f"not-yet-{_key}"] = ({_key: _value}, [f"fp4.{_key}"])

# Each value is allowed, together they are not: only the model can see it.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dge-on-bf16-weight": (
        {
            "linear": {
                "weight": {"format": "bf16"},
                "fprop": "bf16",
                "dgrad": "bf16",
            }
        },
        ["linear.weight.estimator", "bf16", "ste"],
    ),
    "outliers-8-bit": (
        {"linear": {"input": {"format": "e4m3"}, "fprop": "fp8"}},
        ["linear.input.outliers", "e4m3"],
    ),
    "outliers-bf16": (
        {"linear": {"input": {"format": "bf16"}, "fprop": "bf16", "wgrad": "bf16"}},
        ["linear.input.outliers", "bf16"],
    ),
    "fprop-fp4-8-bit-weight": (
        {"linear": {"weight": {"format": "e4m3"}}},
        ["linear.fprop", "e4m3"],
    ),
    "fprop-fp4-8-bit-input": (
        {"linear": {"input": {"format": "e5m2", "outliers": None}}},
        ["linear.fprop", "e5m2"],
    ),
    "fprop-fp8-of-4-bits": ({"linear": {"fprop": "fp8"}}, ["linear.fprop"]),
    "fprop-bf16-of-4-bits": ({"linear": {"fprop": "bf16"}}, ["linear.fprop"]),
    "dgrad-fp4": ({"linear": {"dgrad": "fp4"}}, ["linear.dgrad", "e5m2"]),
    "wgrad-fp4": ({"linear": {"wgrad": "fp4"}}, ["linear.wgrad", "e5m2"]),
    "dgrad-fp8-of-4-bits": (
        {"linear": {"grad_output": {"format": "e2m1"}, "wgrad": "bf16"}},
        ["linear.dgrad", "e2m1"],
    ),
    "wgrad-fp8-of-bf16": (
        {"linear": {"grad_output": {"format": "bf16"}, "dgrad": "bf16"}},
        ["linear.wgrad", "bf16"],
    ),
    "wgrad-fp4-8-bit-input": (
        {
            "linear": {
                "input": {"format": "e4m3", "outliers": None},
                "grad_output": {"format": "e2m1"},
                "fprop": "fp8",
                "dgrad": "fp4",
                "wgrad": "fp4",
            }
        },
        ["linear.wgrad", "e4m3"],
    ),
    "recipe-and-key": (
        {"recipe": "fp8", "linear": {"input": {"outliers": {"alpha": 0.99}}}},
        ["linear.input.outliers"],
    ),
    "rule": (
        {"layers": [{"match": "*.q", "linear": {"dgrad": "fp4"}}]},
        ["layers[0]", "*.q", "linear.dgrad"],
    ),
    "k-of-ste": (
        {"recipe": "w4a4_ste", "linear": {"weight": {"estimator": {"k": 5}}}},
        ["estimator"],
    ),
}
