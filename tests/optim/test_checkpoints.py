"""States in and out: this class, torch.optim.AdamW, other optimisers, and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim import Adam, AdamW

from fp4_plugin.errors import ConfigError
from fp4_plugin.optim import FP16StateAdamW
from tests.optim.reference import decode_tensor, gradients, relative

NUMEL = 3000
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}


def trained(kind, steps: int = 10, **options):
    """(optimiser, parameter) after `steps` steps on the same random gradients."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL))
    optimizer = kind([param], **{**OPTIONS, **options})
    advance(optimizer, param, range(steps))
    return optimizer, param


def advance(optimizer, param, steps: range) -> None:
    grads = gradients("noisy", [1.0, 1e-3], 40, NUMEL)
    for step in steps:
        param.grad = grads[step].to(param.dtype)
        optimizer.step()


def fresh(kind, like: torch.nn.Parameter, **options):
    """(optimiser without a state, copy of the parameter)."""
    param = torch.nn.Parameter(like.detach().clone())
    return kind([param], **{**OPTIONS, **options}), param


@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
def test_a_portable_state_is_that_of_adamw_and_adamw_continues_it(exp_avg):
    ours, param = trained(FP16StateAdamW, exp_avg=exp_avg)
    saved = ours.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg", "exp_avg_sq"):
        assert saved["state"][0][name].dtype == torch.float32
        assert saved["state"][0][name].shape == param.shape
    theirs, their_param = fresh(AdamW, param)
    theirs.load_state_dict(copy.deepcopy(saved))
    advance(theirs, their_param, range(10, 30))
    advance(ours, param, range(10, 30))
    _, exact = trained(AdamW, steps=30)
    moved = exact.detach() - torch.linspace(-1, 1, NUMEL)
    bound = 0.005 if exp_avg == "fp16" else 0.06
    for continued in (their_param, param):
        start = torch.linspace(-1, 1, NUMEL)
        assert relative(continued.detach() - start, moved) < bound
    assert int(theirs.state[their_param]["step"]) == 30


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
def test_the_state_of_adamw_continues_here(kind, exp_avg):
    theirs, their_param = trained(kind, weight_decay=0.0)
    ours, param = fresh(FP16StateAdamW, their_param, exp_avg=exp_avg, weight_decay=0.3)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["weight_decay"] == 0.0  # the checkpoint decides these
    assert ours.param_groups[0]["exp_avg"] == exp_avg  # and who made the optimiser these
    start = their_param.detach().clone()
    advance(ours, param, range(10, 30))
    advance(theirs, their_param, range(10, 30))
    bound = 0.005 if exp_avg == "fp16" else 0.05
    assert relative(param.detach() - start, their_param.detach() - start) < bound
    assert int(ours.state[param]["step"]) == 30


def test_hyperparameters_come_from_the_checkpoint_and_storage_from_the_code():
    saved = trained(FP16StateAdamW, exp_avg="e4m3", checkpoint="native")[0].state_dict()
    ours, param = fresh(FP16StateAdamW, trained(FP16StateAdamW)[1], lr=5.0, betas=(0.0, 0.0))
    ours.load_state_dict(saved)
    group = ours.param_groups[0]
    assert {name: group[name] for name in OPTIONS} == OPTIONS
    assert (group["exp_avg"], group["checkpoint"]) == ("fp16", "portable")
    assert ours.state[param]["exp_avg"].dtype == torch.float16
    assert "compile" in group


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
@pytest.mark.parametrize("master", ["fp32", "fp16"])
def test_loading_what_was_saved_gives_the_same_bits(native, exp_avg, master):
    form = "native" if native else "portable"
    param = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL).to(torch.bfloat16))
    options = {"exp_avg": exp_avg, "master_weights": master, "checkpoint": form}
    ours = FP16StateAdamW([param], **OPTIONS, **options)
    advance(ours, param, range(5))
    saved = copy.deepcopy(ours.state_dict())
    again, copied = fresh(FP16StateAdamW, param, **options)
    again.load_state_dict(saved)
    assert_same_state(again.state[copied], ours.state[param])
    assert_same_state(again.state_dict()["state"][0], saved["state"][0])


def assert_same_state(state, expected) -> None:
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert state[name].shape == value.shape, name
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (state[name], value))
        assert torch.equal(a, b), name


