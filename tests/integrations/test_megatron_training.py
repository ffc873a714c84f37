"""FP8 gradients and 16-bit states in Megatron's own data parallelism, optimizers, checkpoints."""

from __future__ import annotations

import json
import tempfile
import types

import pytest
import torch

from fp4_plugin.comm import BlockCodec
from fp4_plugin.comm.spec import CommunicationSpec
from fp4_plugin.errors import ConfigError, MismatchError, UnsupportedError
from tests.distributed import initialize_distributed, run_ranks
from tests.megatron_on_cpu import Job, lay_out, on_cpu

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra 'megatron')")

pytestmark = [
    # Of megatron-core, when it is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

OFF = {"recipe": "paper", "gradient_communication": None, "optimizer_states": None}
GRADIENTS = {"recipe": "paper", "optimizer_states": None}
PAPER = {"recipe": "paper"}
E4M3 = {"recipe": "paper", "optimizer_states": {"exp_avg": "e4m3"}}
# More than one bucket, and parameters of several in each.
BUCKET = 100_000


def everything():
    """What one world of four ranks finds out, in all layouts: starting Megatron takes longest."""
    initialize_distributed()
    with on_cpu():
        return {
            "losses": losses(),
            "gradients": {str(tp): one_reduction(tp) for tp in (1, 2)},
            "copies": [different_copies(as_copies) for as_copies in (True, False)],
            "resumed": [resumed(distributed) for distributed in (False, True)],
            "manifest": manifest(),
            "refused": refused(),
        }


def losses():
    found = {}
    for tp in (1, 2):
        lay_out(tp)
        for distributed in (False, True):
            for name, section in (("off", OFF), ("paper", PAPER)):
                job = Job(section, tp, distributed)
                found[f"{name}, tp {tp}, distributed {distributed}"] = job.steps(range(3))
    lay_out(1)
    found["adamw"] = Job(None, 1).steps(range(3))
    for distributed in (False, True):
        for name, size in (("late", None), ("overlapped", 10**9), ("in parts", BUCKET)):
            job = Job(GRADIENTS, 1, distributed, size is not None, bucket_size=size)
            found[f"{name}, distributed {distributed}"] = job.steps(range(3))
        job = Job(GRADIENTS, 1, distributed, average=True)
        found[f"averaged, distributed {distributed}"] = job.steps(range(3))
    return found


def one_reduction(tp):
    """Gradients of the whole model after one backward pass: exact, all-reduced, scattered."""
    from megatron.core import parallel_state

    lay_out(tp)
    group = parallel_state.get_data_parallel_group()
    found = {}
    for name, section, distributed in (
        ("exact", OFF, False),
        ("all_reduce", GRADIENTS, False),
        ("reduce_scatter", GRADIENTS, True),
    ):
        job = Job(section, tp, distributed)
        with torch.no_grad():
            for parameter in job.ddp.parameters():
                parameter.main_grad.zero_()
        job.backward(0)
        buffer = job.ddp.buffers[0].grad_data.clone()
        if distributed:
            part = buffer.chunk(group.size())[group.rank()].contiguous()
            torch.distributed.all_gather_into_tensor(buffer, part, group=group)
        named = dict(job.ddp.module.named_parameters())
        offset = job.ddp.buffers[0].grad_data.storage_offset()
        found[name] = {
            key: buffer[p.main_grad.storage_offset() - offset :][: p.numel()].clone()
            for key, p in named.items()
        }
    exact = found.pop("exact")
    copied = [key for key in exact if not getattr(named[key], "tensor_model_parallel", False)]
    return {
        name: {
            "copies differ by": max(
                float((exact[key] - one[key]).abs().max() / exact[key].abs().max())
                for key in copied
            ),
            "decibel": min(
                float(20 * (exact[key].norm() / (exact[key] - one[key]).norm()).log10())
                for key in exact
                if key not in copied and float(exact[key].norm()) > 0
            ),
        }
        for name, one in found.items()
    }


def different_copies(as_copies):
    """Names of replicated parameters that two tensor-parallel ranks hold different bits of."""
    from megatron.core import parallel_state

    from fp4_plugin.integrations.megatron import gradients

    lay_out(2)
    plain = gradients._is_cut
    if not as_copies:
        gradients._is_cut = lambda parameter: True
    job = Job(PAPER, 2)
    gradients._is_cut = plain
    job.steps(range(2))
    group = parallel_state.get_tensor_model_parallel_group()
    names = []
    for name, parameter in job.ddp.module.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(parameter.data) for _ in range(group.size())]
            torch.distributed.all_gather(parts, parameter.data, group=group)
            if not torch.equal(*parts):
                names.append(name)
    return names


