"""Gradient estimators: what stands in for the derivative of rounding in the weight gradient.

An estimator is one file with a frozen dataclass (its fields are its JSON keys) registered here.
"""

from __future__ import annotations

from fp4_plugin.estimators.base import ESTIMATORS, Estimator
from fp4_plugin.estimators.dge import DGE
from fp4_plugin.estimators.ste import STE

__all__ = ["DGE", "ESTIMATORS", "STE", "Estimator"]
