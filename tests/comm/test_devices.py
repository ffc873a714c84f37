"""What a GPU needs, seen on a CPU: nothing waits, nothing accumulates, buffers are used again.

Tensors on the meta device have no values: reading one (item, tolist, bool, cpu) raises. Code that
passes with them does not wait for the device.
"""

from __future__ import annotations

import pytest
import torch

from fp4_plugin.comm import BlockCodec, GradientReducer, Pending
from fp4_plugin.comm import reducer as reducer_module
from fp4_plugin.comm import traffic as traffic_module
from fp4_plugin.comm.error_feedback import ErrorFeedback
from fp4_plugin.comm.factor import AutomaticFactor
from fp4_plugin.comm.traffic import Segment, Traffic
from fp4_plugin.comm.transport import members_of
from fp4_plugin.comm.workspace import Workspace
from fp4_plugin.errors import CommunicationError
from tests.comm.threads import run_threads

META, CPU = torch.device("meta"), torch.device("cpu")


@pytest.fixture
def no_handshake(monkeypatch):
    """Reading what the others write waits; it happens once per group, codec and sizes."""
    monkeypatch.setattr(reducer_module, "require_same_layout", lambda *arguments: None)


def _segments() -> list[Segment]:
    return [Segment("a", 0, 1000), Segment("b", 0, 2000)]


@pytest.mark.parametrize("mode", ["plain", "feedback", "factor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_reduction_reads_a_value(no_handshake, mode, dtype):
    def rank(group):
        factor = AutomaticFactor() if mode == "factor" else None
        feedback = ErrorFeedback({"a": 1000, "b": 2000}) if mode == "feedback" else None
        reducer = GradientReducer(BlockCodec(), factor=factor, feedback=feedback)
        tensor = torch.empty(3000, dtype=dtype, device=META)
        reducer.all_reduce(tensor, group, describe=_segments)
        pending = reducer.all_reduce(tensor, group, async_op=True, describe=_segments)
        reducer.reduce(tensor, 1, group, describe=_segments)
        reducer.reduce_to_owners(tensor, [(1000, [0]), (2000, [1, 2])], group, describe=_segments)
        reducer.reduce_scatter(torch.empty(1000, device=META), tensor, group, describe=_segments)
        pending.wait()
        if factor is not None:
            factor.step(members_of(group))
        return reducer.traffic.calls

    for calls in run_threads(3, rank):
        assert calls == {"all_reduce": 2, "reduce": 1, "reduce_to_owners": 1, "reduce_scatter": 1}


def test_the_check_above_sees_a_read():
    for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool, float):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.empty(1, device=META))


@pytest.mark.parametrize("damage", ["header", "zero", "negative", "infinite", "none"])
def test_where_reading_would_wait_a_wrong_message_becomes_nan(damage):
    codec = BlockCodec(block_size=16)
    message = torch.empty(codec.num_bytes(32), dtype=torch.uint8)
    parts = codec.encode(torch.linspace(-1, 1, 32), message)
    if damage == "header":
        parts.header[3] = 33
    elif damage != "none":
        parts.scale_inv[1] = {"zero": 0.0, "negative": -1.0, "infinite": torch.inf}[damage]
    wrong = {"header": [True, True], "none": [False, False]}.get(damage, [False, True])
    masked = codec._masked(parts, 32)
    assert masked.scale_inv.isnan().tolist() == wrong
    kept = ~masked.scale_inv.isnan()
    assert torch.equal(masked.scale_inv[kept], parts.scale_inv[kept])


def test_on_a_device_blocks_are_looked_at_when_somebody_asks(monkeypatch):
    """The flags are those of a message whose buffer may have changed by the time of `settle`."""
    traffic = Traffic()
    monkeypatch.setattr(traffic_module, "_is_readable", lambda tensor: False)
    scale_inv = torch.tensor([1.0, torch.nan, 1.0])
    values = torch.zeros(48)
    traffic.watch(values, scale_inv.isnan(), 16, lambda: [Segment("a", 0, 20), Segment("b", 0, 28)])
    traffic.watch(values, torch.zeros(3, dtype=torch.bool), 16, lambda: [Segment("c", 0, 48)])
    scale_inv.fill_(1.0)
    assert traffic.non_finite_blocks == 0
    (event,) = traffic.settle()
    # Block 1 holds the end of a and the start of b; which of them cannot be told any more.
    assert event.parameters == ("a", "b") and event.blocks == 1
    assert traffic.settle() == [] and traffic.non_finite_blocks == 1


