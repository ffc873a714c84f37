"""`fp4 bench optim`: what it measures, what it says of what it cannot, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fp4_plugin.bench.optim import contenders
from fp4_plugin.bench.optim.measure import owned_bytes, parameters
from fp4_plugin.bench.optim.peak import measure_memory
from fp4_plugin.bench.optim.settings import OptimOptions, tensor_shapes
from fp4_plugin.bench.optim.study import ARMS
from fp4_plugin.bench.optim.training import small_model, stdlib_text, train
from fp4_plugin.cli.main import main
from fp4_plugin.errors import ConfigError
from fp4_plugin.optim import FP16StateAdamW

EAGER = [one for one in contenders.CONTENDERS if not one.is_compiled]
SMALL = ["bench", "optim", "--numel", "70000", "--repeats", "3", "--no-compile"]
# By hand: float32 states and weight; 16-bit moments; one of them 8-bit; an FP16 master beside both.
BYTES = {
    "adamw": 12.0,
    "adamw fused": 12.0,
    "fp16": 8.0,
    "e4m3": 7.0,
    "bf16 + fp16 master": 6.0,
    "bf16 + fp16 master, e4m3": 5.0,
}


@pytest.mark.slow
def test_every_eager_optimizer_is_measured_in_time_and_bytes(tmp_path, capsys):
    path = tmp_path / "results" / "optim.json"
    assert main([*SMALL, "--tensors", "7", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(path.read_text())
    rows = {row["label"]: row for row in record["measurements"]}
    assert set(rows) == {one.label for one in EAGER}
    for label, row in rows.items():
        assert len(row["seconds"]) == 3
        # A step count of 4 bytes per tensor, and 4 bytes of scale per 1,024 elements and state.
        extra = (4 * 7 + 3 * 4 * (70000 / 1024 + 7)) / 70000
        assert BYTES[label] <= row["owned_bytes_per_parameter"] <= BYTES[label] + extra
        assert f"| {label} " in printed
        assert row["time_ratio"]["low"] <= row["time_ratio"]["high"]
        if row["memory"] is not None and label not in ("adamw", "adamw fused"):
            assert row["memory"]["kept"] + row["memory"]["step"] < 64e6
    assert rows["adamw"]["time_ratio"]["median"] == 1.0
    assert "not measured: fp16 compiled: --no-compile" in printed
    assert set(record["not_measured"]) == {
        one.label for one in contenders.CONTENDERS if one.is_compiled
    }


def test_states_of_tensors_made_of_tensors_are_counted():
    params = parameters(3000, 1, torch.float32)
    optimizer = FP16StateAdamW(params)
    optimizer.step()
    assert owned_bytes(optimizer, params) == 3000 * (4 + 2 + 2) + 4 + 2 * 4 * 3


@pytest.mark.parametrize(("numel", "tensors"), [(1, 1), (20_000, 200), (1001, 7), (200, 200)])
def test_shapes_have_all_elements(numel, tensors):
    shapes = tensor_shapes(numel, tensors)
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == numel
    assert min(map(math.prod, shapes)) >= 1


def test_without_a_compiler_compiled_optimizers_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled = next(one for one in contenders.CONTENDERS if one.label == "fp16 compiled")
    assert compiled.missing() == "no C++ compiler (no-such-compiler) on PATH: apt-get install g++"


@pytest.mark.slow
def test_memory_of_a_step_is_measured_in_a_process_of_its_own():
    memory = measure_memory("fp16", 2_000_000, 1, threads=1)
    if memory is None:
        pytest.skip("the kernel does not let a process reset its peak (/proc/self/clear_refs)")
    assert 0 < memory.kept + memory.step < 64e6
    # foreach copies what it works on: a measurement that sees nothing would miss this.
    assert measure_memory("adamw", 2_000_000, 1, threads=1).step > 4e6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--numel", "0"], "--numel 0"),
        (["--numel", "10", "10"], "each once"),
        (["--tensors", "200", "--numel", "100"], "do not fill"),
        (["--repeats", "2"], "--repeats 2"),
        (["--threads", "-1"], "--threads -1"),
        (["--training", "--steps", "0"], "--steps 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said, capsys):
    assert main(["bench", "optim", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_training_is_decided_by_its_seed_and_learns():
    text = stdlib_text(50_000)
    arm = ARMS[0]
    first, again = (train(arm.make, text, 20, seed=1).final_loss for _ in range(2))
    assert first == again
    assert first != train(arm.make, text, 20, seed=2).final_loss
    assert first < math.log(256)  # of guessing


def test_a_loss_that_is_not_finite_ends_a_training():
    def diverging(params):
        return torch.optim.SGD(params, lr=math.inf)

    assert math.isnan(train(diverging, stdlib_text(50_000), 5, seed=0).final_loss)


def test_arms_differ_from_what_they_are_compared_with_by_their_states_alone():
    by_label = {arm.label: arm for arm in ARMS}
    for arm in ARMS:
        other = by_label[arm.compared_with]
        assert other.dtype == arm.dtype
        assert other.compared_with == other.label
    weights = [small_model(0).state_dict(), small_model(0, perturbation=1e-3).state_dict()]
    moved = [(a - b).abs().max() for a, b in zip(*(w.values() for w in weights), strict=True)]
    assert all(one < 0.01 for one in moved)
    assert any(one > 0 for one in moved)


def test_a_file_that_cannot_be_written_is_one_error(tmp_path):
    from fp4_plugin.bench.optim.report import write_json

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--json"):
        write_json({}, tmp_path / "file" / "x.json")
    assert OptimOptions().steps == 2000
