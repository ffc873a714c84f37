"""The run manifest: per linear and GEMM what was asked, what ran, and why not where it differs.

Counts come from the calls themselves (linear/record.py), not from the plan. A layer is

    active    every GEMM it should have run was counted
    unproven  no token has reached it yet, or tokens have in training and no gradient
    lost      the module that was converted is no longer in the model: somebody replaced it
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4_plugin.estimators import ESTIMATORS, Estimator
from fp4_plugin.linear.convert import ModelPlan
from fp4_plugin.linear.function import LayerRun
from fp4_plugin.linear.record import GEMMS
from fp4_plugin.linear.roles import role_of
from fp4_plugin.linear.spec import LinearSpec, OperandSpec

__all__ = ["MANIFEST_NAME", "LayerReport", "build_manifest", "report_layers", "write_manifest"]

MANIFEST_NAME = "fp4_manifest.json"

_PACKAGES = (
    "fp4-plugin",
    "torch",
    "deepspeed",
    "megatron-core",
    "transformers",
    "accelerate",
    "triton",
)


@dataclass(frozen=True)
class LayerReport:
    """One converted linear: its status and, unless active, the reason."""

    name: str
    status: str
    reason: str | None = None


def report_layers(model: nn.Module, runs: Mapping[str, LayerRun]) -> list[LayerReport]:
    """The status of every planned layer of `model`, in the order of the plan."""
    modules = dict(model.named_modules())
    has_backward = any(
        run.record.gemms[gemm].calls for run in runs.values() for gemm in ("dgrad", "wgrad")
    )
    return [_report(name, modules.get(name), run, has_backward) for name, run in runs.items()]


def _report(name: str, module: nn.Module | None, run: LayerRun, has_backward: bool) -> LayerReport:
    if getattr(module, "fp4", None) is not run:
        kind = "nothing" if module is None else type(module).__name__
        return LayerReport(name, "lost", f"the converted linear was replaced by {kind}")
    if run.record.tokens == 0:
        return LayerReport(name, "unproven", "no token has reached this layer")
    missing = [g for g in ("dgrad", "wgrad") if run.record.expects(g)]
    # An evaluation has no backward; a training step is not over before it.
    if missing and module is not None and (has_backward or module.training):
        reason = f"no gradient has reached this layer: {' and '.join(missing)} did not run"
        return LayerReport(name, "unproven", reason)
    return LayerReport(name, "active")


def build_manifest(
    model: nn.Module, plan: ModelPlan, runs: Mapping[str, LayerRun], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """A JSON-ready dict. `facts` are entries that the caller knows (config, hash, world size)."""
    reports = report_layers(model, runs)
    statuses = [report.status for report in reports]
    return {
        "manifest_version": 1,
        **facts,
        "versions": _versions(),
        "summary": {
            "linears_converted": len(reports),
            "status": {s: statuses.count(s) for s in sorted(set(statuses))},
            "gemm_calls": {
                gemm: sum(run.record.gemms[gemm].calls for run in runs.values()) for gemm in GEMMS
            },
            "saved_for_backward_bytes": sum(run.record.saved_bytes for run in runs.values()),
            "bf16_input_bytes": sum(run.record.input_bytes for run in runs.values()),
            "weight_code_bytes": sum(run.record.weight_code_bytes for run in runs.values()),
        },
        "layers": [_describe_layer(report, runs[report.name]) for report in reports],
        "high_precision": [
            {**asdict(module), "role": role_of(module.name)} for module in plan.untouched
        ],
    }


def _describe_layer(report: LayerReport, run: LayerRun) -> dict[str, Any]:
    spec, record = run.spec, run.record
    return {
        **asdict(report),
        "role": role_of(report.name),
        "estimator": {"name": _registered_name(spec.estimator), **_fields(spec.estimator)},
        "outliers": None if spec.outliers is None else asdict(spec.outliers),
        "weight": _describe_operand(spec.weight),
        "input": _describe_operand(spec.input),
        "grad_output": _describe_operand(spec.grad_output),
        "tokens": record.tokens,
        "gemms": {
            gemm: {
                "asked": getattr(spec, gemm),
                "operands": _operands(spec, gemm),
                "calls": record.gemms[gemm].calls,
                "kernels": dict(record.gemms[gemm].kernels),
            }
            for gemm in GEMMS
        },
        "saved_for_backward_bytes": record.saved_bytes,
        "bf16_input_bytes": record.input_bytes,
        "weight_code_bytes": record.weight_code_bytes,
    }


def _describe_operand(operand: OperandSpec) -> dict[str, Any]:
    if operand.format is None:
        return {"format": operand.format_name}
    return {
        "format": operand.format_name,
        "scale_axis": operand.granularity,
        "rounding": operand.rounding,
        "scale": operand.scale,
    }


def _operands(spec: LinearSpec, gemm: str) -> str:
    """The formats that a GEMM multiplies, e.g. "e2m1 x e2m1"."""
    if gemm == "fprop":
        return f"{spec.input.format_name} x {spec.weight.format_name}"
    other = spec.weight if gemm == "dgrad" else spec.input
    is_high_precision = getattr(spec, gemm) == "bf16"
    grad = "bf16" if is_high_precision else spec.grad_output.format_name
    return f"{grad} x {other.format_name}"


def _registered_name(estimator: Estimator) -> str:
    """The name that JSON knows the estimator by; its class name if it was made by hand."""
    names = [name for name in ESTIMATORS if ESTIMATORS[name] is type(estimator)]
    return names[0] if names else type(estimator).__name__


def _fields(estimator: Any) -> dict[str, Any]:
    return asdict(estimator) if hasattr(estimator, "__dataclass_fields__") else {}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    return versions


def write_manifest(path: str | Path, manifest: Mapping[str, Any]) -> None:
    """Write `manifest` to the file `path`, making its folder.

    The file appears whole or not at all: it is written aside and renamed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
