"""The export: plain transformers loads it, and a wrong tensor does not pass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp4_plugin.activation import convert_to_fp4
from fp4_plugin.errors import MismatchError
from fp4_plugin.pretrain.export import ExportCheck, check_export, export_model
from fp4_plugin.pretrain.presets import ModelPreset
from fp4_plugin.pretrain.tokenizer import ByteTokenizer
from fp4_plugin.pretrain.training import sequence_losses

CONFIG = ModelPreset("test", 32, 64, 2, 2, seq_len=16, vocab_size=320).llama_config()
SEQUENCES = torch.arange(34).view(2, 17)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()


@pytest.fixture
def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _loss(model):
    with torch.no_grad():
        return float(sequence_losses(model, SEQUENCES).mean())


def _export(folder, weights):
    export_model(folder, CONFIG, weights, ByteTokenizer())
    return folder


def test_plain_transformers_loads_the_same_bits_and_the_same_loss(tmp_path, model, weights):
    folder = _export(tmp_path / "export", weights)
    expected = ExportCheck(weights, SEQUENCES, _loss(model), None)
    assert check_export(folder, expected) == _loss(model)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.eos_token_id == ByteTokenizer.end_of_document
    ids = AutoTokenizer.from_pretrained(folder)("def ", return_tensors="pt")
    assert loaded.generate(**ids, max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_an_fp4_run_gets_its_loss_back_from_the_export_by_converting_it(tmp_path, model, weights):
    plain_loss = _loss(model)
    section = {"recipe": "paper"}
    trained_loss = _loss(convert_to_fp4(model, section))
    assert trained_loss != plain_loss
    folder = _export(tmp_path / "export", weights)
    expected = ExportCheck(weights, SEQUENCES, trained_loss, section)
    assert check_export(folder, expected) == plain_loss


def test_an_older_export_is_replaced(tmp_path, weights):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "stale.safetensors").write_text("old")
    _export(folder, weights)
    assert not (folder / "stale.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_weight_that_differs_in_one_bit_is_named(tmp_path, model, weights):
    folder = _export(tmp_path / "export", weights)
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(MismatchError, match=r"\['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        check_export(folder, ExportCheck(weights, SEQUENCES, _loss(model), None))


def test_a_loss_that_is_not_the_trained_one_is_refused(tmp_path, model, weights):
    folder = _export(tmp_path / "export", weights)
    with pytest.raises(MismatchError, match="has loss"):
        check_export(folder, ExportCheck(weights, SEQUENCES, 0.95 * _loss(model), None))
