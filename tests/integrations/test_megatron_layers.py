"""FP4 forms of Megatron's tensor-parallel linears: the same numbers on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import initialize_distributed, run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra 'megatron')")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

HIDDEN, FFN, TOKENS, BATCH = 256, 512, 16, 2
PAPER = {"recipe": "paper", "gradient_communication": None, "optimizer_states": None}
EXACT = {**PAPER, "tensor_parallel": {"exact": True}}
LOCAL = {**PAPER, "tensor_parallel": {"shared_scales": False}}
TENSOR_SCOPE = {**EXACT, "linear": {"input": {"outliers": {"scope": "tensor"}}}}
SECTIONS = {"shared": PAPER, "exact": EXACT, "local": LOCAL, "exact, tensor scope": TENSOR_SCOPE}


def group():
    """The tensor-parallel ranks of this one."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def mlp(sequence_parallel, bias=True, skip_bias_add=False, fusion=False):
    """Column, GELU, row: what Megatron's MLP is, without the rest of a model."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=group().size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    torch.manual_seed(3)

    def init(weight):
        torch.nn.init.normal_(weight, std=0.05)

    common = {"config": config, "init_method": init, "bias": bias, "skip_bias_add": skip_bias_add}
    # Without the Transformer's part that Megatron's layers look at.
    config.defer_embedding_wgrad_compute = False
    config._cpu_offloading_context = None

    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = ColumnParallelLinear(HIDDEN, FFN, gather_output=False, **common)
            self.fc2 = RowParallelLinear(FFN, HIDDEN, input_is_parallel=True, **common)

        def forward(self, x):
            hidden, added = self.fc1(x)
            hidden = hidden if added is None else hidden + added
            output, added = self.fc2(torch.nn.functional.gelu(hidden))
            return output if added is None else output + added

    model = MLP()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.25)
    if fusion:
        for layer in (model.fc1, model.fc2):
            layer.gradient_accumulation_fusion = True
            layer.weight.main_grad = torch.zeros_like(layer.weight)
    return model


def inputs():
    """(S, B, H) with outliers in a few channels, and a gradient of the same shape."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator)
    x[..., ::37] *= 12
    return x, torch.randn(TOKENS, BATCH, HIDDEN, generator=generator)


def one_step(section, sequence_parallel=False, **settings):
    """Output, input gradient and weight gradients of the whole, as nested lists."""
    from fp4_plugin.integrations.megatron.model import convert_megatron_model

    rank, ranks = group().rank(), group().size()
    model = mlp(sequence_parallel and ranks > 1, **settings)
    names = sorted(model.state_dict())
    activation = convert_megatron_model(model, section)
    assert sorted(model.state_dict()) == names
    x, grad = inputs()
    if sequence_parallel:
        x, grad = (t.chunk(ranks)[rank].contiguous() for t in (x, grad))
    x.requires_grad_(True)
    output = model(x)
    output.backward(grad)
    unproven = [report.name for report in activation.verify()]
    weights = [model.fc1.weight, model.fc2.weight]
    gradients = [w.main_grad if settings.get("fusion") else w.grad for w in weights]
    parts = [output.detach(), x.grad] if sequence_parallel else []
    whole = gathered(*parts, dim=0) if parts else [output.detach(), x.grad]
    whole += gathered(gradients[0], dim=0) + gathered(gradients[1], dim=1)
    residual = any("residual" in k for k in activation.runs["fc2"].record.gemms["fprop"].kernels)
    return {
        "values": [t.flatten().tolist() for t in whole],
        "unproven": unproven,
        "calls": [run.record.gemms[g].calls for run in activation.runs.values() for g in
                  ("fprop", "dgrad", "wgrad")],
        "kernels": residual,
    }  # fmt: skip


def gathering_values(section):
    """One step in which the input travels in high precision."""
    from fp4_plugin.integrations.megatron import layers

    plain = layers.can_gather
    layers.can_gather = lambda spec: False
    try:
        return one_step(section, sequence_parallel=True)
    finally:
        layers.can_gather = plain


