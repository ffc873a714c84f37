"""16-bit optimizer states through DeepSpeed's checkpoints: its own, universal ones, and AdamW's.

Three jobs, one after the other: two ranks save, one rank takes over, two ranks take over from it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import allow_fp16_on_cpu, initialize_distributed, rank_environment, run_ranks
from tests.integrations.training import Trainer, batch, ds_config, sound

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

MOMENTS = ("exp_avg", "exp_avg_sq")
PLAIN = {"recipe": "bf16", "on_mismatch": "warn"}


def states(**settings):
    return {"recipe": "bf16", "optimizer_states": settings, "on_mismatch": "warn"}


FP16 = {"precision": "fp16", "accumulation": 2}
# Resumed in the layout that saved them.
LAYOUTS = {
    "zero0 checkpoint": ds_config(0, states()),
    "zero1 native": ds_config(1, states(checkpoint="native")),
    "zero2 fp16, accumulation": ds_config(2, states(), **FP16),
    "zero3 e4m3, accumulation": ds_config(3, states(exp_avg="e4m3"), accumulation=2),
}
STEPS = 3
# Saved by two ranks and made universal.
SOURCES = {
    "zero2": ds_config(2, states()),
    "zero3 e4m3": ds_config(3, states(exp_avg="e4m3")),
    "zero2 AdamW": ds_config(2, PLAIN),
}
# Taken over by one rank: (source, loaded as).
TAKEN_OVER = {
    "zero2 to 1": ("zero2", ds_config(1, states())),
    "zero2 to AdamW": ("zero2", ds_config(2, PLAIN)),
    "zero2 of AdamW": ("zero2 AdamW", ds_config(2, states())),
    "zero3 e4m3 to fp16": ("zero3 e4m3", ds_config(3, states())),
    "zero2 to 3": ("zero2", ds_config(3, states())),
    "zero2 of AdamW to 3": ("zero2 AdamW", ds_config(3, states())),
    "zero2 to 3, to AdamW": ("zero2", ds_config(3, PLAIN)),
    "zero3 e4m3 to 1 e4m3": ("zero3 e4m3", ds_config(1, states(exp_avg="e4m3"))),
}
# Taken over by two ranks from the one.
TAKEN_BACK = {
    "zero2 to 1": ("zero2 to 1", ds_config(2, states())),
    "zero3 e4m3 to fp16": ("zero3 e4m3 to fp16", ds_config(3, states())),
    "zero2 to 3": ("zero2 to 3", ds_config(2, states())),
}
CONTINUED = 6
FIRST_LOSS, NEXT_LOSSES = 1e-6, 1e-2


def full_tensors(engine):
    """{name: float32 master weight, moments} of the whole model; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    result = {}
    for name, parameter in engine.module.named_parameters():
        result[f"{name} master"] = safe_get_full_fp32_param(parameter).clone()
        for key in MOMENTS:
            result[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return result


def masters(engine):
    return [value.detach().clone() for value in engine.basic_optimizer.state]


def codes(engine):
    """What the optimizer of this rank keeps, as it is, and what it steps."""
    kept = engine.basic_optimizer.state.values()
    return [*masters(engine), *(value.clone() for state in kept for value in state.values())]


def values(engine):
    """What that stands for: codes may be twice as large and scales half of that."""
    optimizer = engine.basic_optimizer
    portable = copy.copy(optimizer)
    portable.param_groups = [{**g, "checkpoint": "portable"} for g in optimizer.param_groups]
    if engine.zero_optimization_stage() == 3:  # which takes them out of the groups
        portable.param_groups[0]["params"] = list(optimizer.state)
    states = type(optimizer).state_dict(portable)["state"]
    return [*masters(engine), *(state[key] for state in states.values() for key in MOMENTS)]


def dtypes(engine):
    kept = engine.basic_optimizer.state.values()
    return sorted({str(state[key].dtype) for state in kept for key in MOMENTS if key in state})


def equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(map(at_least_1d, some), map(at_least_1d, others), strict=True)
    )


def at_least_1d(tensor):
    return torch.atleast_1d(tensor).contiguous()


