"""The section reaches the engine however it is given, and what cannot be honoured is refused.

Everything that needs two ranks and no training to speak of shares one spawn.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import math
import os
import tempfile
from pathlib import Path

import pytest

import fp4_plugin
from fp4_plugin.integrations.deepspeed import arm, disarm
from tests.distributed import initialize_distributed, run_ranks
from tests.integrations.training import (
    DECODER_LINEARS,
    Trainer,
    batch,
    ds_config,
    gemm_calls,
    tiny_llama,
)

pytestmark = pytest.mark.deepspeed

PAPER = {"recipe": "paper"}
TENSOR = {"recipe": "w4a4_tensor"}
ROW = {"recipe": "w4a4_ste"}


def _message(call, *arguments, **keywords):
    """ "Class: message" of the error that a call raises, or None."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _rank():
    return int(os.environ["RANK"])


def _num_converted(engine):
    return sum(hasattr(module, "fp4") for module in engine.module.modules())


def _before_the_process_group():
    """Bad sections are refused before a process group exists or a weight is touched."""
    import torch.distributed as dist

    refused = {}
    for name, section in {
        "near miss": {"fp_4": PAPER},
        "near miss in capitals": {"FP4": PAPER},
        "unknown key": {"fp4": {"recipy": "paper"}},
        "auto": {"fp4": {"recipe": "auto"}},
        "not an object": {"fp4": "e2m1"},
        "conflict": {"fp4": PAPER, "compile": {"deepcompile": True}},
    }.items():
        model = tiny_llama()
        refused[name] = _message(Trainer, ds_config(1) | section, model=model)
        assert not any(hasattr(module, "fp4") for module in model.modules()), name
    return {"messages": refused, "process group": dist.is_initialized()}


def _ways_to_give_a_config():
    config = ds_config(1, PAPER)
    text = json.dumps(config)
    path = Path(tempfile.mkdtemp()) / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    ways = {
        "path": {"config": str(path)},
        "dict": {"config": config},
        "base64": {"config": encoded},
        "config_params": {"config_params": config},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=_rank())},
    }
    converted = {}
    for name, arguments in ways.items():
        trainer = Trainer(**arguments)
        converted[name] = _num_converted(trainer.engine)
        trainer.close()
    disarm()
    converted["disarmed"] = _num_converted(Trainer(config).engine)
    engine, *_ = fp4_plugin.initialize(model=tiny_llama(), config=config)
    converted["explicit"] = _num_converted(engine)
    arm()
    return converted


def _what_is_left_alone():
    seen = {}
    for name, section in {
        "no section": None,
        "disabled": {"enabled": False},
        "bf16": {"recipe": "bf16"},
    }.items():
        trainer = Trainer(ds_config(1, section))
        seen[name] = [_num_converted(trainer.engine), trainer.train(2)]
        trainer.close()
    return seen


def _two_engines():
    """Two engines train in turns; each keeps its own recipe."""
    trainers = [Trainer(ds_config(2, TENSOR)), Trainer(ds_config(1, ROW))]
    alone = [Trainer(ds_config(2, TENSOR)), Trainer(ds_config(1, ROW))]
    interleaved = [[], []]
    for step in range(3):
        for index, trainer in enumerate(trainers):
            interleaved[index].append(trainer.step(batch(step)))
    return {
        "interleaved": interleaved,
        "alone": [trainer.train(3) for trainer in alone],
        "recipes": [trainer.engine.fp4.config.recipe for trainer in trainers],
        "calls": [gemm_calls(trainer.engine)["fprop"] for trainer in trainers],
    }


def _disagreements():
    """Rank 1 is given something else than rank 0."""
    differs = _rank() == 1

    def initialize(section, other):
        return _message(Trainer, ds_config(1, other if differs else section))

    rows, tensors = ({"linear": {"input": {"granularity": g}}} for g in ("row", "tensor"))
    model = tiny_llama()
    if differs:
        model.model.layers[0].mlp.up_proj.__class__ = _OwnLinear
    return {
        "value": initialize(rows, tensors),
        "absent": initialize(PAPER, None),
        "disabled": initialize(PAPER, {"enabled": False}),
        "layers": _message(Trainer, ds_config(1, PAPER), model=model),
    }