def counting_gathered_bytes(run):
    """What `run` returns, with the bytes that this rank got by all-gathers into one tensor."""
    plain, sizes = torch.distributed.all_gather_into_tensor, []

    def counting(whole, part, *args, **kwargs):
        sizes.append(whole.nbytes)
        return plain(whole, part, *args, **kwargs)

    torch.distributed.all_gather_into_tensor = counting
    try:
        return {**run(), "gathered bytes": sum(sizes)}
    finally:
        torch.distributed.all_gather_into_tensor = plain


def gathered(*tensors, dim):
    result = []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(group().size())]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group())
        result.append(torch.cat(parts, dim=dim))
    return result


def everything():
    """By number of tensor-parallel ranks, in one world of four: starting Megatron takes longest."""
    from megatron.core import parallel_state

    initialize_distributed()
    # Megatron's mappings allocate there.
    torch.cuda.current_device = lambda: torch.device("cpu")
    found = {}
    for ranks in (1, 2, 4):
        parallel_state.initialize_model_parallel(ranks)
        found[str(ranks)] = with_each_section()
        parallel_state.destroy_model_parallel()
    return found


def with_each_section():
    results = {name: one_step(section) for name, section in SECTIONS.items()}
    results["sequence parallel"] = counting_gathered_bytes(
        lambda: one_step(PAPER, sequence_parallel=True)
    )
    results["sequence parallel, values"] = counting_gathered_bytes(lambda: gathering_values(PAPER))
    results["exact, sequence parallel"] = one_step(EXACT, sequence_parallel=True)
    results["no bias"] = one_step(PAPER, bias=False)
    results["skip_bias_add"] = one_step(PAPER, skip_bias_add=True)
    results["fusion"] = one_step(PAPER, fusion=True)
    return results


@pytest.fixture(scope="module")
def results():
    by_rank = run_ranks(everything, num_ranks=4, timeout_s=240, warm="megatron")
    assert all(one == by_rank[0] for one in by_rank)  # whole tensors: every rank says the same
    return {int(ranks): found for ranks, found in by_rank[0].items()}


def tensors(one):
    return [torch.tensor(values) for values in one["values"]]


def distance(some, others):
    """Largest relative Frobenius distance of the four tensors."""
    pairs = zip(tensors(some), tensors(others), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["shared", "sequence parallel"])
def test_shared_scales_make_numbers_independent_of_the_ranks(results, ranks, name):
    assert distance(results[ranks][name], results[1]["shared"]) < 1e-6
    # ... which is not so by itself.
    assert distance(results[ranks]["local"], results[1]["local"]) > 1e-2


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_travels_for_a_sequence_are_codes(results, ranks):
    """No bit changes; the row-parallel layer gathers outliers, which are the same bytes in both."""
    codes = results[ranks]["sequence parallel"]
    values = results[ranks]["sequence parallel, values"]
    assert codes["values"] == values["values"]
    tokens = TOKENS * BATCH
    # Per row: codes, scale, two thresholds, and column and value of what was clamped.
    entries = 2 * (HIDDEN - 1 - int(0.99 * HIDDEN))
    row = HIDDEN // 2 + 4 + 8 + 6 * entries
    saved = values["gathered bytes"] - codes["gathered bytes"]
    assert saved == tokens * (4 * HIDDEN - row)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["exact", "exact, sequence parallel", "exact, tensor scope"])
def test_exact_fprop_has_the_same_bits_on_any_number_of_ranks(results, ranks, name):
    reference = "exact, tensor scope" if "tensor scope" in name else "exact"
    output, expected = tensors(results[ranks][name])[0], tensors(results[1][reference])[0]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_gemm_runs_once_and_outliers_are_compensated(results, ranks):
    for name, one in results[ranks].items():
        assert one["calls"] == [1] * 6, name
        assert one["unproven"] == [], name
        assert one["kernels"], name


@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_and_fused_accumulation_change_no_number_of_their_own(results, ranks):
    shared = results[ranks]["shared"]
    assert distance(results[ranks]["skip_bias_add"], shared) < 1e-6
    assert results[ranks]["fusion"]["values"] == shared["values"]
    assert distance(results[ranks]["no bias"], shared) > 1e-3
