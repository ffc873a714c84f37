"""Which kernel does the AdamW of a step: chosen by speed, refused for wrong results.

There is no GPU here: modules in torch stand in for apex and Transformer Engine, and torch's own
fused kernel, which also runs on a CPU, is the real one.
"""

from __future__ import annotations

import sys
import time
import types
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from fp4_plugin.integrations import fused_adam
from fp4_plugin.optim import fused
from fp4_plugin.optim.arithmetic import Hyperparameters
from fp4_plugin.optim.fused import (
    BACKENDS,
    MAX_ERROR,
    OPERATIONS,
    TORCH_FUSED,
    Backend,
    backend_for,
    choose,
    largest_error,
)
from fp4_plugin.optim.scratch import Scratch
from tests.optim.reference import adamw_float64

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    before = dict(BACKENDS._values)
    monkeypatch.setattr(fused, "_CHOSEN", {})
    monkeypatch.setattr(fused, "_TRIAL_NUMEL", 1 << 14)
    forget_libraries()
    yield
    forget_libraries()
    BACKENDS._values.clear()
    BACKENDS._values.update(before)


def forget_libraries() -> None:
    for load in fused_adam._OFFERS.values():
        load.cache_clear()


def multi_tensor_adam(
    chunk_size, noop_flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
):
    """The published signature, in float64 with bias-corrected moments."""
    assert (chunk_size > 0, int(noop_flag), mode, bias_correction) == (True, 0, 1, 1)
    assert isinstance(step, int)
    for g, p, m, v in zip(*lists, strict=True):
        m.copy_(beta1 * m.double() + (1 - beta1) * g.double())
        v.copy_(beta2 * v.double() + (1 - beta2) * g.double() ** 2)
        m_hat, v_hat = m.double() / (1 - beta1**step), v.double() / (1 - beta2**step)
        p.copy_(p.double() - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * p.double()))


def install(monkeypatch, name: str, **attributes) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name, origin=None)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def apex(monkeypatch):
    """A stand-in for an apex built with its extensions; `amp_C` is returned."""
    install(monkeypatch, "apex")
    applier = types.SimpleNamespace(available=True)
    install(monkeypatch, "apex.multi_tensor_apply", multi_tensor_applier=applier)
    install(monkeypatch, "apex.optimizers", FusedAdam=object)
    monkeypatch.setattr(metadata, "version", _missing)
    return install(monkeypatch, "amp_C", multi_tensor_adam=multi_tensor_adam)


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def on_cpu_too(monkeypatch, name: str) -> None:
    """Leave out the refusal of devices that are not CUDA: a stand-in runs here."""
    backend = BACKENDS[name]
    cuda = torch.device("cuda")
    BACKENDS.unregister(name)
    BACKENDS.register(name, Backend(backend.update, lambda device: backend.unavailable(cuda)))


def slow(backend: Backend) -> Backend:
    def update(*arguments) -> None:
        time.sleep(0.02)
        backend.update(*arguments)

    return Backend(update)


def slow_reference() -> None:
    original = BACKENDS[OPERATIONS]
    BACKENDS.unregister(OPERATIONS)
    BACKENDS.register(OPERATIONS, slow(original))