def _class_with_a_behaviour_of_its_own():
    import torch

    return type("_OwnLinear", (torch.nn.Linear,), {})


_OwnLinear = _class_with_a_behaviour_of_its_own()


def _planted_mismatch():
    """On rank 1 somebody puts a plain linear back after initialisation."""
    import torch

    messages = {}
    for on_mismatch in ("error", "warn"):
        trainer = Trainer(ds_config(1, PAPER | {"on_mismatch": on_mismatch}))
        if _rank() == 1:
            mlp = trainer.engine.module.model.layers[1].mlp
            plain = torch.nn.Linear(1, 1, bias=False)
            plain.weight = mlp.up_proj.weight
            mlp.up_proj = plain
        records = _Records()
        logging.getLogger("fp4_plugin").addHandler(records)
        messages[on_mismatch] = [_message(trainer.train, 2), records.messages]
        logging.getLogger("fp4_plugin").removeHandler(records)
    return messages


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _checkpoint(folder, stage):
    """Save after two steps, go on; load into a new engine, go on: the same."""
    logs = Path(folder) / "logs"
    csv_monitor = {"enabled": True, "output_path": str(logs), "job_name": "job"}
    first = Trainer(ds_config(stage, PAPER, csv_monitor=csv_monitor))
    parameters = [id(p) for p in first.engine.module.parameters()]
    first.train(2)
    first.engine.save_checkpoint(folder)
    first.engine.save_checkpoint(folder, tag="named")
    continued = first.train(3, first=2)
    second = Trainer(ds_config(stage, PAPER), model=tiny_llama(seed=1))
    second.train(1)
    second.engine.load_checkpoint(folder, tag="named")
    resumed = second.train(3, first=2)
    manifests = [Path(folder) / tag / "fp4_manifest.json" for tag in ("global_step2", "named")]
    return {
        "continued": continued,
        "resumed": resumed,
        "same parameters": parameters == [id(p) for p in first.engine.module.parameters()],
        "manifest beside logs": json.loads((logs / "job" / "fp4_manifest.json").read_text()),
        "manifests": [json.loads(path.read_text()) for path in manifests if path.exists()],
    }


def _non_finite():
    """A NaN or Inf on rank 1 only: what the loss there and the norm everywhere say."""
    import torch

    seen = {}
    for stage in (1, 3):
        for value in ("nan", "inf"):
            trainer = Trainer(ds_config(stage, PAPER))
            layer = trainer.engine.module.model.layers[0].mlp.down_proj

            def poison(module, inputs, value=float(value)):
                poisoned = inputs[0].clone()
                poisoned[0, 3, 7] = value
                return (poisoned,)

            if _rank() == 1:
                layer.register_forward_pre_hook(poison)
            seen[f"activation {value} zero{stage}"] = _loss_and_norm(trainer)
            if stage == 1:
                trainer = Trainer(ds_config(stage, PAPER))
                weight = trainer.engine.module.model.layers[1].self_attn.o_proj.weight
                with torch.no_grad():
                    weight[3, 5] = float(value)
                seen[f"weight {value} zero{stage}"] = _loss_and_norm(trainer)
    return seen


def _loss_and_norm(trainer):
    """[loss, gradient norm, skipped steps] of one step."""
    loss = trainer.step(batch(0))
    norm = trainer.engine.get_global_grad_norm()
    return [loss, float(norm), trainer.engine.skipped_steps]


