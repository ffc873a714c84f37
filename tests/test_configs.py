"""The DeepSpeed configurations that are shipped train as they stand, on two ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.distributed import initialize_distributed, run_ranks
from tests.integrations.training import DECODER_LINEARS, Trainer, batch

FOLDER = Path(__file__).resolve().parents[1] / "configs/deepspeed"


def train_each():
    """Two steps with every file: {name: [losses, number of FP4 layers]}."""
    from fp4_plugin.linear import FP4Linear

    initialize_distributed()
    results = {}
    for path in sorted(FOLDER.glob("*.json")):
        trainer = Trainer(str(path))
        losses = [trainer.step(batch(step, rows=4)) for step in range(2)]
        count = sum(isinstance(module, FP4Linear) for module in trainer.engine.module.modules())
        results[path.stem] = [losses, count]
        trainer.close()
    return results


@pytest.mark.distributed
@pytest.mark.deepspeed
def test_every_config_trains_and_converts_what_its_recipe_says():
    for results in run_ranks(train_each, warm="deepspeed"):
        assert set(results) == {"zero0", "zero1", "zero2", "zero3", "zero2_bf16"}
        for name, (losses, num_fp4_layers) in results.items():
            assert all(map(math.isfinite, losses)), name
            assert num_fp4_layers == (0 if name.endswith("bf16") else DECODER_LINEARS), name
