"""FP8 gradient communication when something is wrong, and the modes that keep state.

What is not finite reaches every rank and is named; what cannot be honoured stops; two engines of a
process do not share a thing; error feedback survives a checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.distributed import allow_fp16_on_cpu, initialize_distributed, run_ranks
from tests.integrations.training import (
    Trainer,
    batch,
    deepspeed_version,
    ds_config,
    skip_if_broken_upstream,
    tiny_llama,
    upstream_fault,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timeout(300)]

STAGES = (0, 1, 2, 3)
FEEDBACK_STAGES = (0, 1)
BAD_RANK, BAD_STEP = 1, 2
BAD_PARAMETER = "model.layers.1.mlp.down_proj.weight"
FP16 = {
    "precision": "fp16",
    "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
}


def fp8(**settings):
    return {"recipe": "bf16", "gradient_communication": settings}


EXACT = {"recipe": "bf16", "gradient_communication": None}


def message_of(call, *arguments, **keywords):
    """ "Class: message" of the error that a call raises, or None."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def weights_of(engine):
    from deepspeed.utils import safe_get_full_fp32_param

    full = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return torch.cat([one.flatten() for one in full]).clone()


class Poison:
    """Makes one element of one gradient of one rank infinite in one step."""

    def __init__(self, model):
        self.step = 0
        dict(model.named_parameters())[BAD_PARAMETER].register_hook(self)

    def __call__(self, gradient):
        is_now = self.step == BAD_STEP and int(os.environ["RANK"]) == BAD_RANK
        self.step += 1
        if not is_now:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 2] = math.inf
        return gradient


def layout_of(stage, precision):
    return f"zero{stage} {precision}, infinite"


def an_infinite_gradient():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fp4_plugin").addHandler(handler)
    results = {}
    for precision, settings in (("fp16", FP16), ("bf16", {})):
        for stage in STAGES:
            layout = layout_of(stage, precision)
            if upstream_fault(layout) is None:
                records.clear()
                results[layout] = observe(stage, precision, settings)
                results[layout]["log"] = [one for one in records if "not finite" in one]
    logging.getLogger("fp4_plugin").removeHandler(handler)
    return results


def observe(stage, precision, settings):
    """Train five steps, or until an error or the loss ends it."""
    model = tiny_llama()
    Poison(model)
    trainer = Trainer(ds_config(stage, fp8(), **settings), model=model)
    engine = trainer.engine
    scales, norms, losses, skipped, error = [], [], [], [], None
    for step in range(5):
        losses.append(trainer.forward_backward(batch(step)))
        error = message_of(engine.step) if math.isfinite(losses[-1]) else None
        if error is not None or not math.isfinite(losses[-1]):
            break
        scales.append(engine.optimizer.loss_scale if precision == "fp16" else 1)
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else str(float(norm)))
        skipped.append(engine.skipped_steps)
    engine.fp4.communication.exchange_reports()
    report = engine.fp4.manifest()["gradient_communication"]
    trainer.close()
    return {
        "scales": scales,
        "norms": norms,
        "losses": losses,
        "skipped": skipped,
        "error": error,
        "own": report["non_finite"],
        "others": report["non_finite_of_other_ranks"],
    }


def two_engines():
    """An FP8 and an exact engine, trained in turns and alone."""
    configs = [ds_config(2, fp8()), ds_config(2, EXACT), ds_config(0, fp8(format="e5m2"))]
    trainers = [Trainer(config) for config in configs]
    for step in range(3):
        for trainer in trainers:
            trainer.step(batch(step))
    turns = [trainer.train(1, first=3) for trainer in trainers]
    reports = [t.engine.fp4.manifest()["gradient_communication"] for t in trainers]
    alone = []
    for config in configs:
        trainer = Trainer(config)
        alone.append(trainer.train(4)[-1:])
        trainer.close()
    return {
        "turns": turns,
        "alone": alone,
        "states": [report["state"] for report in reports],
        "formats": [report.get("asked", {}).get("format") for report in reports],
        "calls": [report.get("calls") for report in reports],
    }


