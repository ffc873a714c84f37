"""The states of the random generators of one process, as plain tensors and JSON.

torch on the CPU and on one device, NumPy's global generator and Python's: what dropout, data
loaders and augmentation draw from. Loading runs no code: there is no pickle in the file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from fp4_plugin.checkpoint.files import write_safetensors
from fp4_plugin.errors import CheckpointError

__all__ = ["restore_rng", "save_rng"]

_TORCH, _DEVICE, _NUMPY, _PYTHON = "torch_cpu", "torch_device", "numpy_keys", "python_words"
_RECORD = "generators"


def save_rng(path: Path, device: torch.device | None = None) -> None:
    """Write the states to the safetensors file `path`, that of `device` too unless it is the CPU.

    Raises CheckpointError.
    """
    version, words, gauss = random.getstate()
    tensors = {
        _TORCH: torch.get_rng_state(),
        _PYTHON: torch.tensor(words, dtype=torch.int64),
    }
    record: dict[str, Any] = {"python": {"version": version, "gauss": gauss}}
    if device is not None and device.type != "cpu":
        tensors[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
        record["device"] = device.type
    numpy_state = _numpy_state()
    if numpy_state is not None:
        tensors[_NUMPY] = torch.from_numpy(numpy_state.pop("keys").astype("int64"))
        record["numpy"] = numpy_state
    write_safetensors(path, tensors, {_RECORD: json.dumps(record)})


def _numpy_state() -> dict[str, Any] | None:
    """None if the global generator is not the usual Mersenne twister."""
    import numpy as np

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    if name != "MT19937":
        return None
    return {"keys": keys, "pos": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}


def restore_rng(path: Path, device: torch.device | None = None) -> None:
    """Set the generators to what `save_rng` wrote to `path`.

    A state of another kind of device is left alone. Raises CheckpointError for a file that cannot
    be read; no generator has changed then.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()[_RECORD])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        python = record["python"]
        words = tuple(tensors[_PYTHON].tolist())
        torch_state = tensors[_TORCH]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the random states in {path}: {error}") from error
    random.setstate((python["version"], words, python["gauss"]))
    torch.set_rng_state(torch_state)
    if _NUMPY in tensors:
        _set_numpy_state(tensors[_NUMPY], record["numpy"])
    if device is not None and record.get("device") == device.type:
        torch.get_device_module(device).set_rng_state(tensors[_DEVICE], device)


def _set_numpy_state(keys: torch.Tensor, rest: dict[str, Any]) -> None:
    import numpy as np

    keys_u32 = keys.numpy().astype("uint32")
    np.random.set_state(("MT19937", keys_u32, rest["pos"], rest["has_gauss"], rest["gauss"]))
