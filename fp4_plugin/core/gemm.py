"""GEMMs of codes: exact sums of products of grid values.

2 * E2M1 values are integers of magnitude at most 12, so a product is a multiple of 1/4 below 36
and a sum of K of them is exact in int32 always and in float32 for K <= 116,508: it cannot depend
on the order of summation. The three implementations below therefore agree bit for bit, and so
must every device kernel.

Formats without an `integer_multiplier` (E4M3, E5M2) and high-precision operands are multiplied as
float32 values; those sums round, and their last bits are the kernel's.
"""

from __future__ import annotations

import contextlib
import functools
import threading

import torch

from fp4_plugin.core.codes import decode, decode_packed
from fp4_plugin.core.formats import E2M1, MiniFloat
from fp4_plugin.core.packing import pack
from fp4_plugin.core.tracing import announce

__all__ = [
    "code_gemm",
    "code_gemm_float8",
    "code_gemm_float32",
    "code_gemm_int8",
    "default_gemm",
    "gemm_bf16_exact",
    "gemm_float32",
    "gemm_int8",
    "has_fast_int8",
]


def code_gemm(a_codes: torch.Tensor, b_codes: torch.Tensor) -> torch.Tensor:
    """Exact sum of E2M1 products by the fastest kernel of the device.

    a_codes: (M, K), b_codes: (N, K), uint8, one code per element -> (M, N) float32 without scales.
    """
    a, b, k = pack(a_codes), pack(b_codes), a_codes.shape[-1]
    product: torch.Tensor = torch.ops.fp4_plugin.gemm(a, "e2m1", b, "e2m1", "nt", k, k)
    return product


def code_gemm_float32(a_codes: torch.Tensor, b_codes: torch.Tensor) -> torch.Tensor:
    """`code_gemm` in float32 arithmetic."""
    return decode(a_codes, E2M1) @ decode(b_codes, E2M1).t()


def code_gemm_int8(a_codes: torch.Tensor, b_codes: torch.Tensor) -> torch.Tensor:
    """`code_gemm` in int8 arithmetic with int32 sums, on doubled values."""
    k = a_codes.shape[-1]
    a = decode_packed(pack(a_codes), k, E2M1, doubled=True)
    b = decode_packed(pack(b_codes), k, E2M1, doubled=True)
    return gemm_int8(a, b.t(), 0.25)


def code_gemm_float8(a_codes: torch.Tensor, b_codes: torch.Tensor) -> torch.Tensor:
    """`code_gemm` on FP8 arithmetic with unit scales: FP4 simulated on FP8 tensor cores."""
    if 0 in (*a_codes.shape, *b_codes.shape):
        return torch.zeros(a_codes.shape[0], b_codes.shape[0], device=a_codes.device)
    a = decode(a_codes, E2M1).to(torch.float8_e4m3fn)
    b = decode(b_codes, E2M1).to(torch.float8_e4m3fn)
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)


@functools.cache
def has_fast_int8() -> bool:
    """True if this CPU has int8 dot products; without them `_int_mm` is slower than float32."""
    return bool(torch.cpu._is_vnni_supported())


def gemm_int8(a: torch.Tensor, b: torch.Tensor, unit: float) -> torch.Tensor:
    """a: (M, K), b: (K, N) int8 integers -> (M, N) float32 = a @ b * unit, exact in int32."""
    if 0 in (*a.shape, *b.shape):
        return torch.zeros(a.shape[0], b.shape[1], device=a.device)
    announce("torch._int_mm")
    product = torch._int_mm(_with_plain_strides(a), _with_plain_strides(b))
    return product.to(torch.float32).mul_(unit)


def _with_plain_strides(matrix: torch.Tensor) -> torch.Tensor:
    """A transposed view of a single row or column gets the strides of a fresh matrix.

    For such views `torch._int_mm` (2.13) reads out of bounds: the stride of a dim of size 1 is
    arbitrary, and it takes it for the leading dimension.
    """
    return matrix.clone(memory_format=torch.contiguous_format) if 1 in matrix.shape else matrix


def gemm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a: (M, K), b: (K, N) float32 -> (M, N) float32."""
    announce("torch.mm float32")
    with _precision_switch if a.device.type == "cpu" else contextlib.nullcontext():
        return torch.mm(a, b)


# torch has no argument for the precision of products, only a switch of oneDNN for the whole
# process. Whoever multiplies here holds this lock: a product of another thread would be rounded to
# BF16 while it is on. The float32 products of somebody else's threads are, for that moment.
_precision_switch = threading.Lock()


def gemm_bf16_exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`gemm_float32` of values that are exact in BF16, on BF16 instructions with float32 sums.

    Products are the same to the bit and sums are float32; on CPUs with BF16 dot products it is
    2 to 3 times faster.
    """
    announce("torch.mm float32 (oneDNN bf16 products)")
    switch = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # absent before 2.9
    with _precision_switch:
        before, switch.fp32_precision = switch.fp32_precision, "bf16"
        try:
            return torch.mm(a, b)
        finally:
            switch.fp32_precision = before


def default_gemm(
    a: torch.Tensor,
    a_format: MiniFloat | None,
    b: torch.Tensor,
    b_format: MiniFloat | None,
    layout: str,
    a_columns: int,
    b_columns: int,
) -> torch.Tensor:
    """Default implementation of `fp4_plugin::gemm`; see core/ops.py for the arguments."""
    if _prefers_int8(a, a_format) and _prefers_int8(b, b_format):
        assert a_format is not None and b_format is not None
        left = decode_packed(a, a_columns, a_format, doubled=True)
        right = decode_packed(b, b_columns, b_format, doubled=True)
        unit = 1.0 / (_multiplier(a_format) * _multiplier(b_format))
        return gemm_int8(*_oriented(left, right, layout), unit)
    left = _values(a, a_format, a_columns)
    right = _values(b, b_format, b_columns)
    is_exact = _is_exact_in_bf16(a, a_format) and _is_exact_in_bf16(b, b_format)
    product = gemm_bf16_exact if is_exact and _has_bf16_products(a) else gemm_float32
    return product(*_oriented(left, right, layout))


def _prefers_int8(operand: torch.Tensor, fmt: MiniFloat | None) -> bool:
    is_integer = fmt is not None and fmt.is_packed and fmt.integer_multiplier is not None
    return is_integer and operand.device.type == "cpu" and has_fast_int8()


def _is_exact_in_bf16(operand: torch.Tensor, fmt: MiniFloat | None) -> bool:
    # BF16 has 8 exponent bits and 7 mantissa bits: every signed minifloat fits.
    return fmt is not None or operand.dtype == torch.bfloat16


def _has_bf16_products(operand: torch.Tensor) -> bool:
    is_cpu = operand.device.type == "cpu"
    return is_cpu and hasattr(torch.backends.mkldnn, "matmul") and _has_cpu_bf16()


@functools.cache
def _has_cpu_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _multiplier(fmt: MiniFloat) -> int:
    assert fmt.integer_multiplier is not None
    return fmt.integer_multiplier


def _values(operand: torch.Tensor, fmt: MiniFloat | None, num_columns: int) -> torch.Tensor:
    if fmt is None:
        return operand.to(torch.float32)
    return decode_packed(operand, num_columns, fmt) if fmt.is_packed else decode(operand, fmt)


def _oriented(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of torch.mm: "n" as stored, "t" transposed, for a then b as in BLAS."""
    return (a.t() if layout[0] == "t" else a), (b.t() if layout[1] == "t" else b)