def what_cannot_be_honoured():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    seam = "allreduce_and_copy_with_multiple_ranks"
    original = getattr(DeepSpeedZeroOptimizer, seam)
    delattr(DeepSpeedZeroOptimizer, seam)
    missing = message_of(Trainer, ds_config(2, fp8()))
    setattr(DeepSpeedZeroOptimizer, seam, original)

    def by_itself(bucket, dp_group, dp_world_size=None):
        """An engine that reduces gradients in a way of its own."""
        for tensor in bucket:
            torch.distributed.all_reduce(tensor, group=dp_group)
        return engine.flatten(bucket)

    trainer = Trainer(ds_config(0, fp8()))
    engine = trainer.engine
    engine.allreduce_bucket = by_itself
    bypassed = message_of(trainer.step, batch(0))
    quantized = ds_config(3, fp8())
    quantized["zero_optimization"]["zero_quantized_gradients"] = True
    small = {}
    for stage in (2, 3):
        tiny = Trainer(ds_config(stage, fp8(min_numel=10**9)))
        tiny.train(1)
        small[stage] = tiny.engine.fp4.manifest()["gradient_communication"]
    stopped = Trainer(ds_config(0, fp8()))
    stopped.train(1)
    stopped.engine.enable_backward_allreduce = False  # as 1-bit Adam does after its warm-up
    stopped.train(1, first=1)
    return {
        "missing": missing,
        "bypassed": bypassed,
        "quantized": message_of(Trainer, quantized),
        "only small": list(small.values()),
        "stopped": stopped.engine.fp4.manifest()["gradient_communication"],
    }


def error_feedback(folder):
    results = {}
    for stage in FEEDBACK_STAGES:
        found = results[f"zero{stage}"] = {}
        if upstream_fault(f"zero{stage} checkpoint") is None:
            found.update(_feedback_in_checkpoints(stage, f"{folder}/zero{stage}"))
        if upstream_fault(layout_of(stage, "fp16")) is None:
            found["after a skip"] = _residual_after_a_skipped_step(stage)
            found["growing scale"] = _residual_when_the_loss_scale_grows(stage)
    return results


def _feedback_in_checkpoints(stage, folder):
    config = ds_config(stage, fp8(error_feedback=True))
    trainer = Trainer(config)
    trainer.train(3)
    feedback = trainer.engine.fp4.communication._reducer.feedback
    names = dict(trainer.engine.module.named_parameters())
    held = {name: one.numel() for name, one in feedback.residuals.items()}
    trainer.engine.save_checkpoint(folder)
    trainer.train(2, first=3)
    resumed = Trainer(config)
    resumed.engine.load_checkpoint(folder)
    again = resumed.train(2, first=3)
    without = Trainer(ds_config(stage, {**fp8(), "on_mismatch": "warn"}))
    without.engine.load_checkpoint(folder)
    without.train(2, first=3)
    return {
        "complete": held == {name: one.numel() for name, one in names.items()},
        "norm": sum(one.norm().item() for one in feedback.residuals.values()),
        "resumed": _have_equal_weights(trainer, resumed),
        "differs from none": not _have_equal_weights(trainer, without),
        "losses": again,
    }


def _have_equal_weights(one, other):
    pairs = zip(one.engine.module.parameters(), other.engine.module.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _residual_after_a_skipped_step(stage):
    model = tiny_llama()
    Poison(model)
    trainer = Trainer(ds_config(stage, fp8(error_feedback=True), **FP16), model=model)
    norms = []
    for step in range(4):
        trainer.step(batch(step))
        residuals = trainer.engine.fp4.communication._reducer.feedback.residuals
        norms.append(sum(one.norm().item() for one in residuals.values()))
    return norms


def _residual_when_the_loss_scale_grows(stage):
    """Norms of the losses before and after the scale doubles, and the scales."""
    growing = {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 6}}
    growing["fp16"]["loss_scale_window"] = 2
    trainer = Trainer(ds_config(stage, fp8(error_feedback=True), **growing))
    communication = trainer.engine.fp4.communication
    norms = []

    def observe(skipped, after_step=communication.memory.after_step):
        residuals = communication._reducer.feedback.residuals
        norms.append([sum(one.norm().item() for one in residuals.values())])
        after_step(skipped)
        norms[-1].append(sum(one.norm().item() for one in residuals.values()))
        norms[-1].append(trainer.engine.optimizer.loss_scale)

    communication.memory.after_step = observe
    trainer.train(4)
    return norms


