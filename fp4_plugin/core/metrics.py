"""How close a low-precision tensor is to its original."""

from __future__ import annotations

import torch

from fp4_plugin.core.quantize import QuantizedTensor

__all__ = ["cosine_similarity", "saturation_fraction", "sqnr_db", "underflow_fraction"]


def sqnr_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal to quantisation-noise ratio in dB, 10 log10(|reference|^2 / |value - reference|^2).

    inf for equal tensors, nan where the reference is zero and the value is not.
    """
    reference, value = reference.double(), value.double()
    signal, noise = reference.square().sum(), (value - reference).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(signal / noise)) if signal > 0 else float("nan")


def cosine_similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of the angle between two tensors of equal size, in [-1, 1]; nan if one is zero."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def saturation_fraction(q: QuantizedTensor) -> float:
    """Fraction (0..1) of elements that sit on +-max of their format."""
    values = q.values()
    return float((values.abs() == q.format.max).float().mean()) if values.numel() else 0.0


def underflow_fraction(x: torch.Tensor, q: QuantizedTensor) -> float:
    """Fraction (0..1) of the non-zero elements of x whose code is zero."""
    nonzero = x != 0
    lost = nonzero & (q.values() == 0)
    return float(lost.sum() / nonzero.sum()) if nonzero.any() else 0.0