def test_a_native_state_is_half_the_size_and_no_number_for_adamw():
    sizes = {}
    for form in ("portable", "native"):
        saved = trained(FP16StateAdamW, checkpoint=form)[0].state_dict()["state"][0]
        sizes[form] = sum(t.numel() * t.element_size() for t in saved.values())
        assert ("exp_avg" in saved) == (form == "portable")
    assert sizes["native"] < 0.51 * sizes["portable"]


def test_exporting_changes_nothing():
    ours, param = trained(FP16StateAdamW)
    before = {name: value.clone() for name, value in ours.state[param].items()}
    saved = ours.state_dict()
    for value in saved["state"][0].values():
        value.zero_()
    assert_same_state(
        {n: v for n, v in ours.state[param].items() if n != "step"},
        {n: v for n, v in before.items() if n != "step"},
    )


def test_a_state_found_in_float32_is_encoded_at_the_next_step():
    """DeepSpeed's universal checkpoints write float32 moments into the state."""
    expected, exact = trained(FP16StateAdamW)
    ours, param = fresh(FP16StateAdamW, trained(FP16StateAdamW)[1])
    portable = expected.state_dict()["state"][0]
    ours.state[param] = {name: value.clone() for name, value in portable.items()}
    advance(ours, param, range(10, 12))
    advance(expected, exact, range(10, 12))
    assert_same_state(ours.state[param], expected.state[exact])
    assert torch.equal(param.detach(), exact.detach())


def test_the_moments_exported_are_those_in_memory():
    ours, param = trained(FP16StateAdamW, exp_avg="e4m3")
    state, portable = ours.state[param], ours.state_dict()["state"][0]
    from fp4_plugin.optim import STATE_FORMATS

    for name, fmt in (("exp_avg", "e4m3"), ("exp_avg_sq", "fp16_sqrt")):
        value = decode_tensor(state[name], state[f"{name}_scale"], STATE_FORMATS[fmt])
        assert torch.equal(value, portable[name])


def sizes_differ(saved):
    saved["state"][0]["exp_avg"] = torch.zeros(NUMEL + 1)


def is_amsgrad(saved):
    saved["state"][0]["max_exp_avg_sq"] = torch.zeros(NUMEL)


def lacks_a_moment(saved):
    del saved["state"][0]["exp_avg_sq"]


def was_amsgrad(saved):
    saved["param_groups"][0]["amsgrad"] = True


def was_coupled(saved):
    saved["param_groups"][0].update(decoupled_weight_decay=False, weight_decay=0.1)


