"""DistributedDataParallel with FP8 gradients, against averages in float64."""

from __future__ import annotations

import copy
import datetime
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp4_plugin import comm
from fp4_plugin.errors import CommunicationError, ConfigError
from tests import tolerances
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed

MIN_NUMEL = 2048
VARIANTS = {
    "default": ({}, None),
    "state": ({}, {"format": "e5m2", "block_size": 256}),
    "view": ({"gradient_as_bucket_view": True}, None),
    "unused": ({"find_unused_parameters": True}, None),
    "static": ({"static_graph": True}, None),
    "group": ({}, None),
}


class _Model(torch.nn.Module):
    """Large layers, a small one, and one that the forward pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 128)
        self.second = torch.nn.Linear(128, 64)
        self.spare = torch.nn.Linear(64, 64)

    def forward(self, x, use_spare=True):
        y = self.second(torch.relu(self.first(x)))
        return self.spare(y) if use_spare else y


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _step(model: torch.nn.Module, rank: int, use_spare: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(32, 64, generator=generator)
    model.zero_grad()
    model(x, use_spare).square().mean().backward()
    return _gradients(model)


def _exact(model: torch.nn.Module, use_spare: bool) -> torch.Tensor:
    """The mean over both ranks of gradients made without DDP, float64."""
    plain = copy.deepcopy(model)
    return sum(_step(plain, rank, use_spare).double() for rank in range(2)) / 2


def _compare(found: torch.Tensor, exact: torch.Tensor) -> list:
    error = float((found.double() - exact).norm() / exact.norm())
    gathered = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(gathered, found.contiguous())
    return [error, bool(torch.equal(gathered[0], gathered[1]))]


def _two_ranks():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = _Model()
    found = {}
    for name, (options, settings) in VARIANTS.items():
        state = comm.DdpState(**settings) if settings else comm.DdpState()
        wrapped = DistributedDataParallel(copy.deepcopy(model), **options)
        others = {"default": None, "group": dist.group.WORLD}
        wrapped.register_comm_hook(others.get(name, state), comm.ddp_hook)
        use_spare = name != "unused"
        exact = _exact(model, use_spare)
        for step in range(2):  # DDP lays its buckets out anew after the first step
            found[f"{name} {step}"] = _compare(_step(wrapped, rank, use_spare), exact)
        found[f"{name} calls"] = dict(state.traffic.calls)
    found["exact"] = _small(model, rank)
    found["inf"] = _non_finite(model, rank)
    found["float64"] = _float64(rank)
    return found


def _small(model: torch.nn.Module, rank: int) -> dict:
    """A threshold above all buckets: what plain DDP would give, bit for bit."""
    state = comm.DdpState(min_numel=10**9)
    hooked = DistributedDataParallel(copy.deepcopy(model))
    hooked.register_comm_hook(state, comm.ddp_hook)
    plain = DistributedDataParallel(copy.deepcopy(model))
    same = torch.equal(_step(hooked, rank), _step(plain, rank))
    report = state.traffic.report()
    return {"same": same, "calls": report["calls"], "exact": report["exact_calls"]}


def _non_finite(model: torch.nn.Module, rank: int) -> dict:
    state = comm.DdpState()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    wrapped.register_comm_hook(state, comm.ddp_hook)
    x = torch.randn(8, 64)
    loss = wrapped(x).sum()
    (loss * torch.inf if rank == 1 else loss).backward()
    bad = ~_gradients(wrapped).isfinite()
    reported = state.traffic.report()["non_finite_blocks"]
    own = sum(event.blocks for event in state.traffic.settle())
    return {"bad": int(bad.sum()), "own": own, "reported": reported}


def _float64(rank: int) -> str:
    wrapped = DistributedDataParallel(torch.nn.Linear(64, 64).double())
    wrapped.register_comm_hook(comm.DdpState(min_numel=1), comm.ddp_hook)
    try:
        wrapped(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
    except CommunicationError as error:
        return str(error)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def answers():
    return run_ranks(_two_ranks, num_ranks=2, timeout_s=120, warm="torch")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("step", [0, 1])
def test_gradients_are_averaged_to_the_same_bits_on_both_ranks(answers, name, step):
    fmt = "e5m2" if name == "state" else "e4m3"
    for answer in answers:
        error, same = answer[f"{name} {step}"]
        assert same
        assert 0 < error < tolerances.FP8_SUM[fmt]
        if name not in ("default", "group"):
            assert answer[f"{name} calls"]["all_reduce"] > 0


def test_small_buckets_are_averaged_exactly(answers):
    for answer in answers:
        assert answer["exact"]["same"]
        assert answer["exact"]["calls"] == {}
        assert answer["exact"]["exact"]["all_reduce"] > 0


def test_an_inf_on_one_rank_reaches_both(answers):
    bad = [answer["inf"]["bad"] for answer in answers]
    assert bad[0] == bad[1] > 0
    assert answers[0]["inf"]["own"] == 0 < answers[1]["inf"]["own"]
    assert [answer["inf"]["reported"] for answer in answers] == [
        answer["inf"]["own"] for answer in answers
    ]


def test_a_dtype_that_cannot_be_reduced_is_said_in_the_backward_pass(answers):
    for answer in answers:
        assert "cannot reduce torch.float64 in FP8" in answer["float64"]


def test_settings_are_checked_when_the_state_is_made():
    with pytest.raises(ConfigError, match="cannot travel"):
        comm.DdpState(format="fp8")
    with pytest.raises(ConfigError, match="block_size 1000"):
        comm.DdpState(block_size=1000)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="DdpState, a process group or None"):
        comm.ddp_hook({"format": "e4m3"}, None)


def test_a_state_can_be_copied_and_saved_without_its_buffers():
    state = comm.DdpState(format="e5m2", min_numel=5)
    state.traffic.count_call("all_reduce", 10, 5, 10.0)
    again = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    assert again.min_numel == 5
    assert again.traffic.wire_bytes == 5
