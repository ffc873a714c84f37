"""One converted model: its configuration, its plan, and the proof that the plan ran.

    model + section --parse--> Fp4Config --plan--> ModelPlan --apply--> FP4 layers --run--> manifest

DeepSpeed, Hugging Face and plain torch all pass through `activate`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn

from fp4_plugin.config import Fp4Config, parse_section
from fp4_plugin.errors import ConfigError, MismatchError, NotRunYet
from fp4_plugin.linear.convert import (
    FORMS,
    KEPT_BY_CONFIGURATION,
    Forms,
    ModelPlan,
    apply_plan,
    plan_model,
)
from fp4_plugin.linear.function import LayerRun
from fp4_plugin.linear.shared_input import forget_shared_input, share_inputs_within
from fp4_plugin.recipes import RECIPE_NOTES
from fp4_plugin.telemetry.manifest import LayerReport, build_manifest, report_layers

__all__ = ["Activation", "activate", "activation_of", "assert_active", "convert_to_fp4"]

logger = logging.getLogger("fp4_plugin")

# True as long as no kernel of this package uses FP4 instructions.
_SIMULATION_NOTE = (
    "fp4 arithmetic is simulated: codes are multiplied exactly by the kernels named per GEMM, "
    "which is not faster than the arithmetic of those kernels"
)

_NO_FRAMEWORK = (
    "gradients of a model that was converted by itself are reduced by whoever trains it; for "
    "DistributedDataParallel register fp4_plugin.comm.ddp_hook"
)

_NO_OPTIMIZER = (
    "whoever trains a model that was converted by itself makes its optimizer; give the parameters "
    "to fp4_plugin.optim.FP16StateAdamW"
)

_activations: weakref.WeakKeyDictionary[nn.Module, Activation] = weakref.WeakKeyDictionary()


class FrameworkPart(Protocol):
    """What a framework's integration runs beside the model, as the manifest wants to know it."""

    def report(self) -> dict[str, Any]: ...

    def verify(self) -> None: ...


class Activation:
    """What `activate` did to a model. `runs` maps layer names to their LayerRun.

    communication, optimizer_states: what reduces the model's gradients and what keeps its
    optimizer's states, set by the framework's integration.
    """

    def __init__(
        self, model: nn.Module, config: Fp4Config, plan: ModelPlan, runs: dict[str, LayerRun]
    ) -> None:
        self._model = weakref.ref(model)
        self.config = config
        self.plan = plan
        self.runs = runs
        self.communication: FrameworkPart | None = None
        self.optimizer_states: FrameworkPart | None = None

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise NotRunYet("the converted model no longer exists")
        return model

    def reports(self) -> list[LayerReport]:
        """The status of every planned layer."""
        return report_layers(self.model, self.runs)

    def manifest(self, **facts: Any) -> dict[str, Any]:
        """The run manifest as a JSON-ready dict; `facts` are added at its top."""
        recipes = [self.config.recipe, *(rule.get("recipe") for rule in self.config.layers)]
        notes = [note for name, note in RECIPE_NOTES.items() if name in recipes]
        notes += [_SIMULATION_NOTE] if self.runs else []
        notes += [*self._causality_notes(), *idle_rules(self.config, self.plan)]
        known = {
            "config": self.config.resolved(),
            "config_hash": self.config.hash(),
            "notes": notes,
            "gradient_communication": self._communication_report(),
            "optimizer_states": self._optimizer_report(),
        }
        return build_manifest(self.model, self.plan, self.runs, {**known, **facts})

    def verify(self) -> list[LayerReport]:
        """Compare what ran with the plan; returns the layers that are still unproven.

        Raises MismatchError if a layer was replaced, or gradients or optimizer states are not
        what was asked for, and NotRunYet if every layer is unproven.
        """
        reports = self.reports()
        wrong = [r for r in reports if r.status == "lost"]
        if wrong:
            raise MismatchError(
                f"{len(wrong)} of {len(reports)} FP4 layers did not run as planned: "
                + _enumerate(wrong)
            )
        unproven = [r for r in reports if r.status == "unproven"]
        if unproven and len(unproven) == len(reports):
            raise NotRunYet(
                f"none of the {len(reports)} FP4 layers has run completely yet, ask after a step: "
                + _enumerate(unproven)
            )
        for part in (self.communication, self.optimizer_states):
            if part is not None:
                part.verify()
        return unproven

    def _communication_report(self) -> dict[str, Any]:
        if self.communication is not None:
            return self.communication.report()
        spec = self.config.communication_spec
        if spec is None:
            return {"state": "off"}
        return {"state": f"not applied: {_NO_FRAMEWORK}", "asked": spec.describe()}

    def _optimizer_report(self) -> dict[str, Any]:
        if self.optimizer_states is not None:
            return self.optimizer_states.report()
        asked = self.config.optimizer_states
        if asked is None:
            return {"state": "off"}
        return {"state": f"not applied: {_NO_OPTIMIZER}", "asked": asked}

    def banner(self) -> str:
        """One line for the log: what was converted and what was not."""
        reasons: dict[str, int] = {}
        for module in self.plan.untouched:
            reason = module.reason.split(":")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
        kept = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        return (
            f"fp4: recipe {self.config.recipe!r} on {len(self.runs)} linear layers "
            f"(config {self.config.hash()[:12]}); kept in high precision: {kept or 'nothing'}"
            f"{self._communication_banner()}{self._optimizer_banner()}"
        )

    def _communication_banner(self) -> str:
        spec = self.config.communication_spec
        if spec is None or self.communication is None:
            return ""
        codec = spec.codec
        return f"; gradients travel as {codec.format.name}, {codec.block_size} to a scale"

    def _optimizer_banner(self) -> str:
        asked = self.config.optimizer_states
        if asked is None or self.optimizer_states is None:
            return ""
        return f"; optimizer states are {asked['exp_avg']} and {asked['exp_avg_sq']}"

    def _causality_notes(self) -> list[str]:
        specs = [run.spec for run in self.runs.values()]
        notes = []
        if any(s.input.format and s.input.granularity == "tensor" for s in specs):
            notes.append("not causal: one input scale per tensor lets tokens see each other")
        if any(s.outliers and s.outliers.scope == "tensor" for s in specs):
            notes.append("not causal: outlier thresholds of a whole tensor cross tokens")
        return notes


