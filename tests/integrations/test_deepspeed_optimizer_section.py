"""Which optimizer a call of DeepSpeed is given, decided from its JSON or its object alone."""

from __future__ import annotations

import copy
import json
from argparse import Namespace

import pytest
import torch
from torch import nn

from fp4_plugin.config import parse_section
from fp4_plugin.errors import ConfigError
from fp4_plugin.integrations.deepspeed.ds_config import (
    STATE_CONFLICTS,
    refuse_conflicts,
    refuse_state_conflicts,
)
from fp4_plugin.integrations.deepspeed.optimizer import known_to_deepspeed, prepare_optimizer
from fp4_plugin.integrations.deepspeed.optimizer_objects import converted, require_convertible
from fp4_plugin.integrations.deepspeed.optimizer_section import rewritten_optimizer
from fp4_plugin.optim import FP16StateAdamW

# DeepSpeed before 0.19, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*distutils.*:DeprecationWarning")

ASKED = parse_section({}).optimizer_states
EXACT = parse_section({"optimizer_states": None})
E4M3 = {**ASKED, "exp_avg": "e4m3"}


def section(kind, **params):
    return {"type": kind, "params": params}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (section("AdamW", lr=1e-4), {"lr": 1e-4, "weight_decay": 0.0}),
        (section("adamw", torch_adam=True), {"weight_decay": 0.01}),
        (section("Adam", torch_adam=True), {"weight_decay": 0.01}),
        (section("Adam", weight_decay=0.1), {"weight_decay": 0.1}),
        (section("Adam", adam_w_mode=False), {"weight_decay": 0.0}),
        (section("AdamW", adam_w_mode=False, weight_decay=0.1), {"weight_decay": 0.1}),
        (section("AdamW", betas=[0.9, 0.95], eps=1e-6), {"betas": [0.9, 0.95], "eps": 1e-6}),
        (section("AdamW", fused=True, foreach=False, set_grad_none=True), {}),
        (section("AdamW", amsgrad=False, bias_correction=True, fp32_optimizer_states=True), {}),
        (section("AdamW", lr="auto", weight_decay="auto"), {"lr": "auto", "weight_decay": "auto"}),
        ({"type": "AdamW"}, {"weight_decay": 0.0}),
    ],
    ids=str,
)
def test_adamw_in_all_its_spellings_is_rewritten(given, expected):
    before = copy.deepcopy(given)
    result = rewritten_optimizer(given, ASKED)
    assert result["type"] == "FP16StateAdamW"
    assert result["params"] == {"weight_decay": 0.0, **expected, **ASKED}
    assert given == before


def test_what_deepspeed_takes_for_missing_values_is_kept():
    """FusedAdam decays by nothing unless told to, torch's AdamW by a hundredth."""
    from deepspeed.ops.adam import FusedAdam

    fused = FusedAdam.__init__.__defaults__[FusedAdam.__init__.__code__.co_varnames[2:].index(
        "weight_decay"
    )]  # fmt: skip
    assert rewritten_optimizer(section("AdamW"), ASKED)["params"]["weight_decay"] == fused
    plain = torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    torch_adam = rewritten_optimizer(section("AdamW", torch_adam=True), ASKED)
    assert torch_adam["params"]["weight_decay"] == plain


def test_without_the_key_other_sections_are_left_alone():
    for kind in ("AdamW", "Lamb", "SGD", "Muon"):
        assert rewritten_optimizer(section(kind), None) is None