def save_on_two_ranks(folder):
    initialize_distributed()
    allow_fp16_on_cpu()
    results = {name: resume(f"{folder}/resumed/{name}", LAYOUTS[name]) for name in sound(LAYOUTS)}
    results["to AdamW"] = hand_over(f"{folder}/to", ds_config(2, states()), ds_config(2, PLAIN))
    results["of AdamW"] = hand_over(f"{folder}/of", ds_config(2, PLAIN), ds_config(2, states()))
    for name, config in SOURCES.items():
        trainer = Trainer(config)
        trainer.train(STEPS)
        trainer.engine.save_checkpoint(f"{folder}/{name}", tag="saved")
        keep(trainer.engine, f"{folder}/{name}.pt")
        results[f"universal {name}"] = trainer.train(CONTINUED, first=STEPS)
        trainer.close()
    return results


def keep(engine, path):
    tensors = full_tensors(engine)
    if engine.global_rank == 0:
        torch.save(tensors, path)


def resume(folder, config):
    """(losses, the same of a new engine that resumed, facts about what it loaded)."""
    trainer = Trainer(config)
    micro_steps = STEPS * config["gradient_accumulation_steps"]
    trainer.train(micro_steps)
    trainer.engine.save_checkpoint(folder)
    saved = values(trainer.engine)
    losses = trainer.train(micro_steps, first=micro_steps)
    final = codes(trainer.engine)
    trainer.close()
    trainer = Trainer(config)
    trainer.engine.load_checkpoint(folder)
    facts = {"dtypes": dtypes(trainer.engine), "same": equal(values(trainer.engine), saved)}
    again = trainer.train(micro_steps, first=micro_steps)
    facts["same at the end"] = equal(codes(trainer.engine), final)
    trainer.close()
    return [losses, again, facts]


def hand_over(folder, before, after):
    """(losses of the optimizer that saved, and of the other that loaded)."""
    trainer = Trainer(before)
    trainer.train(STEPS)
    trainer.engine.save_checkpoint(folder)
    losses = trainer.train(STEPS, first=STEPS)
    trainer.close()
    trainer = Trainer(after)
    trainer.engine.load_checkpoint(folder)
    loaded = dtypes(trainer.engine)
    other = trainer.train(STEPS, first=STEPS)
    kind = type(trainer.engine.basic_optimizer).__name__
    trainer.close()
    return [losses, other, {"dtypes": loaded, "class": kind}]


def make_universal(folder):
    """Run DeepSpeed's converter as its documentation does."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--inject_missing_state", "--input_folder", f"{folder}/saved"]
    return subprocess.run(
        [*command, "--output_folder", f"{folder}/universal"],
        env=rank_environment(0, 1, 0, str(folder)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def take_over(folder, jobs, rows, saves, **settings):
    """Load each universal checkpoint on this job's ranks, compare, train on."""
    initialize_distributed()
    results = {}
    for name, (source, config) in jobs.items():
        trainer = Trainer(config | {"checkpoint": {"load_universal": True}} | settings)
        engine = trainer.engine
        engine.load_checkpoint(f"{folder}/{source}", tag="universal")
        seen = {"dtypes": dtypes(engine)}
        seen["exp_avg"] = engine.basic_optimizer.param_groups[0].get("exp_avg")
        seen["errors"] = errors(full_tensors(engine), torch.load(f"{folder}/{source}.pt"))
        if saves and name in TAKEN_BACK:
            engine.save_checkpoint(f"{folder}/back/{name}", tag="saved")
            keep(engine, f"{folder}/back/{name}.pt")
        seen["losses"] = [trainer.step(rows(STEPS + step)) for step in range(CONTINUED)]
        seen["later dtypes"] = dtypes(engine)
        seen["steps"] = [int(s["step"]) for s in engine.basic_optimizer.state.values()]
        mappings = [getattr(p, "_hp_mapping", None) for p in engine.module.parameters()]
        seen["views"] = sum(bool(m and m.optim_fragment) for m in mappings)
        results[name] = seen
        trainer.close()
    return results


