"""FP8 gradient communication beside pipelines, expert groups and Ulysses.

Four ranks: every layout has two ranks to reduce gradients over.
"""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from torch import nn

from tests.distributed import initialize_distributed, run_ranks
from tests.integrations.training import (
    Trainer,
    batch,
    ds_config,
    skip_if_broken_upstream,
    sound,
    tiny_llama,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 8
HIDDEN, VOCABULARY = 64, 128
UPDATE = 0.08
# Every reduction in FP8, however small these models are.
FP8 = {"recipe": "bf16", "gradient_communication": {"min_numel": 64, "block_size": 256}}
# Large steps: what is compared are BF16 weights, whose rounding must not decide.
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
EXACT = {"recipe": "bf16", "gradient_communication": None}


def rank():
    return int(os.environ["RANK"])


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def checksum(parameters):
    return [zlib.crc32(p.detach().float().numpy().tobytes()) for p in parameters]


def compared(train):
    """Train exactly and in FP8; what the FP8 run reports, and how far its update is off."""
    exact_before, exact, _ = train(EXACT)
    _, rounded, observed = train(FP8)
    moved = (exact - exact_before).norm()
    return {**observed, "update": ((rounded - exact).norm() / moved).item()}


def report_of(engine):
    report = engine.fp4.manifest()["gradient_communication"]
    return {
        key: report.get(key)
        for key in ("calls", "exact_calls", "exact_float_sums_of_process", "wire_ratio")
    }


def pipeline_layers():
    from deepspeed.pipe import TiedLayerSpec

    def as_head(module, x):
        return nn.functional.linear(x, module.weight)

    embedding = {"num_embeddings": VOCABULARY, "embedding_dim": HIDDEN}
    return [
        TiedLayerSpec("words", nn.Embedding, **embedding),
        nn.Linear(HIDDEN, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN),
        TiedLayerSpec("words", nn.Embedding, forward_fn=as_head, **embedding),
    ]


def loss_of(output, target):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten() % VOCABULARY)


def pipeline(stage, **sections):
    from deepspeed.pipe import PipelineModule

    def train(fp4):
        torch.manual_seed(0)
        model = PipelineModule(
            pipeline_layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform"
        )
        trainer = Trainer(
            ds_config(stage, fp4, accumulation=2, optimizer=ADAM, **sections), model=model
        )
        engine = trainer.engine
        before = flat(engine.module)
        data = iter([(one % VOCABULARY, one) for one in map(batch, range(2 * STEPS))])
        for _ in range(STEPS):
            engine.train_batch(data)
        tied = engine.module.tied_modules["words"].weight
        observed = {
            **report_of(engine),
            "tied": checksum([tied])[0],
            "stage": engine.stage_id,
            "model": checksum(engine.module.parameters()),
        }
        return before, flat(engine.module), observed

    return compared(train)


class Experts(nn.Module):
    """Embedding, two experts on two ranks each, and a head."""

    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_experts=2, ep_size=2, k=1, min_capacity=64)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        hidden, auxiliary, _ = self.moe(self.words(tokens % VOCABULARY))
        return loss_of(self.head(hidden), tokens) + 0.01 * auxiliary


def experts(stage):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    def train(fp4):
        import deepspeed

        torch.manual_seed(0)
        model = Experts()
        # Both replicas of an expert start equal, different experts do not.
        for index, expert in enumerate(model.moe.deepspeed_moe.experts.deepspeed_experts):
            torch.manual_seed(10 + 2 * (rank() % 2) + index)
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=0.1)
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups, config=ds_config(stage, fp4, optimizer=ADAM)
        )
        before = flat(engine.module)
        for step in range(STEPS):
            loss = engine(batch(step))
            engine.backward(loss)
            engine.step()
        named = dict(engine.module.named_parameters())
        observed = {
            **report_of(engine),
            "shared": checksum([p for n, p in named.items() if "experts" not in n]),
            "experts": checksum([p for n, p in named.items() if "experts" in n]),
        }
        return before, flat(engine.module), observed

    return compared(train)