def test_messages_that_nobody_asks_about_do_not_pile_up(monkeypatch):
    traffic = Traffic()
    monkeypatch.setattr(traffic_module, "_is_readable", lambda tensor: False)
    is_nan = torch.tensor([True, False, True])
    num_messages = traffic_module._MOST_PENDING + 100
    for _ in range(num_messages):
        traffic.watch(torch.zeros(48), is_nan, 16, lambda: ())
    assert len(traffic._pending) == traffic_module._MOST_PENDING
    assert len(traffic.settle()) == traffic_module._MOST_PENDING
    assert traffic.non_finite_blocks == 2 * num_messages
    assert len(traffic.report()["non_finite"]) == traffic_module._MOST_EVENTS


def test_a_shared_scale_that_another_rank_spoiled_is_not_this_ranks_event():
    traffic = Traffic()
    traffic.watch(torch.ones(32), torch.tensor([True, True]), 16, tuple)
    assert traffic.settle() == []
    assert traffic.non_finite_blocks == 0


def test_what_is_counted_is_what_was_lost():
    traffic = Traffic()
    assert traffic.fractions() == {"saturated": None, "underflowed": None}
    codec = BlockCodec(block_size=16)
    values = torch.tensor([1.0, 1e-6, 0.0, -1.0] * 4, dtype=torch.bfloat16)
    message = torch.empty(codec.num_bytes(16), dtype=torch.uint8)
    traffic.sample(values, codec.encode(values, message))
    assert traffic.fractions() == {"saturated": 0.0, "underflowed": 0.25}
    amax = torch.full((1, 1), 0.5)
    traffic.sample(values, codec.encode(values, message, amax), amax)
    assert traffic.fractions() == {"saturated": 0.25, "underflowed": 0.25}
    traffic.sampling = False
    traffic.sample(values, codec.encode(values, message, amax), amax)
    assert traffic.fractions() == {"saturated": 0.25, "underflowed": 0.25}


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 100])
def test_own_blocks_that_are_not_finite_are_found_like_those_of_messages(numel):
    for position in {0, numel // 2, numel - 1}:
        traffic = Traffic()
        values = torch.ones(numel)
        traffic.watch_own(values, 16, lambda: [Segment("a", 0, numel)])
        assert traffic.settle() == []
        values[position] = torch.inf
        names = [Segment("left", 0, position), Segment("it", 0, 1)]
        traffic.watch_own(values, 16, lambda names=names: names)
        (event,) = traffic.settle()
        assert event.parameters == ("it",) and event.blocks == 1


def test_buffers_are_used_again_whole_and_survive_inference_mode():
    workspace = Workspace()
    with torch.inference_mode():
        first = workspace.take(1000, CPU)
        workspace.give_back(first)
    second = workspace.take(10, CPU)
    second.fill_(1)
    assert second.data_ptr() == first.data_ptr() and len(second) == 10
    other = workspace.take(10, CPU)
    assert other.data_ptr() != second.data_ptr()
    workspace.give_back(second)
    assert workspace.take(1000, CPU).data_ptr() == first.data_ptr()
    workspace.give_back(other)
    larger = workspace.take(20, CPU)
    workspace.give_back(larger)
    # The 10 bytes gave way to the 20.
    assert workspace.num_bytes() == 20


def test_reductions_in_and_out_of_inference_mode_share_a_reducer():
    def rank(group):
        reducer = GradientReducer(feedback=ErrorFeedback({"a": 1000, "b": 2000}))
        results = []
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                tensor = torch.ones(3000)
                reducer.all_reduce(tensor, group, describe=_segments)
                results.append(tensor.unique().tolist())
        return results

    assert run_threads(2, rank) == [[[2.0]] * 3] * 2


def test_gradients_that_autograd_follows_are_reduced_in_place_without_history():
    def rank(group):
        reducer = GradientReducer()
        leaf = torch.ones(64, requires_grad=True)
        product = leaf * 2
        reducer.all_reduce(leaf, group)
        reducer.reduce_to_owners(product, [(64, [0, 1])], group)
        output = torch.zeros(32, requires_grad=True)
        reducer.reduce_scatter(output, product, group)
        return [one.unique().tolist() for one in (leaf, product, output)], output.grad_fn

    assert run_threads(2, rank) == [([[2.0], [4.0], [8.0]], None)] * 2


def test_a_tensor_that_torch_will_not_write_is_refused_before_anything_is_sent():
    with torch.inference_mode():
        tensor = torch.ones(64)
    for call in (
        lambda group: GradientReducer().all_reduce(tensor, group),
        lambda group: GradientReducer().reduce_scatter(tensor[:32], torch.ones(64), group),
    ):
        with pytest.raises(CommunicationError, match="made in inference mode outside of it"):
            run_threads(2, call)


def test_a_failed_reduction_fails_again_when_waited_for_again():
    calls = []

    def finish() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise CommunicationError("the link is down")

    pending = Pending(finish)
    for _ in range(2):
        with pytest.raises(CommunicationError):
            pending.wait()
    assert pending.wait() and pending.wait()
    assert len(calls) == 3
