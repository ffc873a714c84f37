"""What a step does to the weights, against AdamW in float64 and against torch.optim.AdamW."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import AdamW

from fp4_plugin.optim import FP16StateAdamW, StateFormat
from tests.optim.reference import (
    SCALES,
    adamw_float64,
    by_scale,
    gradients,
    relative,
    replaced,
    run,
)

LR = 1e-3
# No decay and hardly an eps: the update itself is compared, at every size of gradient.
BARE = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-15, "weight_decay": 0.0}
NUMEL = 4500  # blocks of 1024, and a short one
# Relative error of 200 updates (measured): FP16 .0016 random and noisy, .04 steady at 1e-7;
# E4M3 .079 random, .023 steady and noisy.
FP16_BOUND = 0.03
E4M3_BOUND = 0.08


def updates(kind: str, scales: list[float], steps: int = 200, **ours) -> list[float]:
    """Relative error of the summed updates of `steps` steps, for each scale."""
    grads = gradients(kind, scales, steps, NUMEL)
    start = torch.zeros(NUMEL)
    expected = adamw_float64(start, grads, **BARE)
    return by_scale(
        run(lambda p: FP16StateAdamW(p, **BARE, **ours), start, grads), expected, scales
    )


@pytest.mark.parametrize("kind", ["random", "noisy"])
def test_fp16_states_follow_adamw_at_every_gradient_scale_of_one_tensor(kind):
    errors = updates(kind, SCALES)
    assert max(errors) < FP16_BOUND, errors


def test_fp16_states_follow_a_steady_gradient():
    errors = updates("steady", SCALES)
    assert max(errors[:-1]) < 0.005, errors
    assert errors[-1] < 0.06, errors  # 1e-7 beside 10: the first roots are subnormal


@pytest.mark.parametrize("kind", ["random", "steady", "noisy"])
@pytest.mark.parametrize("scale", [10.0, 1.0, 1e-7])
def test_an_e4m3_first_moment_follows_adamw_on_gradients_of_one_scale(kind, scale):
    (error,) = updates(kind, [scale], exp_avg="e4m3")
    assert error < E4M3_BOUND


def test_e4m3_rounded_to_nearest_would_stop_short_of_a_steady_gradient():
    with replaced("e4m3", StateFormat("e4m3", torch.float8_e4m3fn)):
        (error,) = updates("steady", [1.0], exp_avg="e4m3")
    assert error > 2 * E4M3_BOUND


@pytest.mark.parametrize(
    "naive",
    [
        StateFormat("fp16_sqrt", torch.float16, stochastic=True),
        StateFormat("fp16_sqrt", torch.float16),
    ],
    ids=["stochastic", "nearest"],
)
def test_a_second_moment_stored_without_its_root_would_be_far_off(naive):
    with replaced("fp16_sqrt", naive):
        errors = updates("random", [10.0, 1e-6], steps=30)
    assert max(errors) > 2, errors


def largest_update(kind: str, scales: list[float], **ours) -> float:
    """Largest change of a weight in one of 200 steps, in units of the learning rate."""
    param = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = FP16StateAdamW([param], **{**BARE, "eps": 1e-8, **ours})
    largest = 0.0
    for grad in gradients(kind, scales, 200, NUMEL):
        before = param.detach().clone()
        param.grad = grad
        optimizer.step()
        largest = max(largest, float((param.detach() - before).abs().max()) / LR)
    return largest


@pytest.mark.parametrize("kind", ["random", "steady", "noisy"])
@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
@pytest.mark.parametrize("scales", [[10.0, 1e-7], [10.0, 1e-4], SCALES], ids=["wide", "mid", "all"])
def test_small_gradients_beside_large_ones_never_make_a_large_update(kind, exp_avg, scales):
    # AdamW itself stays below 1.6 on these gradients.
    assert largest_update(kind, scales, exp_avg=exp_avg) < 6


@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
def test_a_gradient_that_falls_by_orders_of_magnitude_is_followed(exp_avg):
    numel = 2048
    large, small = gradients("random", [1.0], 60, numel), gradients("random", [1e-5], 60, numel)
    options = {**BARE, "betas": (0.9, 0.95), "eps": 1e-12}
    start = torch.zeros(numel)
    expected = adamw_float64(start, [*large, *small], **options)
    value = run(lambda p: FP16StateAdamW(p, **options, exp_avg=exp_avg), start, [*large, *small])
    assert relative(value, expected) < (FP16_BOUND if exp_avg == "fp16" else 1.5 * E4M3_BOUND)


SHAPES = [(0,), (1,), (), (1023,), (1024,), (1025,), (3, 0, 2), (2, 3, 5, 7), (33, 65)]
DTYPES = [(torch.float32, "fp32")] + [
    (dtype, master) for dtype in (torch.bfloat16, torch.float16) for master in ("fp32", "fp16")
]


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """`x` in the strides that it can have."""
    found = {"contiguous": x, "expanded storage": torch.stack((x, x), dim=-1)[..., 0]}
    if x.dim() >= 2:
        found["transposed"] = x.transpose(0, 1).contiguous().transpose(0, 1)
    if x.dim() == 4:
        found["channels_last"] = x.to(memory_format=torch.channels_last)
    return found


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(DTYPES),
    exp_avg=st.sampled_from(["fp16", "e4m3"]),
    grad_layout=st.integers(0, 3),
    param_layout=st.integers(0, 3),
    missing=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_shape_type_and_layout_follows_float64(
    shape, kind, exp_avg, grad_layout, param_layout, missing
):
    dtype, master = kind
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator).to(dtype)
    grads = [torch.randn(shape, generator=generator).to(dtype) for _ in missing]
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    given_grads = [None if absent else g for g, absent in zip(grads, missing, strict=True)]
    expected = adamw_float64(start, given_grads, **options)

    param_forms, count = list(layouts(start).values()), len(layouts(start))
    param = torch.nn.Parameter(param_forms[param_layout % count])
    strides = param.stride()
    optimizer = FP16StateAdamW([param], **options, exp_avg=exp_avg, master_weights=master)
    for grad in given_grads:
        param.grad = None
        if grad is not None:
            param.grad = list(layouts(grad).values())[grad_layout % count]
        optimizer.step()
    assert param.stride() == strides
    assert param.dtype == dtype
    # Two thirds of a step of E4M3's noise, or the grid of the parameter.
    grid = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    # An FP16 master is rounded up or down in each step.
    grid += len(missing) * 2.0**-10 if master == "fp16" else 0
    moved = (param.detach().double() - expected).abs()
    allowed = 0.01 * (0.4 if exp_avg == "e4m3" else 0.02) + grid * expected.abs()
    assert bool((moved <= allowed).all()), (moved - allowed).max()


def test_many_small_tensors_are_each_their_own():
    generator = torch.Generator().manual_seed(3)
    sizes = [1, 7, 1024, 1025, 3000, 0, 64, *([16] * 40)]
    scales = [10.0 ** (i % 9 - 7) for i in range(len(sizes))]
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    together = FP16StateAdamW(params, **BARE)
    exact = [torch.nn.Parameter(p.detach().clone()) for p in params]
    oracle = AdamW(exact, **BARE)
    for _ in range(20):
        for ours, theirs, scale in zip(params, exact, scales, strict=True):
            ours.grad = torch.randn(ours.shape, generator=generator) * scale
            theirs.grad = ours.grad.clone()
        together.step()
        oracle.step()
    for ours, theirs in zip(params, exact, strict=True):
        if ours.numel():
            assert relative(ours.detach(), theirs.detach()) < FP16_BOUND


def test_groups_have_their_own_settings_and_parameters_without_gradients_stay():
    torch.manual_seed(5)
    start = [torch.randn(1500) for _ in range(3)]
    grads = [[torch.randn(1500) for _ in range(6)] for _ in range(3)]
    grads[1][2] = grads[1][3] = None
    settings_of = [
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    ]
    params = [torch.nn.Parameter(x.clone()) for x in [*start, torch.ones(4)]]
    optimizer = FP16StateAdamW(
        [
            {"params": [params[0]], **settings_of[0]},
            {"params": params[1:], **settings_of[1], "exp_avg": "fp16"},
        ]
    )
    for step in range(6):
        for index in range(3):
            params[index].grad = grads[index][step]
        optimizer.step()
    for index in range(3):
        expected = adamw_float64(start[index], grads[index], **settings_of[min(index, 1)])
        moved = params[index].detach().double() - start[index].double()
        assert relative(moved, expected - start[index].double()) < 0.01
    assert torch.equal(params[3].detach(), torch.ones(4))
    assert params[3] not in optimizer.state
    assert int(optimizer.state[params[1]]["step"]) == 4
    assert int(optimizer.state[params[2]]["step"]) == 6


@pytest.mark.parametrize("master", ["fp32", "fp16"])
def test_a_bf16_parameter_moves_by_updates_below_its_own_grid(master):
    """Steps of 1e-4 at a weight of 1, where BF16 has a grid of 2^-7, need a master weight."""
    param = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    optimizer = FP16StateAdamW([param], lr=1e-4, weight_decay=0.0, master_weights=master)
    for _ in range(300):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert float(param.detach().double().mean()) == pytest.approx(1 - 300e-4, abs=2e-3)


def test_zero_elements_in_a_bf16_master_follow_too():
    param = torch.nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16))
    optimizer = FP16StateAdamW([param], lr=1e-3, master_weights="fp16")
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.allclose(param.detach().float(), torch.full((2048,), -1e-3), rtol=2**-7)


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned():
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = FP16StateAdamW([param], lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8.0
    assert bool((param.detach() < 1).all())
    assert param.requires_grad


@pytest.mark.parametrize(
    "scheduler",
    [
        functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20),
        functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=30),
        functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    ],
    ids=["cosine", "one_cycle", "lambda"],
)
def test_learning_rate_schedules_apply(scheduler):
    grads = gradients("random", [1.0], 20, 1024)

    def scheduled(kind):
        param = torch.nn.Parameter(torch.ones(1024))
        optimizer = kind([param], lr=1e-2)
        schedule = scheduler(optimizer)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
            schedule.step()
        return param.detach() - 1, optimizer.param_groups[0]

    ours, group = scheduled(FP16StateAdamW)
    theirs, expected = scheduled(AdamW)
    assert relative(ours, theirs) < 0.005
    assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])


def test_a_tensor_as_learning_rate_is_taken():
    param = torch.nn.Parameter(torch.ones(16))
    optimizer = FP16StateAdamW([param], lr=torch.tensor(0.5), weight_decay=0.0)
    param.grad = torch.ones(16)
    optimizer.step()
    assert torch.allclose(param.detach(), torch.full((16,), 0.5), atol=1e-3)


def test_a_gradient_scaler_skips_overflows_and_unscales():
    param = torch.nn.Parameter(torch.ones(2000))
    optimizer = FP16StateAdamW([param], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale((param * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), torch.ones(2000))
    assert scaler.get_scale() == 2.0**9
    optimizer.zero_grad()
    scaler.scale((param * 3).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expected = adamw_float64(
        torch.ones(2000), [torch.full((2000,), 3.0)], 1e-2, (0.9, 0.999), 1e-8, 1e-2
    )
    assert torch.allclose(param.detach().double(), expected, atol=2e-5)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.allclose(moment, torch.full((2000,), 0.3), rtol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("exp_avg", ["fp16", "e4m3"])
def test_a_gradient_that_is_not_finite_stays_visible_in_its_block(bad, exp_avg):
    param = torch.nn.Parameter(torch.ones(3000))
    optimizer = FP16StateAdamW([param], lr=1e-2, exp_avg=exp_avg)
    grad = torch.ones(3000)
    grad[1500] = bad
    for _ in range(2):
        param.grad = grad.clone()
        optimizer.step()
        grad[1500] = 1.0
    block = torch.zeros(3000, dtype=torch.bool)
    block[1024:2048] = True
    assert bool(param.detach()[block].isnan().all())
    assert bool(param.detach()[~block].isfinite().all())
    state = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert bool(state[name][block].isnan().all())
        assert bool(state[name][~block].isfinite().all())


def test_gradients_of_another_type_than_the_parameter_are_read_as_they_are():
    """BF16 gradients beside a float32 parameter, where torch can be told to allow that."""
    param = torch.nn.Parameter(torch.zeros(1024))
    optimizer = FP16StateAdamW([param], lr=1e-2, weight_decay=0.0)
    grad = torch.linspace(-2, 2, 1024).to(torch.bfloat16)
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype: a gradient has the type of its parameter")
    param.grad_dtype = torch.bfloat16
    param.grad = grad
    optimizer.step()
    expected = adamw_float64(torch.zeros(1024), [grad], 1e-2, (0.9, 0.999), 1e-8, 0.0)
    assert relative(param.detach(), expected) < 0.005
