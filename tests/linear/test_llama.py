"""The layers inside a real architecture: causality, gradients of every weight, reproducibility."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp4_plugin import convert_to_fp4
from fp4_plugin.core.outliers import clamp_outliers
from fp4_plugin.linear import FP4Linear

NUM_TOKENS = 24
VOCABULARY = 61


def llama(section: dict | None = None, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Two layers of width 256, wide enough that outliers are clamped in every row."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    return convert_to_fp4(model, section or {"recipe": "paper"})


def tokens(seed: int = 0, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, NUM_TOKENS), generator=generator)


def fp4_layers(model: LlamaForCausalLM) -> dict[str, FP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FP4Linear)}


def test_every_decoder_linear_is_converted_and_the_head_is_not() -> None:
    model = llama()
    assert len(fp4_layers(model)) == 2 * 7
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_future_tokens_change_no_bit_of_past_logits(dtype: torch.dtype) -> None:
    model = llama(dtype=dtype).eval()
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _module, inputs: seen.append(clamp_outliers(inputs[0], 0.99)[1].num_entries)
    )
    now, other = tokens(), tokens()
    other[:, 15:] = (other[:, 15:] + 17) % VOCABULARY
    with torch.no_grad():
        before, after = model(now).logits, model(other).logits
    assert min(seen) > 0  # something was clamped, so thresholds were at work
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.equal(before[:, 15:], after[:, 15:])


def test_tensor_wide_scales_are_not_causal() -> None:
    # The same check sees a recipe that lets tokens look at each other.
    model = llama({"recipe": "w4a4_tensor"}).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] *= 50
    now, other = tokens(), tokens()
    other[:, 15:] = 7
    with torch.no_grad():
        before, after = model(now).logits, model(other).logits
    assert not torch.equal(before[:, :15], after[:, :15])


def test_other_sequences_of_the_batch_change_no_bit() -> None:
    model = llama().eval()
    now, other = tokens(batch=3), tokens(batch=3)
    other[2] = (other[2] + 17) % VOCABULARY
    with torch.no_grad():
        before, after = model(now).logits, model(other).logits
    assert torch.equal(before[:2], after[:2])


def test_every_quantised_weight_gets_a_gradient_and_no_element_has_slope_zero() -> None:
    model = llama()
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    layers = fp4_layers(model)
    for name, layer in layers.items():
        gradient = layer.weight.grad
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        # Row maxima are where a slope of 0 would come from (amax * inv beyond 6).
        top = gradient.gather(1, layer.weight.abs().argmax(1, keepdim=True))
        assert (top != 0).float().mean() > 0.95, name
        assert (gradient != 0).float().mean() > 0.95, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_trainings_are_bit_equal(dtype: torch.dtype) -> None:
    states = []
    for _ in range(2):
        model = llama(dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            ids = tokens(seed=step)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# transformers 5.24 renames the method; older versions, which we support too, know only this name.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_bits(use_reentrant: bool) -> None:
    ids, gradients = tokens(), []
    for checkpointed in (False, True):
        model = llama().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            if use_reentrant:
                model.enable_input_require_grads()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_few_steps_learn_the_batch() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ids = tokens()
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_non_finite_weight_is_seen_in_the_loss_and_in_the_gradient_norm(bad: float) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = bad
    ids = tokens()
    loss = model(ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not loss.isfinite()
    assert not norm.isfinite()


def test_projections_of_one_input_share_its_codes() -> None:
    model = llama()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(tokens(), labels=tokens()).loss
    assert loss.requires_grad
    packed_rows = {
        tensor.untyped_storage().data_ptr()
        for tensor in kept
        if tensor.dtype == torch.uint8 and tensor.shape[0] == 2 * NUM_TOKENS
    }
    # A layer reads four tensors: q/k/v, o, gate/up, down.
    assert len(packed_rows) == 2 * 4
