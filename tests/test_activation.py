"""Conversion and proof in plain torch, where models are copied, wrapped and compiled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from fp4_plugin import assert_active, convert_to_fp4
from fp4_plugin.activation import activation_of
from fp4_plugin.errors import MismatchError


def _model():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _train(model):
    model(torch.randn(4, 32)).square().mean().backward()


@pytest.mark.parametrize(
    "another",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), nn.Sequential],
    ids=["deepcopy", "copy", "pickle", "holder"],
)
def test_a_copy_or_a_holder_is_not_called_high_precision(another):
    model = another(convert_to_fp4(_model(), {}))
    _train(model)
    with pytest.raises(MismatchError, match="holds 2 FP4 layers") as error:
        assert_active(model)
    assert "high precision" not in str(error.value)


def test_a_copy_can_be_converted_itself():
    model = convert_to_fp4(copy.deepcopy(convert_to_fp4(_model(), {})), {})
    _train(model)
    assert_active(model)


# Dynamo itself looks at .grad of every tensor it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_the_model():
    model = convert_to_fp4(_model(), {})
    compiled = torch.compile(model, backend="eager")
    _train(compiled)
    assert_active(compiled)


def test_a_model_without_storage_can_be_converted_and_asked_for_shapes():
    with torch.device("meta"):
        model = convert_to_fp4(_model(), {})
        x = torch.randn(5, 32)
    model(x).sum().backward()
    assert model[0].weight.grad.shape == (64, 32)


@pytest.mark.parametrize("padding", [None, 2], ids=["whole", "padded"])
def test_evaluation_of_an_encoder_does_not_leave_fp4(padding):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = convert_to_fp4(nn.TransformerEncoder(layer, 2), {})
    x, mask = torch.randn(2, 5, 32), None
    if padding is not None:
        mask = torch.zeros(2, 5, dtype=torch.bool)
        mask[:, -padding:] = True
    trained = model(x, src_key_padding_mask=mask).detach()
    with torch.no_grad():
        evaluated = model.eval()(x, src_key_padding_mask=mask)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=1e-5)
    runs = activation_of(model).runs.values()
    assert [run.record.gemms["fprop"].calls for run in runs] == [2] * 4