def shared_folder():
    folders = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folders)
    return folders[0]


def resumed(distributed):
    """Losses after a save: of the job that saved, of one that loaded, and of other layouts."""
    lay_out(2)
    folder = shared_folder()
    sharding = "fully_reshardable" if distributed else "dp_reshardable"
    job = Job(E4M3, 2, distributed, bf16=distributed)
    job.steps(range(2))
    job.save(folder, sharding)
    found = {"kept": job.steps(range(2, 4))}
    jobs = {"resumed": (E4M3, 2), "tp 1": (E4M3, 1), "tp 4": (E4M3, 4)}
    if not distributed:  # that of Megatron loads nothing into torch's AdamW
        jobs["adamw"] = ({**PAPER, "optimizer_states": None}, 2)
    for name, (section, tp) in jobs.items():
        lay_out(tp)
        other = Job(section, tp, distributed, bf16=distributed)
        other.load(folder, sharding)
        found[name] = other.steps(range(2, 4))
    return found


def manifest():
    lay_out(2)
    job = Job(E4M3, 2, True)
    job.step(0)
    return json.loads(json.dumps(job.activation.manifest(), default=str))


def refused():
    """What ranks are told whose sections differ, and who have no gradient in FP8 after a step."""
    from fp4_plugin.config import parse_section
    from fp4_plugin.integrations.megatron.job import MegatronJob

    lay_out(1)
    found = []
    section = OFF if torch.distributed.get_rank() == 1 else PAPER
    job = Job(PAPER)
    for attempt in (
        lambda: MegatronJob(parse_section(section)).built([], 1),
        lambda: MegatronJob(parse_section(OFF)).built([torch.nn.Linear(2, 2)], 1),
        job.activation.communication.verify,
    ):
        try:
            attempt()
            found.append("nothing")
        except (ConfigError, MismatchError) as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, num_ranks=4, timeout_s=240, warm="megatron")


distributed = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]


def close(some, others, relative):
    return all(abs(a - b) <= relative * b for a, b in zip(some, others, strict=True))


class TestRanks:
    pytestmark = distributed

    def test_losses_do_not_depend_on_the_layout(self, ranks):
        """Also those with FP8 gradients and 16-bit states, up to what these round."""
        found = ranks[0]["losses"]
        reference = found["off, tp 1, distributed False"]
        for name, losses in found.items():
            if name.startswith("off"):
                assert close(losses, reference, 1e-3), name
            elif name.startswith("paper"):
                assert losses[0] == pytest.approx(reference[0], rel=1e-6)
                assert close(losses, reference, 1e-2), name
                assert losses != reference
        assert close(reference, found["adamw"], 2e-2)
        assert found["adamw"][-1] < found["adamw"][0] - 0.05

    @pytest.mark.parametrize("distributed", [False, True])
    def test_overlapping_changes_no_bit(self, ranks, distributed):
        found = ranks[0]["losses"]
        late, overlapped, in_parts = (
            found[f"{name}, distributed {distributed}"]
            for name in ("late", "overlapped", "in parts")
        )
        assert overlapped == late
        assert in_parts != late  # blocks begin elsewhere
        assert close(in_parts, late, 1e-2)

    @pytest.mark.parametrize("distributed", [False, True])
    def test_who_divides_by_the_ranks_changes_no_bit(self, ranks, distributed):
        """Megatron before the collective, or the collective: four ranks, a power of two."""
        found = ranks[0]["losses"]
        averaged = found[f"averaged, distributed {distributed}"]
        assert averaged == found[f"late, distributed {distributed}"]

    @pytest.mark.parametrize("tp", ["1", "2"])
    def test_gradients_are_rounded_as_much_as_e4m3_does(self, ranks, tp):
        for rank in ranks:
            all_reduced, scattered = (
                rank["gradients"][tp][name] for name in ("all_reduce", "reduce_scatter")
            )
            assert 24 < all_reduced["decibel"] < 45
            assert 24 < scattered["decibel"] < 45
            if tp == "2":
                assert all_reduced["copies differ by"] < 1e-5
                assert scattered["copies differ by"] < 1e-5

    def test_copies_on_tensor_parallel_ranks_stay_copies(self, ranks):
        with_care, without = ranks[0]["copies"]
        assert with_care == []
        assert without != []  # ... which is not so by itself

    @pytest.mark.parametrize("distributed", [False, True])
    def test_a_resumed_job_is_the_same_job(self, ranks, distributed):
        found = ranks[0]["resumed"][distributed]
        assert found["resumed"] == found["kept"]

    @pytest.mark.parametrize("distributed", [False, True])
    def test_other_layouts_and_adamw_continue(self, ranks, distributed):
        found = dict(ranks[0]["resumed"][distributed])
        kept = found.pop("kept")
        assert len(found) == (3 if distributed else 4)
        for name, losses in found.items():
            assert losses[0] == pytest.approx(kept[0], rel=1e-3 if distributed else 1e-5), name
            assert close(losses, kept, 1e-2), name

    def test_the_manifest_says_what_ran(self, ranks):
        for rank in ranks:
            gradients = rank["manifest"]["gradient_communication"]
            assert gradients["state"] == "active"
            assert gradients["calls"] == {"reduce_scatter": 1}
            assert gradients["wire_ratio"] < 0.55
            assert "copied on tensor-parallel ranks" in gradients["exact_calls"]
            states = rank["manifest"]["optimizer_states"]
            assert states["state"] == "active"
            assert states["optimizers"][0]["bytes_per_parameter"] < 7.05

    def test_every_rank_is_told_what_is_wrong(self, ranks):
        for rank in ranks:
            different, without_layers, bypassed = rank["refused"]
            assert "the ranks do not agree" in different and "on rank 1" in different
            assert "no rank has a linear layer to convert" in without_layers
            assert "no gradient of the 4 data-parallel ranks went through it" in bypassed


