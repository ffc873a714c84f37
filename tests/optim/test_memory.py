"""Bytes: those that stay between steps, and those that a step takes on top."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4_plugin.optim import FP16StateAdamW

NUMEL = 1_200_040  # not a multiple of the block
STEP_LIMIT = 64 * 2**20
# Formats -> bytes per parameter with the master weight, the second decimal being scales.
CASES = [
    (torch.float32, {}, 8.02),
    (torch.bfloat16, {}, 8.02),
    (torch.bfloat16, {"master_weights": "fp16"}, 6.02),
    (torch.bfloat16, {"exp_avg": "e4m3", "master_weights": "fp16"}, 5.02),
    (torch.float32, {"exp_avg": "e4m3"}, 7.02),
]


class LiveBytes(TorchDispatchMode):
    """Storages that operations return while this is active, and how much of them lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        for tensor in filter(is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._known:
                self._add(tensor, storage)
        return result

    def _add(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def after_a_step(kind, dtype: torch.dtype, numel: int = NUMEL, pieces: int = 1, **options):
    params = [torch.nn.Parameter(torch.ones(numel // pieces, dtype=dtype)) for _ in range(pieces)]
    optimizer = kind(params, **options)
    step(optimizer, params)
    return optimizer, params


def step(optimizer, params) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def owned_bytes(optimizer, params) -> int:
    """Storages of the state, and of float32 parameters, which are their own master weights."""
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    masters = [param for param in params if param.dtype == torch.float32]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors + masters}
    return sum(storages.values())


@pytest.mark.parametrize(("dtype", "options", "limit"), CASES)
@pytest.mark.parametrize("pieces", [1, 40], ids=["flat", "tensors"])
def test_bytes_per_parameter_with_the_master_weight(dtype, options, limit, pieces):
    optimizer, params = after_a_step(FP16StateAdamW, dtype, NUMEL, pieces, **options)
    per_parameter = owned_bytes(optimizer, params) / NUMEL
    assert limit - 0.02 < per_parameter <= limit
    reported = sum(optimizer.state_nbytes().values())
    masters = 4 * NUMEL if dtype == torch.float32 else 0
    assert reported + masters == pytest.approx(owned_bytes(optimizer, params), abs=8 * pieces)


def test_adamw_takes_twelve():
    optimizer, params = after_a_step(AdamW, torch.float32)
    assert owned_bytes(optimizer, params) / NUMEL == pytest.approx(12, abs=0.01)


def test_reported_bytes_are_told_apart_by_kind():
    optimizer, _ = after_a_step(
        FP16StateAdamW, torch.bfloat16, 4096, exp_avg="e4m3", master_weights="fp16"
    )
    found = optimizer.state_nbytes()
    assert found == {
        "step": 4, "exp_avg": 4096, "exp_avg_sq": 8192, "master": 8192, "scales": 3 * 16,
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "options", "limit"), CASES)
@pytest.mark.parametrize("pieces", [1, 40], ids=["flat", "tensors"])
def test_a_step_takes_little_on_top(dtype, options, limit, pieces):
    optimizer, params = after_a_step(FP16StateAdamW, dtype, NUMEL, pieces, **options)
    grads = [torch.ones_like(param) for param in params]
    scratch_before = measured(lambda: None)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    assert scratch_before == 0
    # Another optimiser object: its first step makes all scratch memory, beside the states.
    fresh, fresh_params = FP16StateAdamW(params, **options), params
    states = (
        owned_bytes(optimizer, []) if dtype == torch.float32 else owned_bytes(optimizer, params)
    )
    peak = measured(fresh.step)
    assert peak - states < STEP_LIMIT, f"{(peak - states) / 2**20:.1f} MiB"
    again = measured(fresh.step)
    assert again < STEP_LIMIT, f"{again / 2**20:.1f} MiB"
    assert fresh_params[0].grad is grads[0]


def test_a_large_step_takes_no_more_than_a_small_one():
    peaks = []
    for numel in (2_000_000, 8_000_000):
        optimizer, params = after_a_step(FP16StateAdamW, torch.float32, numel)
        for param in params:
            param.grad = torch.ones_like(param)
        peaks.append(measured(optimizer.step))
    assert peaks[1] <= peaks[0] + 2**20


def measured(action) -> int:
    """Most bytes that `action` has allocated and not yet freed at any time."""
    gc.collect()
    with LiveBytes() as counter:
        action()
    return counter.peak


def test_the_counter_counts():
    def two_at_once():
        a = torch.zeros(1000)
        del a
        b = torch.zeros(500)
        c = b + 1
        c.add_(b.view(-1))

    assert measured(two_at_once) == 4000


def test_adamw_foreach_takes_more_than_the_limit():
    """The reason for the limit: torch's own step copies whole tensors."""
    optimizer, params = after_a_step(AdamW, torch.float32, 8_000_000, foreach=True)
    for param in params:
        param.grad = torch.ones_like(param)
    assert measured(optimizer.step) > 32_000_000 - 1
