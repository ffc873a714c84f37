"""Checkpoints of an engine: what it saves comes back bit for bit; what it may not load it refuses.

One spawn of two ranks saves and loads, one of a single rank meets what they saved. Failures of
disks and processes: test_checkpoint_faults.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch

from fp4_plugin.checkpoint import CHECKPOINT_NAME, Manifest, read_latest, verify_checkpoint
from fp4_plugin.integrations.deepspeed import checkpoints
from tests.checkpoint.test_checkpoints import DAMAGE, flip_four_bytes
from tests.distributed import initialize_distributed, run_ranks
from tests.integrations.training import HIDDEN, Trainer, batch, ds_config, sound, tiny_llama

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

PAPER = {"recipe": "paper"}
ANOTHER = {"recipe": "paper", "linear": {"weight": {"estimator": {"name": "ste"}}}}
STAGES = (0, 1, 2, 3)
OPTIMIZER_SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
WEIGHTS = "mp_rank_00_model_states.pt"


class Records(logging.Handler):
    """The warnings of this package while it is entered."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("fp4_plugin").addHandler(self)
        return self.messages

    def __exit__(self, *error):
        logging.getLogger("fp4_plugin").removeHandler(self)


def outcome(call, *arguments, **keywords):
    """What a call of `load_checkpoint` or the like says: its error or the tag, and the warnings."""
    with Records() as warnings:
        try:
            result = call(*arguments, **keywords)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "warnings": warnings}
    path = result[0] if isinstance(result, tuple) else None
    tag = None if path is None else Path(path).parent.name
    return {"error": None, "loaded": tag, "warnings": warnings}


def on_rank_0(action):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        action()
    dist.barrier()


def copy_of(folder, name):
    """A copy of all checkpoints in `folder`, beside it."""
    copy = folder.with_name(name)
    on_rank_0(lambda: shutil.copytree(folder, copy))
    return copy


def weights_of(engine):
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def is_unchanged(engine, before):
    return all(torch.equal(a, b) for a, b in zip(weights_of(engine), before, strict=True))


def resumption(folder, stages):
    """{stage: whether resumed and uninterrupted training agree in every bit of loss and weight}"""
    found = {}
    for stage in stages:
        config = ds_config(stage, PAPER)
        first = Trainer(config)
        first.train(2)
        first.engine.save_checkpoint(folder / f"zero{stage}", client_state={"note": [1, "two"]})
        drawn = torch.rand(3).tolist()
        continued = first.train(2, first=2)
        second = Trainer(config, model=tiny_llama(seed=1))
        second.train(1)
        _, client_state = second.engine.load_checkpoint(folder / f"zero{stage}")
        found[stage] = {
            "random": torch.rand(3).tolist() == drawn,
            "losses": second.train(2, first=2) == continued,
            "weights": is_unchanged(second.engine, weights_of(first.engine)),
            "client state": client_state["note"],
        }
        first.close()
        second.close()
    return found


def what_is_saved(folder):
    """Two checkpoints of one engine, the second one's tag saved twice."""
    import deepspeed

    trainer = Trainer(ds_config(2, PAPER))
    trainer.train(1)
    trainer.engine.save_checkpoint(folder, tag="first")
    trainer.train(1, first=1)
    trainer.engine.save_checkpoint(folder, tag="second", save_latest=False)
    latest = read_latest(folder)
    copy_scripts = trainer.engine._copy_recovery_script

    def write_more(save_path):
        """As DeepSpeed copies what it has offloaded to NVMe: not by its checkpoint engine."""
        copy_scripts(save_path)
        offloaded = Path(save_path) / "second" / "offloaded_tensors"
        offloaded.mkdir()
        for name in ("exp_avg.swp", "exp_avg_sq.swp"):
            (offloaded / name).write_bytes(b"states")

    trainer.engine._copy_recovery_script = write_more
    trainer.engine.save_checkpoint(str(folder), "second")
    path = Path(folder)
    manifest = Manifest.read(path / "second")
    verify_checkpoint(path / "second")
    # Somebody without this package.
    plain, *_ = deepspeed.initialize(
        model=(model := tiny_llama(seed=1)),
        model_parameters=model.parameters(),
        config=ds_config(2),
    )
    plain.load_checkpoint(folder)
    return {
        "latest": [latest, read_latest(folder)],
        "beside": sorted(entry.name for entry in path.iterdir()),
        "files": {name: record.rank for name, record in manifest.files.items()},
        "facts": {k: v for k, v in manifest.facts.items() if k in ("layout", "model_of_rank")},
        "models": len(manifest.facts["models"]),
        "head": manifest.facts["models"][0]["lm_head.weight"],
        "plain DeepSpeed": is_unchanged(plain, weights_of(trainer.engine)),
        "ranks disagree": outcome(
            trainer.engine.save_checkpoint, folder, tag=f"of_rank_{os.environ['RANK']}"
        ),
        "no folder": outcome(trainer.engine.save_checkpoint, ""),
        "bad tag": outcome(trainer.engine.save_checkpoint, folder, tag="../up"),
    }


