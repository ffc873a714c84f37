"""Random generators go on after a restart as if there had been none."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fp4_plugin.checkpoint import restore_rng, save_rng
from fp4_plugin.errors import CheckpointError


def draw():
    return [
        *torch.rand(3).tolist(),
        *torch.randn(5).tolist(),
        *np.random.rand(3).tolist(),
        np.random.standard_normal(),  # one of a pair: the other one is part of the state
        random.random(),
        random.gauss(0, 1),
    ]


def test_every_generator_goes_on_where_it_was(tmp_path):
    draw()
    save_rng(tmp_path / "rng.safetensors")
    expected = draw()
    assert draw() != expected
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    restore_rng(tmp_path / "rng.safetensors", torch.device("cpu"))
    assert draw() == expected


def test_a_file_that_cannot_be_read_changes_no_generator(tmp_path):
    path = tmp_path / "rng.safetensors"
    save_rng(path)
    path.write_bytes(path.read_bytes()[:200])
    save_rng(tmp_path / "now.safetensors")
    expected = draw()
    restore_rng(tmp_path / "now.safetensors")
    for broken in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(CheckpointError, match=f"random states in .*{broken.name}"):
            restore_rng(broken)
    assert draw() == expected


class DeviceModule:
    """Stands for torch.cuda and its kin: one state per device."""

    def __init__(self, state):
        self.state = state

    def get_rng_state(self, device):
        return self.state

    def set_rng_state(self, state, device):
        self.state = state


def test_the_generator_of_the_device_is_kept_too(tmp_path, monkeypatch):
    device, path = torch.device("cuda", 0), tmp_path / "rng.safetensors"
    module = DeviceModule(torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch, "get_device_module", lambda asked: module)
    save_rng(path, device)
    saved, module.state = module.state, torch.zeros(16, dtype=torch.uint8)
    restore_rng(path)
    restore_rng(path, torch.device("xpu", 0))  # of another kind: left alone
    assert not module.state.any()
    restore_rng(path, device)
    assert torch.equal(module.state, saved)
