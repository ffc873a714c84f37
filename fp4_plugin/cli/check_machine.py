"""What the processors can do, and which kernels of the code GEMM give the exact answer on them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fp4_plugin.cli.check import Check, NamedCheck, run_guarded
from fp4_plugin.core import (
    gemm,
    ops,  # noqa: F401  importing it defines torch.ops.fp4_plugin
)
from fp4_plugin.core.tracing import listen

__all__ = ["machine_checks"]

# Flags of /proc/cpuinfo that speed up this package's arithmetic: x86 names, then Arm names.
CPU_FLAGS = (
    *("avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "amx_bf16", "avx512_fp16"),
    *("asimddp", "i8mm", "bf16", "sve"),
)
# Lowest CUDA compute capability, and the low-precision arithmetic of its tensor cores.
CUDA_ARITHMETIC = (
    ((10, 0), "native FP4, FP8 and BF16"),
    ((8, 9), "FP8 and BF16, no FP4: FP4 can be simulated exactly on FP8"),
    ((8, 0), "BF16 and int8, no FP8"),
    ((0, 0), "neither BF16 nor FP8"),
)
VARIANTS = {
    "float32": gemm.code_gemm_float32,
    "int8": gemm.code_gemm_int8,
    "float8": gemm.code_gemm_float8,
}


def machine_checks() -> list[Check]:
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    kernels: list[NamedCheck] = [
        (f"kernels {device}", partial(check_kernels, device)) for device in devices
    ]
    checks: list[NamedCheck] = [
        ("cpu", check_cpu),
        ("gpu", check_gpus),
        *kernels,
        ("fp16", check_fp16),
    ]
    return run_guarded(checks)


def check_cpu() -> list[Check]:
    flags = _cpu_flags()
    known = [flag for flag in CPU_FLAGS if flag in flags]
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    detail = f"{platform.machine()}, {threads}, {' '.join(known) or 'no int8 or bf16 instructions'}"
    if gemm.has_fast_int8():
        return [Check("cpu", "ok", f"{detail}: FP4 codes are multiplied as int8")]
    return [Check("cpu", "ok", f"{detail}: no int8 dot products, FP4 codes run as float32")]


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def check_gpus() -> list[Check]:
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip
        reason = f"torch for {built_for} sees none" if built_for else "CPU build of torch"
        return [Check("gpu", "ok", f"none ({reason}): training runs on the CPU")]
    return [_describe_gpu(index) for index in range(torch.cuda.device_count())]


def _describe_gpu(index: int) -> Check:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arithmetic = f"{properties.gcnArchName}, ROCm {torch.version.hip}"
    else:
        capability = (properties.major, properties.minor)
        has = next(text for lowest, text in CUDA_ARITHMETIC if capability >= lowest)
        arithmetic = f"compute capability {properties.major}.{properties.minor}: {has}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return Check(f"gpu {index}", "ok", f"{properties.name}, {memory}, {arithmetic}")


def check_kernels(device: str) -> list[Check]:
    """Multiply random E2M1 codes with every variant; the sums are exact, so all bits must agree."""
    generator = torch.Generator().manual_seed(0)
    a_TK = torch.randint(0, 16, (48, 1024), dtype=torch.uint8, generator=generator)
    b_NK = torch.randint(0, 16, (32, 1024), dtype=torch.uint8, generator=generator)
    expected = gemm.code_gemm_float32(a_TK, b_NK)
    a_TK, b_NK = a_TK.to(device), b_NK.to(device)
    with listen() as names:
        chosen = gemm.code_gemm(a_TK, b_NK)
    verdicts = {name: _verdict(variant, a_TK, b_NK, expected) for name, variant in VARIANTS.items()}
    if not torch.equal(chosen.cpu(), expected):
        verdicts["chosen"] = "WRONG"
    detail = f"FP4 layers run {names[-1]}; code GEMM: "
    detail += ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
    if "WRONG" in verdicts.values():
        remedy = "do not train on this device: the products are exact and must agree bit for bit"
        return [Check(f"kernels {device}", "fail", detail, remedy)]
    return [Check(f"kernels {device}", "ok", detail)]


def _verdict(
    variant: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    a_TK: torch.Tensor,
    b_NK: torch.Tensor,
    expected: torch.Tensor,
) -> str:
    try:
        result = variant(a_TK, b_NK)
    except (RuntimeError, ValueError) as error:
        return f"unavailable ({str(error).splitlines()[0][:60]})"
    return "exact" if torch.equal(result.cpu(), expected) else "WRONG"


def check_fp16() -> list[Check]:
    """DeepSpeed refuses fp16 on a CPU unless oneDNN has it; it asks the operator asked here."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return [Check("fp16", "ok", "supported by DeepSpeed on this GPU")]
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return [Check("fp16", "ok", "supported by this CPU")]
    detail = "DeepSpeed's CPU accelerator refuses fp16 on this processor"
    return [Check("fp16", "warn", detail, 'train in bf16: "bf16": {"enabled": true}')]