@pytest.mark.parametrize("name", [OPERATIONS, TORCH_FUSED])
def test_backends_of_torch_follow_float64(name):
    torch.manual_seed(0)
    start, grads = torch.randn(4000), [torch.randn(4000) for _ in range(5)]
    weight, m, v = start.clone(), torch.zeros(4000), torch.zeros(4000)
    for step, grad in enumerate(grads, 1):
        hyper = Hyperparameters(step, 1e-2, (0.9, 0.95), 1e-8, 0.1)
        BACKENDS[name].update(weight, grad, m, v, hyper, Scratch())
    expected = adamw_float64(start, grads, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    assert torch.allclose(weight.double(), expected, rtol=1e-6, atol=1e-6)


def test_torchs_fused_kernel_is_within_the_bound_and_chosen_if_faster():
    assert largest_error(BACKENDS[TORCH_FUSED], CPU) <= MAX_ERROR
    assert largest_error(BACKENDS[OPERATIONS], CPU) == 0
    slow_reference()
    choice = choose(CPU, [OPERATIONS, TORCH_FUSED])
    assert choice.name == TORCH_FUSED
    assert choice.update is BACKENDS[TORCH_FUSED].update
    assert "torch fused, the fastest on 16,384 elements (torch operations " in choice.reason
    assert choice.refused == {}


def test_the_fastest_is_chosen_not_the_last():
    BACKENDS.register("slow", slow(BACKENDS[TORCH_FUSED]))
    choice = choose(CPU, [TORCH_FUSED, "slow"])
    assert choice.name in (OPERATIONS, TORCH_FUSED)
    assert "slow 2" in choice.reason  # its time is told


def wrong_results():
    def right(w, g, m, v, hyper, scratch):
        BACKENDS[OPERATIONS].update(w, g, m, v, hyper, scratch)

    def coupled(w, g, m, v, hyper, scratch):
        right(w, g + hyper.weight_decay * w, m, v, replace(hyper, weight_decay=0.0), scratch)

    def without_correction(w, g, m, v, hyper, scratch):
        right(w, g, m, v, replace(hyper, step=10**6), scratch)

    def eps_inside(w, g, m, v, hyper, scratch):
        right(w, g, m, v.add_(hyper.eps), hyper, scratch)

    def slightly_off(w, g, m, v, hyper, scratch):
        right(w, g, m, v, hyper, scratch)
        w.mul_(1 + 3e-6)

    def no_decay(w, g, m, v, hyper, scratch):
        right(w, g, m, v, replace(hyper, weight_decay=0.0), scratch)

    def spoils_the_gradient(w, g, m, v, hyper, scratch):
        right(w, g, m, v, hyper, scratch)
        g.zero_()

    def nan(w, *rest):
        w.fill_(torch.nan)

    def nothing(*arguments):
        pass

    return [
        coupled, without_correction, eps_inside, slightly_off, no_decay, spoils_the_gradient, nan,
        nothing,
    ]  # fmt: skip


@pytest.mark.parametrize("update", wrong_results(), ids=lambda update: update.__name__)
def test_a_backend_that_computes_something_else_is_refused_with_a_warning(update):
    BACKENDS.register("other", Backend(update))
    with pytest.warns(RuntimeWarning, match="AdamW by other on cpu is not used: its results are"):
        choice = choose(CPU, ["other"])
    assert choice.name == OPERATIONS
    assert "relative" in choice.refused["other"]
    assert "not used: other (its results are off by" in choice.reason


def test_a_backend_that_raises_is_refused_with_its_error():
    def broken(*arguments):
        raise RuntimeError("no kernel image is available")

    BACKENDS.register("broken", Backend(broken))
    with pytest.warns(RuntimeWarning, match="RuntimeError: no kernel image is available"):
        choice = choose(CPU, ["broken"])
    assert choice.name == OPERATIONS


def test_on_a_cpu_it_is_always_torch_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(fused, "choose", None)
    choice = backend_for(CPU)
    assert choice.name == TORCH_FUSED
    assert "as always on a CPU" in choice.reason


def test_a_device_is_tried_once_per_process(monkeypatch):
    tried = []
    choice = choose(CPU, [])
    monkeypatch.setattr(fused, "choose", lambda device: tried.append(device) or choice)
    for _ in range(2):
        assert backend_for(torch.device("cuda", 1)) is choice
    assert tried == [torch.device("cuda", 1)]


def test_an_apex_with_its_signature_is_tried_and_used(apex, monkeypatch):
    assert fused_adam.offer_fused_adam() == ["apex", "transformer engine"]
    assert fused_adam.offer_fused_adam() == ["apex", "transformer engine"]  # again: no change
    on_cpu_too(monkeypatch, "apex")
    assert largest_error(BACKENDS["apex"], CPU) <= MAX_ERROR
    slow_reference()
    choice = choose(CPU, ["apex", "transformer engine"])
    assert choice.name == "apex"
    assert choice.refused == {"transformer engine": "runs on CUDA devices only"}


def test_an_apex_of_another_order_of_arguments_is_refused(apex, monkeypatch):
    def swapped(chunk_size, noop_flag, lists, *rest):
        grads, params, *moments = lists
        multi_tensor_adam(chunk_size, noop_flag, [params, grads, *moments], *rest)

    apex.multi_tensor_adam = swapped
    fused_adam.offer_fused_adam()
    on_cpu_too(monkeypatch, "apex")
    with pytest.warns(RuntimeWarning, match="AdamW by apex"):
        assert choose(CPU, ["apex"]).name == OPERATIONS


def test_the_pyramid_toolkit_called_apex_is_named_and_never_imported(monkeypatch):
    install(monkeypatch, "apex")
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.10.dev0")
    summary = {"Summary": "Pyramid toolkit to add Velruse, Flash Messages, CSRF, ReCaptcha"}
    monkeypatch.setattr(metadata, "metadata", lambda name: summary)
    assert "0.9.10.dev0 is described as 'Pyramid" in fused_adam.wrong_apex_reason()
    fused_adam.offer_fused_adam()
    reason = BACKENDS["apex"].unavailable(torch.device("cuda"))
    assert reason.startswith("not NVIDIA's apex: apex 0.9.10.dev0")
    assert reason.endswith("pip uninstall apex")


def test_an_empty_package_called_apex_is_named(monkeypatch):
    install(monkeypatch, "apex")
    monkeypatch.setattr(metadata, "version", _missing)
    fused_adam.offer_fused_adam()
    assert "not NVIDIA's apex" in BACKENDS["apex"].unavailable(torch.device("cuda"))


def test_an_apex_without_extensions_is_named(apex, monkeypatch):
    sys.modules["apex.multi_tensor_apply"].multi_tensor_applier.available = False
    fused_adam.offer_fused_adam()
    assert "--cuda_ext" in BACKENDS["apex"].unavailable(torch.device("cuda"))


def test_without_the_libraries_both_say_so_and_without_a_gpu_too():
    names = fused_adam.offer_fused_adam()
    for name in names:
        assert BACKENDS[name].unavailable(CPU) == "runs on CUDA devices only"
    reasons = [BACKENDS[name].unavailable(torch.device("cuda")) for name in names]
    for name, reason in zip(("apex", "transformer_engine_torch"), reasons, strict=True):
        if name not in sys.modules:
            assert name in reason


def test_transformer_engine_is_offered_too(monkeypatch):
    install(monkeypatch, "transformer_engine")
    install(monkeypatch, "transformer_engine.pytorch")
    install(monkeypatch, "transformer_engine_torch", multi_tensor_adam=multi_tensor_adam)
    fused_adam.offer_fused_adam()
    on_cpu_too(monkeypatch, "transformer engine")
    assert largest_error(BACKENDS["transformer engine"], CPU) <= MAX_ERROR
