"""From a model and a configuration to a plan, and from the plan to FP4 layers.

Head and embeddings keep high precision by role, not by name: the module that
`get_output_embeddings()` returns and a linear that shares its weight with an embedding; in models
that have neither, a linear with as many outputs as an embedding has entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp4_plugin.errors import ConfigError
from fp4_plugin.linear.function import LayerRun
from fp4_plugin.linear.module import FP4Linear
from fp4_plugin.linear.spec import LinearSpec

__all__ = [
    "FORMS",
    "KEPT_BY_CONFIGURATION",
    "Forms",
    "HighPrecisionModule",
    "ModelPlan",
    "apply_plan",
    "plan_model",
]

KEPT_BY_CONFIGURATION = "the configuration selects bf16 for this layer"

# Exact class of a linear -> the class that it becomes, which has a class method `from_run`.
Forms = Mapping[type[nn.Module], Any]
FORMS: Forms = {nn.Linear: FP4Linear, FP4Linear: FP4Linear}


@dataclass(frozen=True)
class HighPrecisionModule:
    """A module with parameters that is left as it is, and why."""

    name: str
    kind: str
    dtype: str
    reason: str


@dataclass(frozen=True)
class ModelPlan:
    """layers: what each linear (by dotted name) is to run; untouched: all other parameters."""

    layers: dict[str, LinearSpec] = field(default_factory=dict)
    untouched: tuple[HighPrecisionModule, ...] = ()


def plan_model(
    model: nn.Module,
    spec_for: Callable[[str], LinearSpec | None],
    forms: Forms = FORMS,
    heads: Iterable[nn.Module] = (),
) -> ModelPlan:
    """Decide for every module of `model`. Reads classes, names and shapes, never values.

    spec_for: dotted name -> spec, or None where the configuration wants high precision. forms: the
    classes that can be converted; a framework adds those that it makes of an nn.Linear. heads:
    modules that the framework knows to produce logits.

    Raises ConfigError for an FP4 layer (of a copy of a converted model, say) that is to run in high
    precision: it would go on in FP4.
    """
    head_reasons = dict.fromkeys(heads, "output head: the model names it as the one")
    head_reasons = head_reasons or _head_reasons(model, forms)
    layers: dict[str, LinearSpec] = {}
    untouched: list[HighPrecisionModule] = []
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if not parameters:
            continue
        reason = _reason_to_keep(module, forms) or head_reasons.get(module)
        spec = None if reason else spec_for(name)
        if spec is not None:
            layers[name] = spec
            continue
        reason = reason or KEPT_BY_CONFIGURATION
        if hasattr(module, "fp4"):
            raise ConfigError(
                f"{name or 'the model'} is an FP4 layer already and cannot go back to high "
                f"precision ({reason}); copy or build the model before it is converted"
            )
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        untouched.append(HighPrecisionModule(name, type(module).__name__, dtype, reason))
    return ModelPlan(layers, tuple(untouched))


def apply_plan(
    model: nn.Module, plan: ModelPlan, *, keep_weight_codes: bool = True, forms: Forms = FORMS
) -> dict[str, LayerRun]:
    """Swap the class of every planned linear in place; returns the run of each by name."""
    runs = {name: LayerRun(name, spec, keep_weight_codes) for name, spec in plan.layers.items()}
    for name, run in runs.items():
        linear = model.get_submodule(name)
        forms[type(linear)].from_run(linear, run)
    return runs


def _reason_to_keep(module: nn.Module, forms: Forms) -> str | None:
    if type(module) in forms:
        return None
    if isinstance(module, nn.Embedding) or "embedding" in type(module).__name__.lower():
        return "embedding: a table look-up, there is no GEMM"
    if isinstance(module, nn.Linear):
        return f"{type(module).__name__} is a subclass of nn.Linear with a behaviour of its own"
    if "norm" in type(module).__name__.lower():
        return "normalisation: element-wise, there is no GEMM"
    return "not an nn.Linear"


def _head_reasons(model: nn.Module, forms: Forms) -> dict[nn.Module, str]:
    """Linears that produce logits, with what gave them away; also those that a framework made."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m) in forms]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tied = {id(embedding.weight) for embedding in embeddings}
    reasons: dict[nn.Module, str] = {
        linear: "output head: shares its weight with an embedding"
        for linear in linears
        if id(linear.weight) in tied
    }
    getters = [getattr(m, "get_output_embeddings", lambda: None) for m in model.modules()]
    heads = [head for head in (getter() for getter in getters) if isinstance(head, nn.Module)]
    reasons |= {head: "output head: the model names it as the one" for head in heads}
    if not reasons:
        # A guess for models that say nothing: a decoder layer as wide as the vocabulary is rare.
        vocabularies = {embedding.num_embeddings for embedding in embeddings}
        reasons = {
            linear: "output head: as many outputs as the embedding has entries"
            for linear in linears
            if getattr(linear, "out_features", None) in vocabularies
        }
    return reasons
