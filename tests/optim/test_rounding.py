"""Stochastic rounding: unbiased, and decided by the step and the element alone."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import pytest
import torch

from fp4_plugin.optim import FP16StateAdamW, StateFormat, scratch
from tests.optim.reference import gradients, replaced

# No memory: what is stored after a step is that step's gradient, rounded.
MEMORYLESS = {"lr": 0.0, "betas": (0.0, 0.0), "weight_decay": 0.0}
# Spacing just above 1, where a block's amax is below 2.
ULP = {"exp_avg": 2.0**-3, "exp_avg_sq": 2.0**-10}


def moment_after(optimizer: FP16StateAdamW, name: str) -> torch.Tensor:
    """What is stored, in float32; of the second moment the root."""
    value = optimizer.state_dict()["state"][0][name]
    return value.sqrt() if name == "exp_avg_sq" else value


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 0.8])
def test_rounding_is_unbiased_over_elements(name, fraction):
    numel = 32 * 1024
    exact = 1 + fraction * ULP[name]
    param = torch.nn.Parameter(torch.zeros(numel))
    optimizer = FP16StateAdamW([param], exp_avg="e4m3", **MEMORYLESS)
    param.grad = torch.full((numel,), exact)
    optimizer.step()
    stored = moment_after(optimizer, name).double()
    assert set(stored.unique().tolist()) == {1.0, 1 + ULP[name]}
    standard_error = ULP[name] * (fraction * (1 - fraction) / numel) ** 0.5
    assert abs(float(stored.mean()) - exact) < 4 * standard_error


def test_rounding_is_unbiased_over_steps_for_every_element():
    numel, steps = 256, 700
    fraction = torch.linspace(0.02, 0.98, numel, dtype=torch.float64).repeat(2, 1)
    # Two parameters, so that one run tells of both moments.
    params = [torch.nn.Parameter(torch.zeros(numel)) for _ in ULP]
    optimizer = FP16StateAdamW(params, exp_avg="e4m3", **MEMORYLESS)
    ups = torch.zeros(steps, 2, numel, dtype=torch.float64)
    for step in range(steps):
        for param, ulp in zip(params, ULP.values(), strict=True):
            param.grad = (1 + fraction[0] * ulp).float()
        optimizer.step()
        for index, (name, param) in enumerate(zip(ULP, params, strict=True)):
            state = optimizer.state[param]
            ups[step, index] = state[name].float() * state[f"{name}_scale"] > 1
    variance = fraction * (1 - fraction)
    deviation = (ups.mean(0) - fraction) / (variance / steps).sqrt()
    assert float(deviation.abs().max()) < 4.5
    # The two steps of a pair use opposite bits, so that the mean is less noisy than by chance.
    assert 0.05 < float(deviation.square().mean()) < 1.2
    # What a pair draws tells nothing of the next one.
    products = ((ups[2:] - fraction) * (ups[:-2] - fraction)).sum(0)
    correlation = products / variance / (steps - 2) ** 0.5
    assert float(correlation.abs().max()) < 4.5


def test_master_weights_in_fp16_are_unbiased_over_steps():
    param = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = FP16StateAdamW([param], lr=1e-5, weight_decay=0.0, master_weights="fp16")
    for _ in range(400):
        param.grad = torch.ones_like(param)
        optimizer.step()
    # Each step is a fiftieth of the master's spacing below 1, 2^-11.
    master = optimizer.state_dict()["state"][0]["master"].double()
    assert float(1 - master.mean()) == pytest.approx(400e-5, rel=0.02)


BETAS2 = (0.95, 0.999, 0.9999)
CHECKED = (50, 200, 800, 2000)


@dataclass(frozen=True)
class DeadElements:
    """sqrt(v) of 512 elements some steps after their gradients stopped, beside 512 live ones.

    ratio: stored over exact. size: exact over that of the live ones, medians.
    """

    beta2: float
    steps: int
    ratio: torch.Tensor
    size: float


def dead_elements(betas2: tuple[float, ...]) -> list[DeadElements]:
    """A parameter for each of `betas2`; half of each has gradients in the first 20 steps only."""
    generator = torch.Generator().manual_seed(11)
    params = [torch.nn.Parameter(torch.zeros(1024)) for _ in betas2]
    groups = [{"params": [p], "betas": (0.9, b)} for p, b in zip(params, betas2, strict=True)]
    optimizer = FP16StateAdamW(groups, lr=0.0, weight_decay=0.0)
    v, beta2 = torch.zeros(len(betas2), 1024).double(), torch.tensor(betas2).double().view(-1, 1)
    found = []
    for step in range(max(CHECKED) + 20):
        grad = torch.randn(1024, generator=generator)
        if step >= 20:
            grad[::2] = 0.0
        v = beta2 * v + (1 - beta2) * grad.double() ** 2
        for param in params:
            param.grad = grad
        optimizer.step()
        if step - 19 in CHECKED:
            for index, state in optimizer.state_dict()["state"].items():
                stored, exact = state["exp_avg_sq"].double().sqrt(), v[index].sqrt()
                size = float(exact[::2].median() / exact[1::2].median())
                ratio = stored[::2] / exact[::2]
                found.append(DeadElements(betas2[index], step - 19, ratio, size))
    return found


def test_the_second_moment_of_a_dead_element_decays_without_drift():
    found = dead_elements(BETAS2)
    assert len(found) == len(BETAS2) * len(CHECKED)
    for dead in found:
        if dead.size < 1e-6:  # below 2^-20 of its neighbours it may stop or vanish
            assert float(dead.ratio.mean()) * dead.size < 1e-5
            continue
        assert float(dead.ratio.mean()) == pytest.approx(1, abs=0.005), dead
        assert float((dead.ratio - 1).abs().max()) < 0.06, dead


def test_rounding_to_nearest_would_drift():
    with replaced("fp16_sqrt", StateFormat("fp16_sqrt", torch.float16, is_root=True)):
        last = dead_elements((0.999,))[-1]
    assert abs(float(last.ratio.mean()) - 1) > 0.1


def job(kind: str) -> tuple[FP16StateAdamW, list[torch.nn.Parameter]]:
    """Two parameters with states in the formats that are rounded stochastically."""
    generator = torch.Generator().manual_seed(2)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    params = [
        torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype))
        for numel in (40_000, 700)
    ]
    return FP16StateAdamW(
        params, lr=1e-2, exp_avg="e4m3", master_weights=kind, checkpoint="portable"
    ), params


def advance(optimizer, params, steps: range) -> None:
    for step in steps:
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + index)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def content(optimizer, params) -> list[torch.Tensor]:
    """Parameters and all states in memory, as bytes."""
    states = [optimizer.state[param] for param in params]
    tensors = [*params, *(state[name] for state in states for name in sorted(state))]
    return [t.detach().contiguous().view(-1).view(torch.uint8).clone() for t in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved_to_memory(content: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def resumed(kind: str, how: str) -> tuple[FP16StateAdamW, list[torch.nn.Parameter]]:
    """`job` after three steps, gone through `how`."""
    optimizer, params = job(kind)
    advance(optimizer, params, range(3))
    if how == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
        return optimizer, optimizer.param_groups[0]["params"]
    if how == "whole":
        optimizer = torch.load(saved_to_memory(optimizer), weights_only=False)
        return optimizer, optimizer.param_groups[0]["params"]
    for group in optimizer.param_groups:
        group["checkpoint"] = how
    file = saved_to_memory(optimizer.state_dict())
    fresh, fresh_params = job(kind)
    with torch.no_grad():
        for ours, saved in zip(fresh_params, params, strict=True):
            ours.copy_(saved)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh, fresh_params


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("how", ["portable", "native", "deepcopy", "whole"])
def test_a_resumed_job_continues_bit_for_bit(kind, how):
    optimizer, params = job(kind)
    advance(optimizer, params, range(6))
    again, again_params = resumed(kind, how)
    advance(again, again_params, range(3, 6))
    assert same(content(again, again_params), content(optimizer, params))


LARGE = 200 * 1024


def large_job(kind: str, numels: list[int]) -> list[torch.Tensor]:
    """Content of the first parameter and its state after four steps, beside those of `numels`.

    Tensors of many whole blocks have pieces of their own. Small ones share pieces: what is drawn
    for them follows from where they are in those.
    """
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    params = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for numel in (LARGE, *numels)]
    optimizer = FP16StateAdamW(params, lr=1e-2, exp_avg="e4m3", master_weights=kind)
    advance(optimizer, params, range(4))
    return content(optimizer, params[:1])


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_bits_do_not_depend_on_the_size_of_pieces(kind, monkeypatch):
    expected = large_job(kind, [])
    monkeypatch.setattr(scratch, "_MAX_BLOCKS", 96)
    assert same(large_job(kind, []), expected)


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_bits_do_not_depend_on_which_other_parameters_there_are(kind):
    assert same(large_job(kind, [700, LARGE, 5000]), large_job(kind, []))


def test_elements_and_steps_draw_different_bits():
    param = torch.nn.Parameter(torch.zeros(2048))
    optimizer = FP16StateAdamW([param], exp_avg="e4m3", **MEMORYLESS)
    seen = []
    for _ in range(2):
        param.grad = torch.full((2048,), 1 + 0.5 * ULP["exp_avg"])
        optimizer.step()
        seen.append((moment_after(optimizer, "exp_avg") > 1).double())
    for a, b in ((seen[0], seen[1]), (seen[0][:1024], seen[0][1024:])):
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.13


def test_gradients_helper_is_what_the_tests_think():
    steady = gradients("steady", [10.0, 1e-3], 2, 2000)
    assert torch.equal(steady[0], steady[1])
    assert float(steady[0][::2].std() / steady[0][1::2].std()) == pytest.approx(1e4, rel=0.1)