def test_by_name_the_class_has_its_own_parameters_and_the_section_completes_them():
    alone = rewritten_optimizer(section("FP16StateAdamW", lr=1e-4, exp_avg="e4m3"), None)
    assert alone["params"] == {"lr": 1e-4, "exp_avg": "e4m3"}
    both = rewritten_optimizer(section("fp16stateadamw", lr=1e-4, exp_avg="e4m3"), E4M3)
    assert both == {"type": "FP16StateAdamW", "params": {"lr": 1e-4, **E4M3}}


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        (section("Lamb"), ASKED, ["'Lamb'", "AdamW", '"optimizer_states": null']),
        (section("OneBitAdam"), ASKED, ["'OneBitAdam'"]),
        (section("SGD", momentum=0.9), ASKED, ["'SGD'"]),
        (section("Adam", adam_w_mode=False, weight_decay=0.1), ASKED, ["adam_w_mode", "0.1"]),
        (section("AdamW", amsgrad=True), ASKED, ["optimizer.params.amsgrad", "False only"]),
        (section("AdamW", bias_correction=False), ASKED, ["bias_correction", "True only"]),
        (section("AdamW", fp32_optimizer_states=False), ASKED, ["fp32_optimizer_states"]),
        (section("AdamW", momentum=0.9), ASKED, ["optimizer.params.momentum", "'eps'"]),
        (section("AdamW", max_grad_norm=1.0), ASKED, ["max_grad_norm", '"gradient_clipping"']),
        (section("AdamW", lr=-1.0), ASKED, ["optimizer.params", "lr=-1.0"]),
        (section("FP16StateAdamW", exp_avg="fp8"), None, ["exp_avg='fp8'", "'e4m3'"]),
        (section("FP16StateAdamW", torch_adam=True), None, ["optimizer.params.torch_adam"]),
        (section("FP16StateAdamW", exp_avg="e4m3"), ASKED, ["exp_avg is 'e4m3'", "'fp16'"]),
        (section("FP16StateAdamW", master_weights="fp16"), None, ["master_weights", '"fp32"']),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(given, asked, said):
    with pytest.raises(ConfigError) as error:
        rewritten_optimizer(given, asked)
    for part in said:
        assert part in str(error.value)


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


CONFLICTS = [
    *((key, True) for key in STATE_CONFLICTS),
    ("zero_optimization.offload_optimizer.device", "nvme"),
    ("zero_optimization.offload_optimizer.ratio", 0.5),
]


@pytest.mark.parametrize(("key", "value"), CONFLICTS, ids=str)
def test_settings_that_would_corrupt_states_are_refused(key, value):
    config = parse_section({"recipe": "bf16", "optimizer_states": {}})
    with pytest.raises(ConfigError) as error:
        refuse_conflicts(nested(key, value), config)
    assert f'"{key}": {value!r}: ' in str(error.value)
    assert '"optimizer_states": null' in str(error.value)
    with pytest.raises(ConfigError, match="FP16StateAdamW cannot"):
        refuse_state_conflicts(nested(key, value))
    refuse_conflicts(nested(key, value), EXACT)