def damaged(folder, trainer):
    """Each damage to the newest checkpoint: when asked for it by its tag, and when not."""
    found = {}
    before = weights_of(trainer.engine)
    for name, damage in DAMAGE.items():
        file = WEIGHTS if name == "missing" else OPTIMIZER_SHARD
        copy = copy_of(folder, f"damaged {name}")
        on_rank_0(lambda copy=copy, file=file, damage=damage: damage(copy / "second" / file))
        by_tag = outcome(trainer.engine.load_checkpoint, copy, tag="second")
        untouched = is_unchanged(trainer.engine, before)
        latest = outcome(Trainer(ds_config(2, PAPER)).engine.load_checkpoint, copy)
        found[name] = [by_tag, untouched, latest]
    return found


def missing(folder, trainer):
    load = trainer.engine.load_checkpoint
    no_latest = copy_of(folder, "no latest")
    on_rank_0((no_latest / "latest").unlink)
    all_bad = copy_of(folder, "all bad")
    for tag in ("first", "second"):
        on_rank_0(lambda tag=tag: flip_four_bytes(all_bad / tag / WEIGHTS))
    before = weights_of(trainer.engine)
    return {
        "no latest": outcome(Trainer(ds_config(2, PAPER)).engine.load_checkpoint, no_latest),
        "all bad": outcome(load, all_bad),
        "no such tag": outcome(load, folder, tag="third"),
        "nothing there": outcome(load, folder.with_name("nothing")),
        "untouched": is_unchanged(trainer.engine, before),
    }


def wider_llama():
    from transformers import LlamaForCausalLM

    config = tiny_llama().config
    config.intermediate_size = 640
    return LlamaForCausalLM(config)


def deeper_llama():
    from transformers import LlamaForCausalLM

    config = tiny_llama().config
    config.num_hidden_layers = 3
    return LlamaForCausalLM(config)


def frozen_llama():
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    return model


def of_another_run(folder):
    """Loading what belongs to another run, in whole and, where it matters, only the weights."""
    found = {}
    runs = {
        "recipe": (ds_config(2, ANOTHER), tiny_llama),
        "recipe, warn": (ds_config(2, {**ANOTHER, "on_mismatch": "warn"}), tiny_llama),
        "execution keys": (ds_config(2, {**PAPER, "on_mismatch": "warn"}), tiny_llama),
        "states": (ds_config(2, {**PAPER, "optimizer_states": {"exp_avg": "e4m3"}}), tiny_llama),
        "no states": (ds_config(2, {**PAPER, "optimizer_states": None}), tiny_llama),
        "stage": (ds_config(1, PAPER), tiny_llama),
        "width": (ds_config(2, PAPER), wider_llama),
        "depth": (ds_config(2, PAPER), deeper_llama),
        "frozen": (ds_config(2, PAPER), frozen_llama),
    }
    for name, (config, make_model) in runs.items():
        engine = Trainer(config, model=make_model()).engine
        before = weights_of(engine)
        whole = outcome(engine.load_checkpoint, folder)
        untouched = is_unchanged(engine, before)
        weights = outcome(engine.load_checkpoint, folder, load_module_only=True)
        found[name] = [whole, untouched, weights]
    return found


