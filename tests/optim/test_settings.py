"""What FP16StateAdamW takes, and what it says about the rest."""

from __future__ import annotations

import pytest
import torch

from fp4_plugin.errors import ConfigError, Fp4Error
from fp4_plugin.optim import FP16StateAdamW


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exp_avg": "fp8"}, r"exp_avg='fp8': allowed are \['fp16', 'e4m3'\]"),
        ({"exp_avg_sq": "fp16"}, r"exp_avg_sq='fp16': allowed are \['fp16_sqrt'\]"),
        ({"master_weights": "bf16"}, r"master_weights='bf16': allowed are \['fp32', 'fp16'\]"),
        ({"checkpoint": "small"}, r"checkpoint='small': allowed are \['portable', 'native'\]"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas=\(-0.1, 0.9\)"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\)"),
        ({"amsgrad": True}, "amsgrad=True.*torch.optim.AdamW"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(options, words):
    with pytest.raises(ConfigError, match=words):
        FP16StateAdamW([parameter()], **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_another_type_is_refused_by_type_and_shape(dtype):
    with pytest.raises(ConfigError, match=rf"shape \(4,\) is {dtype}.*float32.*bfloat16.*float16"):
        FP16StateAdamW([parameter(dtype)])


def test_a_float32_parameter_has_no_fp16_master():
    with pytest.raises(ConfigError, match="master_weights='fp16', but .*float32"):
        FP16StateAdamW([parameter()], master_weights="fp16")


def test_a_sparse_gradient_is_refused_with_the_way_out():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = FP16StateAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse gradient.*sparse=False.*SparseAdam"):
        optimizer.step()


def test_groups_are_checked_when_they_are_added_and_a_bad_one_is_not_kept():
    optimizer = FP16StateAdamW([parameter()])
    with pytest.raises(ConfigError, match="exp_avg='fp4'"):
        optimizer.add_param_group({"params": [parameter()], "exp_avg": "fp4"})
    with pytest.raises(ConfigError, match="torch.float64"):
        optimizer.add_param_group({"params": [parameter(torch.float64)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [parameter()], "exp_avg": "e4m3", "lr": 0.5})
    group = optimizer.param_groups[1]
    assert (group["exp_avg"], group["exp_avg_sq"], group["lr"]) == ("e4m3", "fp16_sqrt", 0.5)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(4)
    optimizer.step()
    states = [optimizer.state[group["params"][0]] for group in optimizer.param_groups]
    assert [state["exp_avg"].dtype for state in states] == [torch.float16, torch.float8_e4m3fn]


def test_errors_are_those_of_the_package_and_value_errors():
    assert issubclass(ConfigError, Fp4Error)
    assert issubclass(ConfigError, ValueError)


def test_named_parameters_are_taken():
    layer = torch.nn.Linear(3, 2)
    optimizer = FP16StateAdamW(layer.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(saved)


def test_states_have_the_names_shapes_and_types_that_frameworks_rely_on():
    param = torch.nn.Parameter(torch.ones(3, 700, dtype=torch.bfloat16))
    optimizer = FP16StateAdamW([param], exp_avg="e4m3", master_weights="fp16")
    param.grad = torch.ones_like(param)
    optimizer.step()
    found = {
        name: (tuple(value.shape), value.dtype) for name, value in optimizer.state[param].items()
    }
    assert found == {
        "step": ((), torch.float32),
        "exp_avg": ((3, 700), torch.float8_e4m3fn),
        "exp_avg_scale": ((3,), torch.float32),
        "exp_avg_sq": ((3, 700), torch.float16),
        "exp_avg_sq_scale": ((3,), torch.float32),
        "master": ((3, 700), torch.float16),
        "master_scale": ((3,), torch.float32),
    }