def automatic_factor(folder):
    exact, rounded = Trainer(ds_config(2, EXACT)), Trainer(ds_config(2, fp8(automatic_factor=True)))
    before = weights_of(exact.engine)
    exact.train(8)
    rounded.train(8)
    moved = weights_of(exact.engine)
    report = rounded.engine.fp4.manifest()["gradient_communication"]
    rounded.engine.save_checkpoint(folder)
    resumed = Trainer(ds_config(2, fp8(automatic_factor=True)))
    resumed.engine.load_checkpoint(folder)
    again = resumed.engine.fp4.manifest()["gradient_communication"]
    return {
        "resumed": again["automatic_factor"],
        "update": ((weights_of(rounded.engine) - moved).norm() / (moved - before).norm()).item(),
        "factor": report["automatic_factor"],
        "saturated": report["saturated_fraction"],
    }


def logs_and_checkpoints(folder):
    monitor = {"enabled": True, "output_path": f"{folder}/csv", "job_name": "job"}
    trainer = Trainer(ds_config(2, fp8(), csv_monitor=monitor))
    trainer.train(2)
    trainer.engine.save_checkpoint(f"{folder}/checkpoint", tag="two")
    trainer.close()


def everything(folder):
    initialize_distributed()
    allow_fp16_on_cpu()
    return {
        "infinite": an_infinite_gradient(),
        "engines": two_engines(),
        "refused": what_cannot_be_honoured(),
        "feedback": error_feedback(f"{folder}/feedback"),
        "factor": automatic_factor(f"{folder}/factor"),
        "logs": logs_and_checkpoints(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def results(folder):
    return run_ranks(everything, str(folder), timeout_s=280, warm="deepspeed")


def observed_on(results, stage, precision):
    """What each rank saw of an infinite gradient."""
    layout = layout_of(stage, precision)
    skip_if_broken_upstream(layout)
    return [one["infinite"][layout] for one in results]


@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_gradient_of_one_rank_makes_all_ranks_skip_the_step(results, stage):
    for observed in observed_on(results, stage, "fp16"):
        assert observed["skipped"] == [0, 0, 1, 1, 1]
        assert observed["scales"] == [256, 256, 128, 128, 128]
        assert all(math.isfinite(loss) for loss in observed["losses"])
        assert observed["losses"][-1] < observed["losses"][0]


def where_it_shows(observed):
    """What a person at this rank sees in the step or, where it ends there, the next loss."""
    if observed["error"] is not None:
        assert len(observed["norms"]) == BAD_STEP
        return observed["error"]
    if observed["skipped"][BAD_STEP] == 1:
        return "skipped"
    if not math.isfinite(float(observed["norms"][BAD_STEP])):
        return "norm"
    assert len(observed["norms"]) == BAD_STEP + 1
    return f"norm {observed['norms'][BAD_STEP]}, then loss {observed['losses'][-1]}"


def where_it_may_show(stage):
    if deepspeed_version() >= Version("0.19"):
        return ["skipped", "norm"]
    if stage == 0:
        # BF16_Optimizer, which asserts that the norm is above zero; later an fp16 optimizer.
        return ["AssertionError: "] if deepspeed_version() < Version("0.17") else ["skipped"]
    # -1 stands for each partition's norm that is not finite, and is the only one left in the sum.
    return ["norm 1.0, then loss nan"]


@pytest.mark.parametrize("stage", STAGES)
def test_in_bf16_it_is_visible_on_all_ranks(results, stage):
    for observed in observed_on(results, stage, "bf16"):
        print(observed["norms"], observed["skipped"], observed["losses"], observed["error"])
        assert where_it_shows(observed) in where_it_may_show(stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_it_is_reported_with_rank_and_parameter(results, precision, stage):
    skip_if_broken_upstream(f"{layout_of(stage, precision)}, reported")
    for rank, observed in enumerate(observed_on(results, stage, precision)):
        where = observed["own"] if rank == BAD_RANK else observed["others"][str(BAD_RANK)]
        assert where[0] == {"parameters": [BAD_PARAMETER], "blocks": 1}
        if rank == BAD_RANK:
            assert f"rank {BAD_RANK}" in observed["log"][0]
            assert BAD_PARAMETER in observed["log"][0]
        else:
            assert observed["log"] == []


def test_engines_of_one_process_keep_their_own_settings(results):
    for one in results:
        engines = one["engines"]
        assert engines["turns"] == engines["alone"]
        assert engines["states"] == ["active", "off", "active"]
        assert engines["formats"] == ["e4m3", None, "e5m2"]
        assert list(engines["calls"][0]) == ["reduce_to_owners"]
        assert list(engines["calls"][2]) == ["all_reduce"]


def test_a_version_without_a_seam_is_named(results):
    for one in results:
        message = one["refused"]["missing"]
        assert message.startswith("UnsupportedError")
        assert "allreduce_and_copy_with_multiple_ranks" in message
        assert "deepspeed 0." in message


def test_gradients_that_go_their_own_way_stop_the_run(results):
    for one in results:
        message = one["refused"]["bypassed"]
        assert message.startswith("MismatchError")
        assert "gradient_communication" in message
        # One that does so later cannot be told from one that has nothing to reduce: it is counted.
        assert one["refused"]["stopped"]["steps_without_reduction"] == 1


def test_quantized_gradients_of_deepspeed_are_refused(results):
    for one in results:
        message = one["refused"]["quantized"]
        assert message.startswith("ConfigError")
        assert "zero_quantized_gradients" in message


def test_small_reductions_stay_exact_and_are_counted(results):
    for report in (report for one in results for report in one["refused"]["only small"]):
        assert report["calls"] == {}
        assert report["wire_bytes"] == 0
        assert report["exact_calls"] == {"smaller than min_numel": 1}
        assert report["exact_elements"] > 0
        assert report["state"].startswith("idle: no reduction was made in FP8 so far")
        assert report["steps_without_reduction"] == 0


@pytest.mark.parametrize("stage", FEEDBACK_STAGES)
def test_error_feedback_is_kept_by_parameter_and_in_checkpoints(results, stage):
    skip_if_broken_upstream(f"zero{stage} checkpoint")
    for one in results:
        observed = one["feedback"][f"zero{stage}"]
        assert observed["complete"]
        assert observed["norm"] > 0
        assert observed["resumed"]
        assert observed["differs from none"]


@pytest.mark.parametrize("stage", FEEDBACK_STAGES)
def test_error_feedback_starts_anew_after_a_skipped_step(results, stage):
    skip_if_broken_upstream(layout_of(stage, "fp16"))
    for one in results:
        before, _, skipped, after = one["feedback"][f"zero{stage}"]["after a skip"]
        assert before > 0
        assert skipped == 0
        assert after > 0
        scale = 2.0**6
        grown = []
        for before_step, after_step, new_scale in one["feedback"][f"zero{stage}"]["growing scale"]:
            assert after_step == pytest.approx(before_step * new_scale / scale)
            grown.append(new_scale / scale)
            scale = new_scale
        assert set(grown) == {1, 2}


def test_the_automatic_factor_trains_and_adapts(results):
    for one in results:
        observed = one["factor"]
        print(observed)
        assert 0 < observed["update"] < 0.2
        assert 1 < observed["factor"] < 1.01
        assert observed["resumed"] == observed["factor"]
        assert observed["saturated"] == 0


def test_wire_bytes_are_in_the_manifest_and_in_the_monitor(results, folder):
    manifest = json.loads((folder / "checkpoint/two/fp4_manifest.json").read_text())
    report = manifest["gradient_communication"]
    assert report["wire_bytes"] < 0.28 * report["bf16_wire_bytes"]
    files = {path.name: path for path in Path(folder, "csv/job").glob("*fp4_gradient*")}
    wire = next(path for name, path in files.items() if "wire_bytes" in name)
    values = [float(line.split(",")[1]) for line in wire.read_text().splitlines()[1:]]
    assert sum(values) == report["wire_bytes"]
    assert any("underflowed_fraction" in name for name in files)
