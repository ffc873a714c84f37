"""Memory of a real step: in a process of its own, from the kernel's record of its largest size.

python -m fp4_plugin.bench.optim.peak LABEL NUMEL TENSORS      prints two numbers of bytes
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import fp4_plugin
from fp4_plugin.bench.optim.contenders import CONTENDERS, Contender
from fp4_plugin.bench.optim.measure import WARMUP_REPEATS, StepMemory, owned_bytes, parameters

__all__ = ["measure_memory"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Resets the record of the largest size (proc(5)).
_RESET_PEAK = "5"
_SMALL_NUMEL = 4096
_TIMEOUT_S = 1800


def measure_memory(label: str, numel: int, tensors: int, threads: int) -> StepMemory | None:
    """Of the contender `label`; None where there is no /proc to ask, or the process fails."""
    if not _CLEAR_REFS.exists():
        return None
    package = str(Path(fp4_plugin.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    # Freed memory above this size goes back to the system at once, and is seen if taken again.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    command = [sys.executable, "-m", __spec__.name, label, str(numel), str(tensors)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    printed = result.stdout.split()
    if result.returncode != 0 or len(printed) < 2:
        return None
    return StepMemory(int(printed[-2]), int(printed[-1]))


def _main(label: str, numel: int, tensors: int) -> None:
    contender = next(one for one in CONTENDERS if one.label == label)
    _load_libraries(contender)
    params = parameters(numel, tensors, contender.dtype)
    gc.collect()
    start = _resident("VmRSS")
    optimizer = contender.make(params)
    for _ in range(WARMUP_REPEATS):
        optimizer.step()
    gc.collect()
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    before = _resident("VmRSS")
    optimizer.step()
    states = owned_bytes(optimizer, [])
    print(max(0, before - start - states), max(0, _resident("VmHWM") - before))


def _load_libraries(contender: Contender) -> None:
    """A first step loads and compiles much that is no memory of the optimizer's."""
    optimizer = contender.make(parameters(_SMALL_NUMEL, 1, contender.dtype))
    for _ in range(WARMUP_REPEATS):
        optimizer.step()


def _resident(field: str) -> int:
    """Bytes."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(f"{_STATUS} has no {field}")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