def without_a_manifest(folder):
    """What plain DeepSpeed, or an older release of this package, has left."""
    trainer = Trainer(ds_config(2, PAPER))
    copy = copy_of(folder, "without manifest")
    on_rank_0((copy / "second" / CHECKPOINT_NAME).unlink)
    loaded = outcome(trainer.engine.load_checkpoint, copy)
    before = weights_of(trainer.engine)
    on_rank_0(lambda: DAMAGE["truncated"](copy / "second" / OPTIMIZER_SHARD))
    cut = outcome(trainer.engine.load_checkpoint, copy, tag="second")
    return {"whole": loaded, "cut off": cut, "untouched": is_unchanged(trainer.engine, before)}


def a_rank_that_cannot_load(folder, stage):
    """DeepSpeed fails to load on rank 1 only, after everything was verified."""
    engine = Trainer(ds_config(stage, PAPER)).engine
    if os.environ["RANK"] == "1":

        def fail(*args, **kwargs):
            raise RuntimeError("out of memory")

        engine.checkpoint_engine.load = fail
    return outcome(engine.load_checkpoint, folder)


def zero3_weights(folder):
    """Which weights ZeRO-3 takes without optimizer states is not for the tag to say."""
    trainer = Trainer(ds_config(3, PAPER))
    trainer.train(1)
    for tag in ("first", "second"):
        trainer.engine.save_checkpoint(folder, tag=tag)
    load = Trainer(ds_config(3, PAPER)).engine.load_checkpoint
    return {
        "first": outcome(load, folder, tag="first", load_optimizer_states=False),
        "second": outcome(load, folder, tag="second", load_optimizer_states=False),
    }


def pipeline(folder):
    """Two stages, each with parameters of its own."""
    from deepspeed.pipe import PipelineModule
    from torch import nn

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.float(), target.flatten() % 32)

    def build(seed):
        torch.manual_seed(seed)
        layers = [nn.Embedding(HIDDEN, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)]
        layers += [nn.Flatten(0, 1)]
        model = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
        return Trainer(ds_config(1, PAPER, accumulation=2), model=model).engine

    def train(engine, first):
        tokens = [batch(first + index, rank=0) for index in range(4)]
        data = iter([(one, one) for one in tokens])
        return [engine.train_batch(data).item() for _ in range(2)]

    first = build(0)
    train(first, 0)
    first.save_checkpoint(folder)
    continued = train(first, 4)
    second = build(1)
    second.load_checkpoint(folder)
    manifest = Manifest.read(Path(folder) / read_latest(folder))
    return {
        "resumed": train(second, 4) == continued,
        "models": [sorted(model) for model in manifest.facts["models"]],
        "layout": manifest.facts["layout"],
    }


def tensor_parallel(folder):
    """AutoTP: the ranks hold shards of one model. It leaves process groups behind: to be last."""
    config = ds_config(1, PAPER, tensor_parallel={"autotp_size": 2})
    first = Trainer(config)
    first.step(batch(0, rank=0))
    first.engine.save_checkpoint(folder)
    continued = first.step(batch(1, rank=0))
    second = Trainer(config, model=tiny_llama(seed=1))
    loaded = outcome(second.engine.load_checkpoint, folder)
    manifest = Manifest.read(Path(folder) / read_latest(folder))
    return {
        "loaded": loaded,
        "resumed": second.step(batch(1, rank=0)) == continued,
        "layout": manifest.facts["layout"],
    }