def test_what_works_is_no_conflict():
    offload = {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    refuse_state_conflicts({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    refuse_state_conflicts({"zero_optimization": {"elastic_checkpoint": False}, "bf16": {}})


PAPER = parse_section({})


def test_the_configuration_is_replaced_where_it_was_found_and_never_changed():
    content = {"optimizer": section("AdamW", lr=1e-4), "fp4": {}}
    before = copy.deepcopy(content)
    for name, value in (("config", content), ("config_params", content), ("config", "ds.json")):
        call = {name: value}
        prepare_optimizer(call, content, PAPER)
        assert call[name]["optimizer"]["type"] == "FP16StateAdamW"
    args = Namespace(deepspeed_config=content, other=1)
    call = {"args": args}
    prepare_optimizer(call, content, PAPER)
    assert call["args"].deepspeed_config["optimizer"]["type"] == "FP16StateAdamW"
    assert call["args"].other == 1
    assert args.deepspeed_config is content
    assert content == before


def test_without_the_key_or_without_an_optimizer_a_call_is_left_as_it_is():
    content = {"optimizer": section("AdamW")}
    for config in (None, EXACT, parse_section({"enabled": False})):
        call = {"config": content}
        prepare_optimizer(call, content, config)
        assert call["config"] is content
    call = {"config": {}}
    prepare_optimizer(call, {}, PAPER)
    assert call == {"config": {}}
    prepare_optimizer(call, None, None)


def test_fp16_masters_are_refused_whatever_the_optimizer_is():
    config = parse_section({"optimizer_states": {"master_weights": "fp16"}})
    with pytest.raises(ConfigError, match="float32 partitions"):
        prepare_optimizer({"config": {}}, {}, config)
    own = FP16StateAdamW([torch.zeros(4, dtype=torch.bfloat16)], master_weights="fp16")
    with pytest.raises(ConfigError, match="float32 partitions"):
        prepare_optimizer({"config": {}, "optimizer": own}, {}, None)


def test_an_offloaded_client_optimizer_is_allowed_in_the_copy():
    content = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    call = {"config": content, "optimizer": torch.optim.AdamW([torch.zeros(1)])}
    prepare_optimizer(call, content, PAPER)
    assert call["config"]["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in content
    own = FP16StateAdamW([torch.zeros(1)])
    call = {"config": content, "optimizer": own}
    prepare_optimizer(call, content, None)
    assert call["config"]["zero_force_ds_cpu_optimizer"] is False
    assert call["optimizer"] is own


def test_a_callable_is_wrapped():
    parameters = [torch.zeros(4)]
    call = {"config": {}, "optimizer": lambda given: torch.optim.AdamW(given, lr=0.5)}
    prepare_optimizer(call, {}, PAPER)
    made = call["optimizer"](parameters)
    assert type(made) is FP16StateAdamW
    assert made.param_groups[0]["lr"] == 0.5
    call = {"config": {}, "optimizer": lambda given: torch.optim.SGD(given, lr=0.5)}
    prepare_optimizer(call, {}, PAPER)
    with pytest.raises(ConfigError, match=r"torch\.optim\.sgd\.SGD"):
        call["optimizer"](parameters)


def test_deepspeed_knows_the_name_only_while_it_builds():
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    before = list(ZERO_SUPPORTED_OPTIMIZERS)
    with pytest.raises(KeyError), known_to_deepspeed():
        assert torch.optim.FP16StateAdamW is FP16StateAdamW
        with known_to_deepspeed():
            assert ZERO_SUPPORTED_OPTIMIZERS == [*before, FP16StateAdamW]
        raise KeyError
    assert before == ZERO_SUPPORTED_OPTIMIZERS
    assert not hasattr(torch.optim, "FP16StateAdamW")


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
    return model, torch.randn(32, 64), torch.randn(32, 8)


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(optimizer, model, x, y, steps, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("asked", [ASKED, E4M3], ids=["fp16", "e4m3"])
def test_a_converted_object_goes_on_where_it_was_and_so_does_its_scheduler(asked):
    weights = {}
    for kind in ("plain", "converted"):
        model, x, y = model_and_batch()
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3, fused=True)
        groups = optimizer.param_groups
        dicts = list(groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        train(optimizer, model, x, y, 5, scheduler)
        if kind == "converted":
            require_convertible(optimizer, asked)
            assert converted(optimizer, asked) is optimizer
            assert type(optimizer) is FP16StateAdamW
            assert optimizer.param_groups is groups
            assert all(a is b for a, b in zip(groups, dicts, strict=True))
            assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
            assert {"fused", "amsgrad"}.isdisjoint(groups[0])
            assert {int(state["step"]) for state in optimizer.state.values()} == {5}
        train(optimizer, model, x, y, 5, scheduler)
        weights[kind] = torch.cat([p.detach().flatten() for p in model.parameters()])
        if kind == "converted":
            codes = {state["exp_avg"].dtype for state in optimizer.state.values()}
            wanted = torch.float16 if asked is ASKED else torch.float8_e4m3fn
            assert codes == {wanted}
            assert {int(state["step"]) for state in optimizer.state.values()} == {10}
            assert groups[0]["lr"] == pytest.approx(1e-3 / 11)
    start = torch.cat([p.detach().flatten() for p in model_and_batch()[0].parameters()])
    moved = (weights["plain"] - start).norm()
    assert (weights["converted"] - weights["plain"]).norm() < 0.02 * moved


def test_a_converted_object_can_be_saved_and_loaded_by_adamw():
    model, x, y = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    converted(optimizer, ASKED)
    train(optimizer, model, x, y, 2)
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert {state["exp_avg_sq"].dtype for state in plain.state.values()} == {torch.float32}


def deepspeed_adam(cls, **attributes):
    """DeepSpeed's optimizer without the op that it compiles and steps with."""
    optimizer = cls.__new__(cls)
    defaults = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torch.optim.Optimizer.__init__(
        optimizer, [torch.zeros(8)], {**defaults, "bias_correction": True, "amsgrad": False}
    )
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    return optimizer


def test_deepspeeds_own_adams_are_converted():
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    fused = deepspeed_adam(FusedAdam, adam_w_mode=1)
    parameter = fused.param_groups[0]["params"][0]
    fused.state[parameter] = {"exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}
    fused.param_groups[0]["step"] = 7  # where its older releases count
    require_convertible(fused, ASKED)
    assert type(converted(fused, ASKED)) is FP16StateAdamW
    assert int(fused.state[parameter]["step"]) == 7

    destroyed = []
    native = Namespace(destroy_adam=destroyed.append)
    on_cpu = deepspeed_adam(DeepSpeedCPUAdam, adam_w_mode=True, opt_id=5, ds_opt_adam=native)
    require_convertible(on_cpu, ASKED)
    assert type(converted(on_cpu, ASKED)) is FP16StateAdamW
    assert on_cpu.param_groups[0]["betas"] == (0.9, 0.95)
    assert destroyed == [5]

    coupled = deepspeed_adam(FusedAdam, adam_w_mode=0)
    with pytest.raises(ConfigError, match="coupled with the gradient"):
        require_convertible(coupled, ASKED)


class Patched(torch.optim.AdamW):
    def step(self, closure=None):
        return None


def with_replaced_step():
    optimizer = torch.optim.AdamW([torch.zeros(4)])
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.optim.SGD([torch.zeros(4)], lr=0.1), "SGD"),
        (lambda: Patched([torch.zeros(4)]), "Patched"),
        (lambda: torch.optim.AdamW([torch.zeros(4)], amsgrad=True), "amsgrad=True"),
        (lambda: torch.optim.AdamW([torch.zeros(4)], maximize=True), "maximize=True"),
        (lambda: torch.optim.Adam([torch.zeros(4)], weight_decay=0.1), "weight_decay=0.1"),
        (with_replaced_step, "has been replaced"),
        (lambda: FP16StateAdamW([torch.zeros(4)], exp_avg="e4m3"), "exp_avg is 'e4m3'"),
        (
            lambda: FP16StateAdamW(
                [{"params": [torch.zeros(4)]}, {"params": [torch.ones(4)], "exp_avg": "e4m3"}]
            ),
            "'e4m3'",
        ),
    ],
)
def test_an_object_that_cannot_be_served_is_refused_untouched(make, said):
    optimizer = make()
    before = type(optimizer), copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ConfigError, match=said):
        prepare_optimizer({"config": {}, "optimizer": optimizer}, {}, PAPER)
    assert (type(optimizer), len(optimizer.param_groups)) == (before[0], len(before[1]))
    assert optimizer.param_groups[0].keys() == before[1][0].keys()


def test_adam_without_decay_and_our_own_class_are_taken():
    for optimizer in (
        torch.optim.Adam([torch.zeros(4)]),
        torch.optim.Adam([torch.zeros(4)], weight_decay=0.1, decoupled_weight_decay=True),
        FP16StateAdamW([torch.zeros(4)]),
    ):
        call = {"config": {}, "optimizer": optimizer}
        prepare_optimizer(call, {}, PAPER)
        assert call["optimizer"] is optimizer
        assert type(optimizer) is FP16StateAdamW
    other = torch.optim.SGD([torch.zeros(4)], lr=0.1)
    prepare_optimizer({"config": {}, "optimizer": other}, {}, EXACT)
    assert type(other) is torch.optim.SGD
