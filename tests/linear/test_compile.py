"""torch.compile takes a converted model; FP4 layers run outside the graph, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4_plugin


# Dynamo itself looks at .grad of every tensor it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_gives_the_bits_of_the_eager_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 32))
    fp4_plugin.convert_to_fp4(model, {"recipe": "paper"})
    x = torch.randn(13, 256)
    eager = model(x)
    eager.square().sum().backward()
    eager_grad = model[0].weight.grad.clone()
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")(x)
    compiled.square().sum().backward()
    assert torch.equal(compiled, eager)
    assert torch.equal(model[0].weight.grad, eager_grad)
    fp4_plugin.assert_active(model)
