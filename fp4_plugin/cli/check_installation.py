"""What is installed: versions, the wrong apex, build tools, stale build locks, disk space."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shlex
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from fp4_plugin.cli.check import Check, run_guarded
from fp4_plugin.integrations.fused_adam import wrong_apex_reason

__all__ = ["installation_checks"]

DISTRIBUTION = "fp4-plugin"
# What each is for. Which versions are supported is read from our own metadata.
PURPOSES = {
    "torch": "needed",
    "deepspeed": "needed to train with DeepSpeed",
    "transformers": "needed by fp4 pretrain and Hugging Face jobs",
    "accelerate": "needed by Hugging Face jobs",
    "megatron-core": "optional",
    "triton": "optional",
    "transformer-engine": "optional; never used by the FP4 layers",
}
# No extension of DeepSpeed takes this long to compile, even on a small machine.
STALE_LOCK_S = 30 * 60
GIB = 2**30
LITTLE_DISK_BYTES = 5 * GIB
NO_DISK_BYTES = GIB // 2
LITTLE_SHARED_MEMORY_BYTES = GIB


def installation_checks() -> list[Check]:
    return run_guarded(
        [
            ("versions", check_versions),
            ("apex", check_apex),
            ("build tools", check_build_tools),
            ("extension locks", check_extension_locks),
            ("disk", check_disk),
        ]
    )


def check_versions() -> list[Check]:
    requirements = _own_requirements()
    own = _version(DISTRIBUTION)
    if own:
        first = Check(DISTRIBUTION, "ok", own)
    else:
        detail = "runs from a source tree; without its metadata no version below can be judged"
        first = Check(DISTRIBUTION, "warn", detail, "pip install -e .")
    python = Check("python", "ok", f"{platform.python_version()} ({platform.machine()})")
    return [first, python, *(_check_version(name, requirements.get(name)) for name in PURPOSES)]


def _check_version(name: str, requirement: Requirement | None) -> Check:
    version = _version(name)
    extra = str(requirement.marker).split('"')[1] if requirement and requirement.marker else None
    install = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {name}"
    if version is None:
        purpose = PURPOSES[name]
        if purpose.startswith("optional"):
            return Check(name, "ok", f"not installed ({purpose})")
        return Check(name, "warn", f"not installed ({purpose})", install)
    if requirement and not requirement.specifier.contains(version, prereleases=True):
        detail = f"{version} is outside the supported range {requirement.specifier}"
        return Check(name, "warn", detail, f"pip install '{name}{requirement.specifier}'")
    return Check(name, "ok", version)


def _own_requirements() -> dict[str, Requirement]:
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_apex() -> list[Check]:
    """Tell NVIDIA's apex from the Pyramid toolkit that PyPI serves under the same name."""
    if importlib.util.find_spec("apex") is None:
        return [Check("apex", "ok", "not installed (optional)")]
    reason = wrong_apex_reason()
    if reason:
        detail = f"not NVIDIA's apex: {reason}. Megatron takes it for the real one and fails"
        return [Check("apex", "fail", detail, "pip uninstall apex")]
    applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    if not applier.available:
        detail = "NVIDIA apex, built without its CUDA extensions: its fused operations are missing"
        remedy = "build it from github.com/NVIDIA/apex with --cpp_ext --cuda_ext"
        return [Check("apex", "warn", detail, remedy)]
    return [Check("apex", "ok", "NVIDIA apex with CUDA extensions")]


def check_build_tools() -> list[Check]:
    """DeepSpeed compiles some operations on first use; without tools that stops a run, mid-way."""
    compiler = os.environ.get("CXX", "c++")
    missing = [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]
    if not missing:
        return [Check("build tools", "ok", f"{shutil.which(compiler)}, {shutil.which('ninja')}")]
    detail = (
        f"{' and '.join(missing)} not on PATH: DeepSpeed cannot compile its operations (fused and "
        'CPU Adam, offload). The configs of fp4-plugin do without them ("torch_adam": true)'
    )
    remedies = {"ninja": "pip install ninja", compiler: "apt-get install g++"}
    return [Check("build tools", "warn", detail, " && ".join(remedies[tool] for tool in missing))]


def check_extension_locks() -> list[Check]:
    """A build that was killed leaves its lock, and torch then waits for it for ever, silently."""
    root = _extension_root()
    locks = sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])
    if not locks:
        return [Check("extension locks", "ok", f"none in {root}")]
    return [_judge_lock(lock) for lock in locks]


def _judge_lock(lock: Path) -> Check:
    age_s = time.time() - lock.stat().st_mtime
    seen = f"{lock} is {age_s / 60:.0f} minutes old"
    remedy = f"rm {shlex.quote(str(lock))}"
    if age_s > STALE_LOCK_S:
        detail = f"{seen}: its build was killed, and every job that needs it hangs silently"
        return Check("extension locks", "fail", detail, remedy)
    return Check(
        "extension locks", "warn", f"{seen}: a build runs, or was killed", f"if none: {remedy}"
    )


def _extension_root() -> Path:
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def check_disk() -> list[Check]:
    places = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    checks = [_judge_disk(name, path) for name, path in places.items()]
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir():
        free_bytes = shutil.disk_usage(shared_memory).free
        small = free_bytes < LITTLE_SHARED_MEMORY_BYTES
        detail = f"{free_bytes / GIB:.1f} GiB free in {shared_memory}"
        remedy = "in a container: docker run --shm-size=8g" if small else ""
        checks.append(Check("shared memory", "warn" if small else "ok", detail, remedy))
    return checks


def _judge_disk(name: str, path: Path) -> Check:
    free_bytes = shutil.disk_usage(path).free
    detail = f"{free_bytes / GIB:.1f} GiB free in {path}"
    if free_bytes < NO_DISK_BYTES:
        return Check(name, "fail", detail, "free some space: checkpoints would be cut short")
    if free_bytes < LITTLE_DISK_BYTES:
        return Check(name, "warn", detail, "free some space: a 1.3B checkpoint takes about 18 GB")
    return Check(name, "ok", detail)
