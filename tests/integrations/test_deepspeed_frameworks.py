"""Programs that call DeepSpeed themselves: the Hugging Face Trainer, Accelerate, the launcher."""

from __future__ import annotations

import json
import math
import sys

import pytest

from tests.distributed import free_port, initialize_distributed, run_command, run_ranks
from tests.integrations.training import (
    DECODER_LINEARS,
    batch,
    ds_config,
    gemm_calls,
    tiny_llama,
)

pytestmark = pytest.mark.deepspeed

PAPER = {"recipe": "paper"}
STEPS = 3
PER_RUN = dict.fromkeys(("fprop", "dgrad", "wgrad"), STEPS * DECODER_LINEARS)

# A program that knows nothing of FP4 (and compiles no shared-memory op, see tests/distributed.py).
SCRIPT = """
import argparse, json, os, sys, time
import deepspeed, torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
engine.backward(engine(torch.randn(8, 64, dtype=torch.bfloat16)).float().square().mean())
engine.step()
if deepspeed.comm.get_rank() == 0:
    layers = [module for module in model.modules() if hasattr(module, "fp4")]
    calls = [layer.fp4.record.gemms["fprop"].calls for layer in layers]
    print("RESULT", json.dumps({"calls": calls, "argv": sys.argv[1:]}), flush=True)
# gloo's teardown aborts the process now and then: leave without it, once both have arrived.
torch.distributed.barrier()
time.sleep(0.5)
sys.stdout.flush()
os._exit(0)
"""


def _trainers(folder):
    initialize_distributed()
    return {stage: _trainer(f"{folder}/{stage}", int(stage)) for stage in ("2", "3")}


def _trainer(folder, stage):
    from transformers import Trainer, TrainingArguments

    config = ds_config(stage, PAPER, micro_batch="auto")
    del config["optimizer"]  # the Trainer makes one and hands it to DeepSpeed
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config | {"zero_allow_untested_optimizer": True},
        per_device_train_batch_size=2,
        max_steps=STEPS,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = [row for step in range(2 * STEPS) for row in batch(step, rank=0)]
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "calls": gemm_calls(trainer.model_wrapped)}


def _accelerate():
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    initialize_distributed()
    plugin = DeepSpeedPlugin(hf_ds_config=ds_config(1, PAPER))
    accelerator = Accelerator(deepspeed_plugin=plugin)  # cpu=True would switch DeepSpeed off
    model = tiny_llama()
    loader = torch.utils.data.DataLoader(torch.cat([batch(0), batch(1)]), batch_size=2)
    engine, _, _ = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    losses = []
    for step in range(STEPS):
        loss = engine(input_ids=batch(step), labels=batch(step)).loss
        accelerator.backward(loss)
        losses.append(loss.item())
    return {"losses": losses, "calls": gemm_calls(engine)}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    return run_ranks(
        _trainers, str(tmp_path_factory.mktemp("trainer")), timeout_s=200, warm="deepspeed"
    )


def _assert_trained_in_fp4(result):
    assert result["calls"] == PER_RUN
    assert len(result["losses"]) == STEPS
    assert all(map(math.isfinite, result["losses"]))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_hugging_face_trainer_needs_one_import(trainers, stage):
    for one in trainers:
        _assert_trained_in_fp4(one[stage])


def test_accelerate_needs_one_import():
    for one in run_ranks(_accelerate, timeout_s=200, warm="deepspeed"):
        _assert_trained_in_fp4(one)


def test_the_launcher_runs_a_script_that_nobody_edits(tmp_path):
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps(ds_config(1, PAPER)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2"]
    command += [f"--master_port={free_port()}", "--module", "fp4_plugin.run", str(script)]
    (output,) = run_command([*command, f"--deepspeed_config={config}"], timeout_s=200)
    (line,) = [line for line in output.splitlines() if "RESULT" in line]
    result = json.loads(line.partition("RESULT ")[2])
    assert result["calls"] == [1, 1]
    assert result["argv"] == ["--local_rank=0", f"--deepspeed_config={config}"]