def errors(found, expected):
    """{kind: (largest difference, largest relative to its tensor's maximum)} over parameters."""
    worst = {}
    for kind in ("master", *MOMENTS):
        names = [name for name in expected if name.endswith(f" {kind}")]
        differences = [
            ((found[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in names
        ]
        worst[kind] = max(differences)
    return worst


def take_over_on_one(folder):
    def rows(step):
        return torch.cat([batch(step, rank=0), batch(step, rank=1)])

    return take_over(folder, TAKEN_OVER, rows, saves=True, train_micro_batch_size_per_gpu=4)


def take_back_on_two(folder):
    return take_over(f"{folder}/back", TAKEN_BACK, batch, saves=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    saved = run_ranks(save_on_two_ranks, str(folder), timeout_s=200, warm="deepspeed")
    for name in SOURCES:
        converted = make_universal(folder / name)
        assert converted.returncode == 0, converted.stderr
    one = run_ranks(take_over_on_one, str(folder), num_ranks=1, timeout_s=100, warm="deepspeed")
    for name in TAKEN_BACK:
        assert make_universal(folder / "back" / name).returncode == 0
    two = run_ranks(take_back_on_two, str(folder), timeout_s=100, warm="deepspeed")
    return {"folder": folder, "saved": saved, "one": one[0], "two": two}


@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_in_the_same_layout_is_bit_equal(results, name):
    for by_name in results["saved"]:
        if name not in sound(LAYOUTS):
            pytest.skip(f"{name} is broken in this DeepSpeed release")
        losses, again, facts = by_name[name]
        assert again == losses
        assert facts["same"]
        assert facts["same at the end"]
        first = "torch.float8_e4m3fn" if "e4m3" in name else "torch.float16"
        assert facts["dtypes"] == sorted({first, "torch.float16"})


def test_a_checkpoint_of_adamw_is_continued_in_16_bits_and_the_other_way(results):
    for by_name in results["saved"]:
        for name, dtype, kind in (
            ("of AdamW", "torch.float16", "FP16StateAdamW"),
            ("to AdamW", "torch.float32", "AdamW"),
        ):
            losses, other, facts = by_name[name]
            assert facts == {"dtypes": [dtype], "class": kind}
            assert other[0] == losses[0]
            assert other == pytest.approx(losses, abs=NEXT_LOSSES)


def of_the_job(by_rank):
    return [sum(step) / len(step) for step in zip(*by_rank, strict=True)]


# What one rounding may change, of the largest entry of a tensor: to FP16, also of a root in its
# square, and to E4M3, where blocks begin elsewhere.
ONE_ROUNDING = {"fp16": 2**-10, "e4m3": 2**-4}


def assert_taken_over(seen, name, expected_losses):
    assert seen["errors"]["master"] == 0
    to_adamw = name.endswith("to AdamW")
    exp_avg = "e4m3" if name.endswith("e4m3") else "fp16"
    first = {"e4m3": "torch.float8_e4m3fn", "fp16": "torch.float16"}[exp_avg]
    kept = {"torch.float32"} if to_adamw else {first, "torch.float16"}
    assert set(seen["dtypes"]) == kept
    assert seen["later dtypes"] == seen["dtypes"]
    assert to_adamw or seen["exp_avg"] == exp_avg
    assert seen["errors"]["exp_avg"] <= (0 if to_adamw else ONE_ROUNDING[exp_avg])
    assert seen["errors"]["exp_avg_sq"] <= (0 if to_adamw else ONE_ROUNDING["fp16"])
    assert set(seen["steps"]) == {STEPS + CONTINUED}
    assert to_adamw or seen["views"] == 0
    first = abs(seen["losses"][0] - expected_losses[0]) / expected_losses[0]
    assert first <= FIRST_LOSS
    assert seen["losses"] == pytest.approx(expected_losses, abs=NEXT_LOSSES)


@pytest.mark.parametrize("name", TAKEN_OVER)
def test_one_rank_takes_over_from_two(results, name):
    source = TAKEN_OVER[name][0]
    expected = of_the_job([one[f"universal {source}"] for one in results["saved"]])
    seen = results["one"][name]
    print(name, seen["errors"], seen["losses"], expected)
    assert_taken_over(seen, name, expected)


@pytest.mark.parametrize("name", TAKEN_BACK)
def test_two_ranks_take_over_from_one(results, name):
    expected = results["one"][name]["losses"]
    for seen in results["two"]:
        print(name, seen[name]["errors"])
    losses = of_the_job([seen[name]["losses"] for seen in results["two"]])
    for seen in results["two"]:
        assert_taken_over(seen[name] | {"losses": losses}, name, expected)


def test_native_checkpoints_are_no_source_of_universal_ones(results):
    folder = results["folder"] / "resumed/zero1 native"
    (tag,) = [path.name for path in folder.iterdir() if path.name.startswith("global_step")]
    (folder / tag).rename(folder / "saved")
    converted = make_universal(folder)
    assert converted.returncode != 0
    assert "exp_avg" in converted.stderr
    assert not list(Path(folder / "universal").glob("zero/*/exp_avg.pt"))