@pytest.mark.parametrize(
    ("ddp", "spec", "said"),
    [
        ({"use_megatron_fsdp": True}, {}, "--use-megatron-fsdp"),
        ({"num_distributed_optimizer_instances": 2}, {}, "num_distributed_optimizer_instances = 2"),
        ({"reduce_scatter_with_fp32_accumulation": True}, {}, "fp32-accumulation replace the same"),
        ({}, {"error_feedback": True}, "gradient_communication.error_feedback keeps"),
        ({}, {"automatic_factor": True}, "gradient_communication.automatic_factor keeps"),
    ],
)
def test_what_excludes_fp8_gradients_is_named(ddp, spec, said):
    from fp4_plugin.integrations.megatron.gradients import refuse_conflicts

    spec = CommunicationSpec(BlockCodec(), **spec)
    refuse_conflicts(types.SimpleNamespace(), CommunicationSpec(BlockCodec()))
    with pytest.raises(UnsupportedError, match=said):
        refuse_conflicts(types.SimpleNamespace(**ddp), spec)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"master_weights": "fp16"}, "master weights itself"), ({"checkpoint": "native"}, "portable")],
)
def test_states_that_megatron_cannot_keep_are_refused(settings, said):
    from fp4_plugin.config import parse_section
    from fp4_plugin.integrations.megatron.optimizer import OptimizerStates

    asked = parse_section({"optimizer_states": settings}).optimizer_states
    with pytest.raises(ConfigError, match=said):
        OptimizerStates(None, asked)


class FusedAdam(torch.optim.Adam):
    """Stands for those of Transformer Engine and Apex, which are known by their name."""


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (FusedAdam, UnsupportedError, "FusedAdam, whose count of steps"),
        (torch.optim.SGD, ConfigError, "SGD, whose step may be another"),
    ],
)
def test_another_optimizer_is_refused_before_any_is_converted(kind, error, said):
    from fp4_plugin.config import parse_section
    from fp4_plugin.integrations.megatron.optimizer import OptimizerStates

    parameter = torch.nn.Parameter(torch.zeros(4))
    plain = torch.optim.AdamW([parameter])
    wrappers = [types.SimpleNamespace(optimizer=one) for one in (plain, kind([parameter], lr=1.0))]
    chain = types.SimpleNamespace(chained_optimizers=wrappers)
    with pytest.raises(error, match=said):
        OptimizerStates(chain, parse_section({"recipe": "paper"}).optimizer_states)
    assert type(plain) is torch.optim.AdamW


def test_states_that_somebody_else_keeps_are_noticed():
    from fp4_plugin.config import parse_section
    from fp4_plugin.integrations.megatron.optimizer import OptimizerStates

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))])
    asked = parse_section({"recipe": "paper"}).optimizer_states
    states = OptimizerStates(types.SimpleNamespace(optimizer=optimizer), asked)
    states.verify()
    optimizer.__class__ = torch.optim.AdamW
    with pytest.raises(MismatchError, match="AdamW steps now"):
        states.verify()
