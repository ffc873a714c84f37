"""What every test gets: an offline, single-threaded CPU environment, a seed, poisoned memory.

The environment is set before torch and DeepSpeed are imported, hence at the top of this file; the
ranks and commands that tests spawn inherit it.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# No test may depend on a hub: what is not on disk must fail at once.
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_XDIST_WORKER:
    # A stale build lock in the user's own cache would hang the tests. Workers inherit the folder.
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="fp4-test-extensions-")

import numpy as np
import pytest
import torch
from torch.overrides import get_ignored_functions, get_testing_overrides
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]
# What uninitialised integers are filled with: no valid 4-bit code, and a huge number elsewhere.
POISON_BYTE = 0xEE

# These caches hold torch.empty itself; filled now, they never see the poisoning replacement below.
_device_constructors()
get_ignored_functions()
get_testing_overrides()


@functools.cache
def place_of(file: str) -> int:
    """When the test file (relative to the root) is run, by what it marks any of its tests with.

    0: ranks whose limits are seconds; 1: no ranks; 2: ranks whose limits are minutes.
    """
    text = (ROOT / file).read_text()
    if "mark.timed" in text:
        return 0
    return 2 if any(f"mark.{name}" in text for name in ("distributed", "deepspeed")) else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by place: xdist hands out files in this order."""
    items.sort(key=lambda item: place_of(str(item.path.relative_to(ROOT))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to workers, all those of place 0 to one of them.

    So a world whose limits are seconds runs beside files without ranks, which take longer than all
    of these worlds together; then both workers share the files whose worlds have minutes and may
    run two at a time. The groups that xdist offers for this do nothing together with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class TimedTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "timed" if place_of(file) == 0 else file

    return TimedTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_unconfigure() -> None:
    if not IS_XDIST_WORKER:
        shutil.rmtree(os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what torch.empty and its kin return, so that reading unwritten memory shows.

    Floating-point tensors hold NaN, integer tensors a byte that is no FP4 code. Only allocations
    made through these names are filled: those of the code under test, not torch's internal ones.
    """
    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ]:
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))
    yield


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            if tensor.dtype != torch.bool and not tensor.is_meta and tensor.is_contiguous():
                tensor.view(torch.uint8).fill_(POISON_BYTE) if tensor.dim() else tensor.fill_(-1)
        return tensor

    return allocate_poisoned