def ulysses(stage):
    """Two ranks share a sequence; their groups are what is reduced over, in float32."""
    import deepspeed

    def train(fp4):
        engine, *_ = deepspeed.initialize(
            model=tiny_llama(), config=ds_config(stage, fp4), mesh_param=(2, 2)
        )
        before = flat(engine.module)
        for step in range(STEPS):
            tokens = batch(step, rank=rank() // 2)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        observed = {
            **report_of(engine),
            "sequence parallel": engine.sequence_parallel_size,
            "model": checksum(engine.module.parameters()),
        }
        return before, flat(engine.module), observed

    return compared(train)


# Each kind in processes of its own: DeepSpeed keeps the groups of an engine for good.
def all_pipelines():
    initialize_distributed()
    fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    layouts = {
        "pipeline zero0": (0, {}),
        "pipeline zero1": (1, {}),
        "pipeline BF16_Optimizer": (1, fp32),
    }
    return {name: pipeline(layouts[name][0], **layouts[name][1]) for name in sound(PIPELINES)}


def all_experts():
    initialize_distributed()
    return {name: experts(int(name[-1])) for name in sound(EXPERTS)}


def all_ulysses():
    initialize_distributed()
    return {f"ulysses zero{stage}": ulysses(stage) for stage in (1, 2)}


@pytest.fixture(scope="module")
def results():
    kinds = (all_pipelines, all_experts, all_ulysses)
    found = [run_ranks(kind, num_ranks=4, timeout_s=130, warm="deepspeed") for kind in kinds]
    return [
        {name: one for part in parts for name, one in part.items()}
        for parts in zip(*found, strict=True)
    ]


PIPELINES = ("pipeline zero0", "pipeline zero1", "pipeline BF16_Optimizer")
EXPERTS = ("experts zero0", "experts zero1", "experts zero2")
ULYSSES = ("ulysses zero1", "ulysses zero2")


def results_of(name, results):
    skip_if_broken_upstream(name)
    return [one[name] for one in results]


@pytest.mark.parametrize("name", (*PIPELINES, *EXPERTS, *ULYSSES))
def test_the_update_is_close_to_that_of_exact_reduction(results, name):
    for one in results_of(name, results):
        assert 0 < one["update"] <= UPDATE
        assert sum(one["calls"].values()) >= STEPS


@pytest.mark.parametrize("name", PIPELINES)
def test_tied_gradients_of_a_pipeline_stay_exact(results, name):
    of_ranks = results_of(name, results)
    for one in of_ranks:
        sums = one["exact_float_sums_of_process"]
        assert any(key.endswith("_exec_reduce_tied_grads") for key in sums), sums
        assert one["exact_calls"]["tied parameters"] == STEPS
    assert len({one["tied"] for one in of_ranks}) == 1


@pytest.mark.parametrize("name", PIPELINES)
def test_ranks_of_a_pipeline_stage_hold_the_same_bits(results, name):
    by_stage = {}
    for one in results_of(name, results):
        by_stage.setdefault(one["stage"], []).append(one["model"])
    assert [len(models) for models in by_stage.values()] == [2, 2]
    assert all(first == second for first, second in by_stage.values())


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_reduced_over_their_own_group(results, name):
    of_ranks = results_of(name, results)
    assert len({tuple(one["shared"]) for one in of_ranks}) == 1
    held = [tuple(one["experts"]) for one in of_ranks]
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert held[0] != held[1]


@pytest.mark.parametrize("name", ULYSSES)
def test_ranks_that_share_a_sequence_hold_the_same_bits(results, name):
    of_ranks = results_of(name, results)
    assert [one["sequence parallel"] for one in of_ranks] == [2] * 4
    assert len({tuple(one["model"]) for one in of_ranks}) == 1