def two_ranks(folder, stages):
    initialize_distributed()
    root = Path(folder)
    found = {"resumption": resumption(root, stages)}
    found["saved"] = what_is_saved(root / "saved")
    trainer = Trainer(ds_config(2, PAPER))
    found["damaged"] = damaged(root / "saved", trainer)
    found["missing"] = missing(root / "saved", trainer)
    trainer.close()
    found["another run"] = of_another_run(root / "saved")
    found["no manifest"] = without_a_manifest(root / "saved")
    found["zero3 weights"] = zero3_weights(root / "weights3")
    found["one rank"] = [
        a_rank_that_cannot_load(root / "saved", 2),
        a_rank_that_cannot_load(root / "weights3", 3),
    ]
    found["pipeline"] = pipeline(root / "pipeline")
    found["tensor parallel"] = tensor_parallel(root / "tensor parallel")
    return found


def to_universal(folder, tag):
    """DeepSpeed's conversion to a format for any number of ranks."""
    from deepspeed.checkpoint import ds_to_universal

    converted = f"{tag}_universal"
    arguments = ["--input_folder", str(folder / tag), "--output_folder", str(folder / converted)]
    arguments += ["--inject_missing_state", "--num_extract_workers", "1"]
    with unittest.mock.patch.object(sys, "argv", ["ds_to_universal", *arguments]):
        ds_to_universal.main(ds_to_universal.parse_arguments())
    return converted


