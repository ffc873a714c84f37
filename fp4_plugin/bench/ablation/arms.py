"""The arms of the study: an "fp4" section each, or a control that quantises nothing.

Three controls belong to every study. `bf16` is what all others are compared with. `bf16_perturbed`
is BF16 from initial weights times 1 + 1e-3 N(0, 1): two such runs differ by chance alone, so their
distance is the noise floor. `bf16_dge_slope` is BF16 with the weight gradients multiplied by DGE's
slope: what it does to the loss is an effect of the gradient's size, not of four bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp4_plugin.registry import Registry

__all__ = [
    "ARMS",
    "BASELINE",
    "CONTROLS",
    "DEFAULT_ARMS",
    "PERTURBATION",
    "PERTURBED",
    "SLOPE_CONTROL",
    "Arm",
]

BASELINE = "bf16"
PERTURBED = "bf16_perturbed"
SLOPE_CONTROL = "bf16_dge_slope"
CONTROLS = (BASELINE, PERTURBED, SLOPE_CONTROL)
PERTURBATION = 1e-3


@dataclass(frozen=True)
class Arm:
    """section: the object under "fp4". perturbation: relative noise on the initial weights.

    slope_recipe: recipe whose estimator multiplies the weight gradients of unquantised linears.
    """

    name: str
    summary: str
    section: dict[str, Any]
    perturbation: float = 0.0
    slope_recipe: str | None = None

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of a run, without the name; JSON-ready."""
        from fp4_plugin.config import parse_section  # torch, which --help must not load

        slope = self.slope_recipe
        return {
            "section": parse_section(self.section).resolved(),
            "perturbation": self.perturbation,
            "slope": None if slope is None else parse_section({"recipe": slope}).resolved(),
        }


def _paper_but(**linear: Any) -> dict[str, Any]:
    return {"recipe": "paper", "linear": linear}


ARMS: Registry[Arm] = Registry("ablation arm")
for _arm in (
    Arm(BASELINE, "linear layers in BF16", {"recipe": "bf16"}),
    Arm(
        PERTURBED, "BF16, initial weights x (1 + 1e-3 N(0,1)): the noise floor",
        {"recipe": "bf16"}, perturbation=PERTURBATION,
    ),
    Arm(
        SLOPE_CONTROL, "BF16, weight gradients x DGE slope: nothing is quantised",
        {"recipe": "bf16"}, slope_recipe="paper",
    ),
    Arm("paper", "W4A4, row scales, DGE, OCC with compensation", {"recipe": "paper"}),
    Arm("w4a4_ste", "W4A4, row scales, cast directly", {"recipe": "w4a4_ste"}),
    Arm("w4a4_tensor", "W4A4, one scale per tensor, cast directly", {"recipe": "w4a4_tensor"}),
    Arm(
        "occ_without_dge", "paper with STE in place of DGE",
        _paper_but(weight={"estimator": {"name": "ste"}}),
    ),
    Arm("dge_without_occ", "paper without OCC", _paper_but(input={"outliers": None})),
    Arm(
        "clamp_only", "paper without compensation: outliers are clamped and lost",
        _paper_but(input={"outliers": {"compensation": None}}),
    ),
    Arm("w4a8", "4-bit weights with DGE, E4M3 activations", {"recipe": "w4a8"}),
    Arm("fp8", "E4M3 forward, E5M2 gradients", {"recipe": "fp8"}),
    Arm("w8a4", "E4M3 weights, 4-bit activations, cast directly", {"recipe": "w8a4"}),
    Arm("msamp", "power-of-two scales, clamping only, ties upward", {"recipe": "msamp"}),
):  # fmt: skip
    ARMS.register(_arm.name, _arm)

DEFAULT_ARMS = tuple(name for name in ARMS if name not in ("w8a4", "msamp"))