def _everything(folder):
    results = {"early": _before_the_process_group()}
    initialize_distributed()
    results |= {
        "ways": _ways_to_give_a_config(),
        "untouched": _what_is_left_alone(),
        "two engines": _two_engines(),
        "disagreements": _disagreements(),
        "mismatch": _planted_mismatch(),
        "non-finite": _non_finite(),
    }
    for stage in (2, 3):
        results[f"checkpoint {stage}"] = _checkpoint(f"{folder}/zero{stage}", stage)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(_everything, str(folder), timeout_s=280, warm="deepspeed")


def test_a_bad_section_is_refused_before_anything_is_touched(results):
    for one in results:
        early = one["early"]
        assert early["process group"] is False
        assert all(message.startswith("ConfigError") for message in early["messages"].values())
        assert "'fp_4'" in early["messages"]["near miss"]
        assert "did you mean 'recipe'" in early["messages"]["unknown key"]
        assert "compile.deepcompile" in early["messages"]["conflict"]


def test_the_section_is_found_however_the_config_is_given(results):
    names = ("path", "dict", "base64", "config_params", "args", "explicit")
    ways = dict.fromkeys(names, DECODER_LINEARS) | {"disarmed": 0}
    assert [one["ways"] for one in results] == [ways, ways]


def test_without_an_enabled_section_the_model_is_untouched(results):
    for one in results:
        untouched = one["untouched"]
        assert [converted for converted, _ in untouched.values()] == [0, 0, 0]
        losses = [losses for _, losses in untouched.values()]
        assert losses[0] == losses[1] == losses[2]


def test_two_engines_in_one_process_keep_their_recipes(results):
    for one in results:
        two = one["two engines"]
        assert two["recipes"] == ["w4a4_tensor", "w4a4_ste"]
        assert two["interleaved"] == two["alone"]
        assert two["interleaved"][0] != two["interleaved"][1]
        assert two["calls"] == [3 * DECODER_LINEARS] * 2


def test_ranks_that_disagree_stop_together_with_the_key_named(results):
    first, second = (one["disagreements"] for one in results)
    assert first == second
    assert 'fp4.linear.input.granularity: "row" on rank 0; "tensor" on rank 1' in first["value"]
    assert "absent on rank 1" in first["absent"]
    assert "fp4.enabled: true on rank 0; false on rank 1" in first["disabled"]
    assert "layers.model.layers.0.mlp.up_proj" in first["layers"]
    assert all(message.startswith("ConfigError") for message in first.values())


def test_a_mismatch_on_one_rank_stops_every_rank(results):
    for one in results:
        message, _ = one["mismatch"]["error"]
        assert message.startswith("MismatchError")
        assert "on rank 1" in message
        assert "model.layers.1.mlp.up_proj" in message


def test_a_mismatch_is_only_logged_if_the_section_says_so(results):
    for one in results:
        message, logged = one["mismatch"]["warn"]
        assert message is None
        assert any("model.layers.1.mlp.up_proj" in line for line in logged)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_resumes_bit_for_bit_and_carries_the_manifest(results, stage):
    for one in results:
        checkpoint = one[f"checkpoint {stage}"]
        assert checkpoint["resumed"] == checkpoint["continued"]
        assert checkpoint["same parameters"]
        first_step = checkpoint["manifest beside logs"]["summary"]["gemm_calls"]
        assert set(first_step.values()) == {DECODER_LINEARS}
        assert len(checkpoint["manifests"]) == 2
        for manifest in checkpoint["manifests"]:
            assert manifest["summary"]["linears_converted"] == DECODER_LINEARS
            assert manifest["summary"]["status"] == {"active": DECODER_LINEARS}
            assert manifest["zero_stage"] == stage
            assert manifest["world_size"] == 2


def test_non_finite_values_stay_visible(results):
    healthy, poisoned = results
    for name, (loss, norm, skipped) in poisoned["non-finite"].items():
        assert not math.isfinite(loss), name
        assert not math.isfinite(norm), name
        assert skipped == 1, name
    for name, (_, norm, skipped) in healthy["non-finite"].items():
        assert not math.isfinite(norm), name
        assert skipped == 1, name
