"""The FP4 linear layer: a plan, one autograd function with three labelled GEMMs, a module.

Read `spec` (what a layer is asked to do), `function` (fprop, dgrad, wgrad), `module`, `convert`.
"""

from __future__ import annotations

from fp4_plugin.linear.module import FP4Linear
from fp4_plugin.linear.spec import LinearSpec, OperandSpec, OutlierSpec

__all__ = ["FP4Linear", "LinearSpec", "OperandSpec", "OutlierSpec"]