def activate(
    model: nn.Module,
    section: Mapping[str, Any] | Fp4Config,
    *,
    keep_weight_codes: bool = True,
    forms: Forms = FORMS,
    heads: Iterable[nn.Module] = (),
    allow_empty: bool = False,
) -> Activation:
    """Plan `model` and swap its linears in place. Weight values are never read.

    forms: the classes that can be converted. heads: modules that produce logits, where a framework
    knows them. allow_empty: a model without a linear to convert is
    in order (a pipeline stage may be one).

    Raises ConfigError for a wrong section, for a model that was converted already, and (unless
    on_mismatch is "warn") if the section asks for FP4 layers and the model has none.
    """
    config = parse_section(section)
    if model in _activations:
        raise ConfigError(
            "this model was converted already: convert a model once, or build a new one"
        )
    plan = plan_model(model, config.linear_spec, forms, heads) if config.enabled else ModelPlan()
    for note in idle_rules(config, plan):
        logger.warning("fp4: %s", note)
    wants_layers = not allow_empty and config.enabled and config.resolved()["linear"] is not None
    if wants_layers and not plan.layers:
        message = (
            f"the model ({type(model).__name__}) has no linear layer to convert: only nn.Linear "
            "modules that are not the output head are; check the model and the 'layers' rules"
        )
        if config.on_mismatch == "error":
            raise ConfigError(message)
        logger.warning("fp4: %s", message)
    runs = apply_plan(model, plan, keep_weight_codes=keep_weight_codes, forms=forms)
    if runs:
        share_inputs_within(model)
        _keep_off_fused_path(model)
    activation = Activation(model, config, plan, runs)
    _activations[model] = activation
    return activation


def activation_of(model_or_engine: Any) -> Activation | None:
    """The activation of a model, or of what an engine, wrapper or `torch.compile` made of it."""
    seen: Any = model_or_engine
    while seen is not None:
        if isinstance(seen, nn.Module) and seen in _activations:
            return _activations[seen]
        seen = getattr(seen, "_orig_mod", None) or getattr(seen, "module", None)
    return None


def convert_to_fp4(model: nn.Module, section: Mapping[str, Any] | Fp4Config) -> nn.Module:
    """Turn the linears of `model` into FP4 layers, in place, and return it.

    section: the dict under "fp4", or a parsed Fp4Config. Parameter objects and state-dict keys
    stay the same. Raises as `activate`.
    """
    logger.info(activate(model, section).banner())
    return model


def assert_active(model_or_engine: Any) -> None:
    """Raise unless every planned layer really ran as planned.

    NotRunYet before the first step and while a layer has seen no token or no gradient;
    MismatchError if a layer was replaced, and if the model was never converted.
    """
    activation = activation_of(model_or_engine)
    if activation is None:
        raise MismatchError(_why_unknown(model_or_engine))
    unproven = activation.verify()
    if unproven:
        raise NotRunYet(f"{len(unproven)} FP4 layers are not proven yet: {_enumerate(unproven)}")


def _keep_off_fused_path(model: nn.Module) -> None:
    """In evaluation torch's encoder layers hand their weights to one fused high-precision kernel.

    They do not where a hook is attached, unless the encoder makes nested tensors of its input.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(forget_shared_input)
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _why_unknown(model_or_engine: Any) -> str:
    kind = type(model_or_engine).__name__
    modules = model_or_engine.modules() if isinstance(model_or_engine, nn.Module) else ()
    num_layers = sum(isinstance(getattr(module, "fp4", None), LayerRun) for module in modules)
    if num_layers:
        return (
            f"{kind} holds {num_layers} FP4 layers, but there is no plan to compare them with: it "
            "is a copy of the model that was converted (deepcopy, pickle), holds it, or is a part "
            "of it. Ask for the model that was converted itself, or convert the copy as well"
        )
    return (
        f'{kind} was not converted: it runs in high precision. Is the "fp4" section in the '
        "configuration, and fp4_plugin imported before the engine was made?"
    )


def _enumerate(reports: list[LayerReport], most: int = 5) -> str:
    more = "; ..." if len(reports) > most else ""
    return "; ".join(f"{report.name}: {report.reason}" for report in reports[:most]) + more


def idle_rules(config: Fp4Config, plan: ModelPlan) -> list[str]:
    """A note for each rule of `layers` that decides nothing, also not that a layer is kept."""
    kept = [module.name for module in plan.untouched if module.reason == KEPT_BY_CONFIGURATION]
    matched = [rule for name in (*plan.layers, *kept) for rule in config.matching_rules(name)]
    return [
        f"layers[{index}] matches no layer that could be converted: {rule['match']!r}"
        for index, rule in enumerate(config.layers if config.enabled else ())
        if rule not in matched
    ]