def went_uphill(saved):
    saved["param_groups"][0]["maximize"] = True


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (sizes_differ, "'exp_avg' .* has 3,001 elements, the parameter 3,000"),
        (is_amsgrad, "max_exp_avg_sq.*amsgrad.*torch.optim.AdamW"),
        (lacks_a_moment, "no 'exp_avg_sq'"),
        (was_amsgrad, "amsgrad=True"),
        (was_coupled, "decoupled_weight_decay=False"),
        (went_uphill, "maximize=True"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_state_that_cannot_be_continued_is_refused_and_changes_nothing(damage, words):
    saved = trained(AdamW)[0].state_dict()
    damage(saved)
    ours, param = trained(FP16StateAdamW, steps=3)
    before = copy.deepcopy(dict(ours.state[param]))
    with pytest.raises(ConfigError, match=words):
        ours.load_state_dict(saved)
    assert_same_state(ours.state[param], before)


def test_adam_with_coupled_decay_is_refused_as_it_saves_itself():
    theirs, param = trained(Adam, weight_decay=0.1)
    with pytest.raises(ConfigError, match="decoupled_weight_decay=False"):
        fresh(FP16StateAdamW, param)[0].load_state_dict(theirs.state_dict())


def test_a_different_number_of_parameters_is_refused():
    saved = trained(AdamW)[0].state_dict()
    two = FP16StateAdamW([torch.nn.Parameter(torch.ones(4)) for _ in range(2)])
    with pytest.raises(ValueError, match="size of optimizer's group"):
        two.load_state_dict(saved)


def test_a_deepcopy_is_independent():
    ours, param = trained(FP16StateAdamW)
    twin = copy.deepcopy(ours)
    (twin_param,) = twin.param_groups[0]["params"]
    assert_same_state(twin.state[twin_param], ours.state[param])
    before = copy.deepcopy(dict(ours.state[param]))
    advance(twin, twin_param, range(10, 12))
    assert_same_state(ours.state[param], before)
    assert not torch.equal(twin_param.detach(), param.detach())


@pytest.mark.parametrize("form", ["portable", "native"])
@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
def test_a_state_dict_can_be_pickled(form, exp_avg):
    """torch.distributed's object collectives send pickles."""
    saved = trained(FP16StateAdamW, exp_avg=exp_avg, checkpoint=form)[0].state_dict()
    assert_same_state(pickle.loads(pickle.dumps(saved))["state"][0], saved["state"][0])


def test_loading_leaves_the_given_state_dict_as_it_was():
    saved = trained(AdamW)[0].state_dict()
    groups = copy.deepcopy(saved["param_groups"])
    state = copy.deepcopy(saved["state"])
    ours, param = fresh(FP16StateAdamW, trained(AdamW)[1])
    ours.load_state_dict(saved)
    advance(ours, param, range(2))
    assert saved["param_groups"] == groups
    assert_same_state(saved["state"][0], state[0])


def test_a_state_without_steps_is_empty_and_loads():
    ours, _ = trained(FP16StateAdamW, steps=0)
    saved = ours.state_dict()
    assert saved["state"] == {}
    ours.load_state_dict(saved)
    fresh(AdamW, torch.nn.Parameter(torch.ones(NUMEL)))[0].load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_parameters_in_another_memory_order_go_both_ways(dtype):
    """torch.optim.AdamW gives its states the strides of the parameter, ours are contiguous."""

    def strided(kind):
        start = torch.linspace(-1, 1, 96).view(2, 3, 4, 4).to(dtype)
        param = torch.nn.Parameter(start.to(memory_format=torch.channels_last))
        optimizer = kind([param], **OPTIONS)
        grads = gradients("noisy", [1.0], 8, 96)
        return optimizer, param, [g.view(2, 3, 4, 4).to(dtype) for g in grads]

    def steps(optimizer, param, grads):
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()

    for first, second in ((AdamW, FP16StateAdamW), (FP16StateAdamW, AdamW)):
        before, param, grads = strided(first)
        steps(before, param, grads[:4])
        after, continued, _ = strided(second)
        with torch.no_grad():
            continued.copy_(param)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        steps(after, continued, grads[4:])
        steps(before, param, grads[4:])
        # AdamW rounds a BF16 weight in each of the four steps, by up to half a spacing of 2^-7.
        assert torch.allclose(continued.float(), param.float(), atol=3e-4, rtol=2**-6)


def test_a_state_dict_is_a_snapshot():
    """Rolling back in memory: nothing in it moves with the next steps."""
    for form in ("portable", "native"):
        ours, param = trained(FP16StateAdamW, checkpoint=form)
        saved = ours.state_dict()
        before = copy.deepcopy(saved["state"][0])
        advance(ours, param, range(10, 13))
        assert_same_state(saved["state"][0], before)


def test_what_schedulers_and_users_keep_in_a_group_comes_from_the_checkpoint():
    ours, param = trained(FP16StateAdamW)
    ours.param_groups[0].update(max_lr=0.5, name="x")
    again, _ = fresh(FP16StateAdamW, param)
    again.load_state_dict(ours.state_dict())
    assert (again.param_groups[0]["max_lr"], again.param_groups[0]["name"]) == (0.5, "x")
    theirs, _ = trained(AdamW)
    again.load_state_dict(theirs.state_dict())
    assert "foreach" not in again.param_groups[0]


@pytest.mark.parametrize("damage", [lambda s: s.pop("exp_avg_scale"), None])
def test_a_native_state_with_missing_scales_is_refused(damage):
    ours, param = trained(FP16StateAdamW, checkpoint="native")
    saved = ours.state_dict()
    state = saved["state"][0]
    if damage is None:
        state["exp_avg_scale"] = state["exp_avg_scale"][:1]
    else:
        damage(state)
    with pytest.raises(ConfigError, match="'exp_avg_scale'.* scales, .* are needed"):
        fresh(FP16StateAdamW, param)[0].load_state_dict(saved)