def one_rank(folder):
    """What two ranks have saved is not for one, but its weights are, and all of it converted."""
    initialize_distributed()
    root = Path(folder) / "saved"
    engine = Trainer(ds_config(2, PAPER)).engine
    before = weights_of(engine)
    whole = outcome(engine.load_checkpoint, root)
    untouched = is_unchanged(engine, before)
    weights = outcome(engine.load_checkpoint, root, load_module_only=True)
    changed = weights_of(engine)
    universal = ds_config(2, PAPER, checkpoint={"load_universal": True})
    again = Trainer(universal, model=tiny_llama(seed=1)).engine
    converted = outcome(again.load_checkpoint, root, tag=to_universal(root, "second"))
    return {
        "whole": whole,
        "untouched": untouched,
        "weights": weights,
        "changed": not is_unchanged(engine, before),
        "universal": [converted, is_unchanged(again, changed)],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def sound_stages():
    return [stage for stage in STAGES if stage or sound(["zero0 checkpoint"])]


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(two_ranks, str(folder), sound_stages(), timeout_s=240, warm="deepspeed")


def errors(ranks, *keys):
    """The error that every rank has under `keys`: the same, which is asserted."""
    for key in keys:
        ranks = [one[key] for one in ranks]
    messages = {one["error"] for one in ranks}
    assert len(messages) == 1, messages
    return messages.pop()


@pytest.mark.parametrize("stage", sound_stages())
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(ranks, stage):
    for one in ranks:
        assert one["resumption"][str(stage)] == {
            "random": True,
            "losses": True,
            "weights": True,
            "client state": [1, "two"],
        }


def test_a_checkpoint_is_complete_and_nothing_else_is_left(ranks):
    for one in ranks:
        saved = one["saved"]
        assert saved["latest"] == ["first", "second"]
        scripts = [name for name in saved["beside"] if name.startswith("zero_to_")]
        assert saved["beside"] == sorted(["first", "latest", "second", *scripts])
        assert "zero_to_fp32.py" in scripts
        assert saved["files"] == {
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": 0,
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": 1,
            "fp4_manifest.json": 0,
            "fp4_rng_rank_00000.safetensors": 0,
            "fp4_rng_rank_00001.safetensors": 1,
            "mp_rank_00_model_states.pt": 0,
            "offloaded_tensors/exp_avg.swp": 0,
            "offloaded_tensors/exp_avg_sq.swp": 1,
        }
        assert saved["models"] == 1 and saved["facts"]["model_of_rank"] == {"0": 0, "1": 0}
        assert saved["head"] == [[HIDDEN, HIDDEN], "bfloat16", True]
        assert saved["facts"]["layout"] == {
            "world_size": 2,
            "data_parallel_size": 2,
            "zero_stage": 2,
            "tensor_parallel_size": 1,
            "pipeline_stages": 1,
            "partitioned_optimizer": True,
        }
        assert saved["plain DeepSpeed"]


def test_a_save_that_makes_no_sense_is_refused(ranks):
    disagree = errors(ranks, "saved", "ranks disagree")
    assert "do not agree on the tag of the checkpoint: 'of_rank_0' on rank 0; 'of_rank_1'" in (
        disagree
    )
    assert "save_dir is ''" in errors(ranks, "saved", "no folder")
    assert "'../up' is no tag for a checkpoint" in errors(ranks, "saved", "bad tag")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_tag_and_avoided_without(ranks, name):
    for one in ranks:
        by_tag, untouched, latest = one["damaged"][name]
        file = WEIGHTS if name == "missing" else OPTIMIZER_SHARD
        assert re.search(f"CheckpointError: .*second/{file} is damaged", by_tag["error"])
        assert "the last good one is tag='first'" in by_tag["error"]
        assert untouched
        assert latest["error"] is None and latest["loaded"] == "first"
    warnings = "\n".join(ranks[0]["damaged"][name][2]["warnings"])
    assert "THE LATEST CHECKPOINT IS NOT USED" in warnings and "second" in warnings
    assert "Loading the last good one instead" in warnings and "first" in warnings
    # Sizes are looked at by every rank, content is read by one of them.
    readers = re.search("on rank ([0-9, ]+):", ranks[0]["damaged"][name][0]["error"])[1]
    assert len(readers) == (1 if name == "four flipped bytes" else len("0, 1"))


def test_without_latest_the_last_good_one_is_loaded(ranks):
    for one in ranks:
        assert one["missing"]["no latest"]["loaded"] == "second"
        assert one["missing"]["nothing there"] == {"error": None, "loaded": None, "warnings": []}
        assert one["missing"]["untouched"]
    assert "'latest' is missing" in ranks[0]["missing"]["no latest"]["warnings"][0]
    assert "is damaged" in errors(ranks, "missing", "all bad")
    assert "no other checkpoint in" in errors(ranks, "missing", "all bad")
    assert "there is no checkpoint" in errors(ranks, "missing", "no such tag")
    assert "the last good one is tag='second'" in errors(ranks, "missing", "no such tag")


def test_another_recipe_is_refused_by_the_key_that_differs(ranks):
    for one in ranks:
        whole, untouched, weights = one["another run"]["recipe"]
        assert '"linear.weight.estimator.name": "dge" in the checkpoint, "ste"' in whole["error"]
        assert '"on_mismatch": "warn"' in whole["error"] and untouched
        assert weights == {"error": None, "loaded": "second", "warnings": []}
        whole, _, _ = one["another run"]["recipe, warn"]
        assert whole["error"] is None and whole["loaded"] == "second"
        whole, _, _ = one["another run"]["execution keys"]
        assert whole == {"error": None, "loaded": "second", "warnings": []}
        for name in ("states", "no states"):
            whole, _, _ = one["another run"][name]
            assert (whole["error"], whole["loaded"]) == (None, "second")
    for name, now in (("states", "e4m3 and fp16_sqrt"), ("no states", "float32")):
        (warned,) = ranks[0]["another run"][name][0]["warnings"]
        assert f"kept as fp16 and fp16_sqrt go on as {now}" in warned
    warned = ranks[0]["another run"]["recipe, warn"][0]["warnings"]
    assert "linear.weight.estimator.name" in warned[0]


def test_another_model_is_refused_by_its_first_parameter(ranks):
    for one in ranks:
        for name, said in {
            "width": "'model.layers.0.mlp.gate_proj.weight' has shape [512, 256] in it, [640, 256]",
            "depth": "only this model has a parameter 'model.layers.2.self_attn.q_proj.weight'",
        }.items():
            whole, untouched, weights = one["another run"][name]
            assert said in whole["error"] and said in weights["error"] and untouched
        whole, untouched, weights = one["another run"]["frozen"]
        said = "'model.layers.0.mlp.up_proj.weight' has trainable True in it, False"
        assert said in whole["error"] and untouched
        assert "freeze it after loading" in weights["error"]


def test_another_zero_stage_is_refused_with_the_way_out(ranks):
    for one in ranks:
        whole, untouched, weights = one["another run"]["stage"]
        assert "zero_stage: 2 in the checkpoint, 1 here" in whole["error"] and untouched
        assert "ds_to_universal" in whole["error"] and "load_universal" in whole["error"]
        assert weights["loaded"] == "second"


def test_another_world_size_is_refused_with_a_way_out_that_works(ranks, folder):
    (found,) = run_ranks(one_rank, str(folder), num_ranks=1, warm="deepspeed")
    error = found["whole"]["error"]
    assert "world_size: 2 in the checkpoint, 1 here" in error and "ds_to_universal" in error
    assert found["untouched"]
    assert found["weights"]["loaded"] == "second" and found["changed"]
    loaded, same_weights = found["universal"]
    assert loaded["error"] is None and loaded["loaded"] == "second_universal" and same_weights
    assert "loaded unverified" in loaded["warnings"][0]


def test_a_checkpoint_without_checksums_is_loaded_with_a_warning(ranks):
    for one in ranks:
        assert one["no manifest"]["whole"]["loaded"] == "second"
        assert one["no manifest"]["untouched"]
    (warning,) = ranks[0]["no manifest"]["whole"]["warnings"]
    assert "cannot be verified" in warning
    assert ranks[1]["no manifest"]["whole"]["warnings"] == []
    assert f"{OPTIMIZER_SHARD} is damaged: cut off" in errors(ranks, "no manifest", "cut off")


@pytest.mark.parametrize("index", [0, 1], ids=["zero2", "zero3"])
def test_one_rank_that_cannot_load_stops_all(ranks, index):
    error = errors(ranks, "one rank", index)
    assert error.startswith("CheckpointError: on rank 1: DeepSpeed could not load")
    assert "out of memory" in error and "build a new one" in error


def test_zero3_takes_weights_alone_only_from_the_latest(ranks):
    error = errors(ranks, "zero3 weights", "first")
    assert "only from the tag that 'latest' names, which is 'second', not 'first'" in error
    assert [one["zero3 weights"]["second"]["loaded"] for one in ranks] == ["second"] * 2


def test_pipeline_stages_have_a_model_each(ranks):
    for one in ranks:
        assert one["pipeline"]["resumed"]
        assert one["pipeline"]["layout"]["pipeline_stages"] == 2
        assert one["pipeline"]["models"] == [
            ["0.weight", "1.bias", "1.weight"],
            ["3.bias", "3.weight"],
        ]


def test_tensor_parallel_shards_resume(ranks):
    for one in ranks:
        assert one["tensor parallel"]["loaded"]["error"] is None
        assert one["tensor parallel"]["layout"]["tensor_parallel_size"] == 2
        assert one["tensor parallel"]["resumed"]


class DecoupledCheckpointEngine:
    """Stands for DeepSpeed's engines that write in the background; they need compiled operators."""


class EngineOfAnotherWriter:
    checkpoint_engine = DecoupledCheckpointEngine()
    global_rank, global_steps = 0, 7

    def __init__(self):
        self.calls = []

    def save_checkpoint(self, save_dir, tag=None, save_latest=True):
        self.calls.append((save_dir, tag, save_latest))
        return True

    def load_checkpoint(self, load_dir, tag=None):
        self.calls.append((load_dir, tag))
        return None, None


def test_checkpoints_that_deepspeed_writes_in_the_background_are_left_alone(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoints, "run_facts", lambda engine: {"steps": engine.global_steps})
    engine = EngineOfAnotherWriter()
    activation = unittest.mock.Mock(manifest=lambda **facts: facts)
    checkpoints.attach_checkpoints(engine, activation, None, (None,))
    assert "DecoupledCheckpointEngine writes checkpoints in its own time" in caplog.text
    assert engine.save_checkpoint(tmp_path, save_latest=False) is True
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.calls == [(tmp_path, None, False), (tmp_path, None)]
    assert json.loads((tmp_path / "global_step7" / "fp4_manifest.json").read_text()) == {"steps": 7}
