"""The FP4 linear as one autograd function with three GEMMs (arXiv 2501.17116, section 3).

Shapes: x (T, K), weight W (N, K), grad_output G (T, N). Q() are codes, s_ their scales: s_x one
per token, s_w one per output channel.

    fprop  Y (T, N)  = [Q(x_c) Q(W)^T] * s_x * s_w^T + dx W^T + bias
    dgrad  dX (T, K) = [Q(G * s_w^T) Q(W)] * s_g
    wgrad  dW (N, K) = [Q((G * s_x)^T) Q(x_c)] * s_g * slope(W) + G^T dx

x_c is the clamped input and dx what clamping cut off, multiplied by the unquantised weight (and,
in wgrad, by the unquantised G; it never went through the rounding, so it carries no slope). dX is
straight-through for every element, clamped or not. In backward a scale of the saved codes lies on
the contraction axis, where it cannot be an epilogue: it is folded into G before G's cast. G's own
scale is one per token in dgrad, one per output channel in wgrad. In `bf16` arithmetic G is folded
and not cast below BF16; in `fp4` both operands are quantised along the contraction axis instead.

The code GEMM of two 4-bit operands is exact, and the epilogue has a fixed order:
f32(f32(acc * s_x) * s_w), + dx W^T, + bias, one cast to the output dtype.

Saved for backward: packed codes, scales, the fixed-width residual and the weight parameter; the
input itself is not kept, and the slope's argument is recomputed from the weight.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._compile import _disable_dynamo

from fp4_plugin.core.outliers import Residual, SparseRows
from fp4_plugin.core.tracing import announce
from fp4_plugin.linear.operand import (
    Operand,
    QuantizedInput,
    as_rows,
    gemm,
    quantize_operand,
    scale_,
    scaled,
    scaled_weight,
)
from fp4_plugin.linear.record import LayerRecord
from fp4_plugin.linear.shards import Shards, sums_over
from fp4_plugin.linear.shared_input import forget_shared_input, shared_quantized_input
from fp4_plugin.linear.spec import LinearSpec

__all__ = ["LayerRun", "fp4_linear"]


@dataclass
class LayerRun:
    """A layer at work: its spec, and the record of what it did.

    keep_weight_codes: save the weight's codes for dgrad instead of quantising again in backward.
    Off where weights are sharded (ZeRO-3): saved codes would hold a whole model of them.
    shards: how tensor parallelism cuts the weight, where scales are to be those of the whole.
    """

    name: str
    spec: LinearSpec
    keep_weight_codes: bool = True
    record: LayerRecord = field(default_factory=LayerRecord)
    shards: Shards | None = None


@dataclass(frozen=True)
class _Saved:
    """What backward needs; `activation` is quantised along K, or along T where wgrad is fp4."""

    weight: torch.Tensor
    activation: Operand
    residual: SparseRows | None
    weight_codes: Operand | None


# As torch.compiler.disable, which would import Dynamo (seconds) with this module.
@_disable_dynamo
def fp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    run: LayerRun,
    quantized: QuantizedInput | None = None,
) -> torch.Tensor:
    """x: (..., K), weight: (N, K), bias: (N) or None, all of one float dtype -> (..., N).

    quantized: x by whoever has quantised it already; of x only shape and dtype are read then.

    Under autocast the output has the autocast dtype, and operands are quantised from the dtype
    they are stored in. Raises RuntimeError if shapes or (without autocast) dtypes do not fit.
    """
    device_type = x.device.type
    has_autocast = torch.amp.is_autocast_available(device_type)  # not on "meta"
    autocast = has_autocast and torch.is_autocast_enabled(device_type)
    _check_operands(x, weight, run.name, autocast=autocast)
    output_dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
    with _without_autocast(device_type):
        if quantized is None:
            with torch.no_grad():
                quantized = shared_quantized_input(x, run.spec, run.shards)
        rows = as_rows(x)
        output: torch.Tensor = _FP4Linear.apply(rows, weight, bias, quantized, run, output_dtype)
    return output.view(*x.shape[:-1], weight.shape[0])


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _check_operands(x: torch.Tensor, weight: torch.Tensor, name: str, *, autocast: bool) -> None:
    layer = name or "FP4Linear"
    if x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"{layer}: input {tuple(x.shape)} does not fit weight {tuple(weight.shape)}: "
            f"its last dimension must be {weight.shape[1]}"
        )
    if x.dtype != weight.dtype and not autocast:
        raise RuntimeError(
            f"{layer}: input is {x.dtype} and weight {weight.dtype}; cast one of them or use "
            "autocast"
        )


class _FP4Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantized: QuantizedInput,
        run: LayerRun,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        weight_codes = quantize_operand(weight, run.spec.weight, axes="nk", shards=run.shards)
        with run.record.gemm("fprop"):
            output = _fprop(quantized, weight_codes, weight, bias, sums_over(run.shards))
        run.record.tokens += x.shape[0]
        ctx.run, ctx.input_dtype, ctx.num_tokens = run, x.dtype, x.shape[0]
        needed = zip(("dgrad", "wgrad"), ctx.needs_input_grad, strict=False)
        run.record.needed.update(gemm for gemm, is_needed in needed if is_needed)
        if any(ctx.needs_input_grad):
            _save(ctx, quantized, weight_codes, weight)
        return output.to(output_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = _restore(ctx)
        forget_shared_input()  # restoring may have recomputed a checkpointed part of the model
        run: LayerRun = ctx.run
        grad_input = grad_weight = grad_bias = None
        with _without_autocast(grad_output.device.type):
            if ctx.needs_input_grad[0]:
                with run.record.gemm("dgrad"):
                    grad_input = _dgrad(grad_output, saved, run).to(ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                with run.record.gemm("wgrad"):
                    grad_weight = _wgrad(grad_output, saved, run).to(saved.weight.dtype)
            if ctx.needs_input_grad[2]:
                # autograd casts it to the dtype of the bias.
                grad_bias = grad_output.sum(0, dtype=torch.float32)
        return grad_input, grad_weight, grad_bias, None, None, None


def _fprop(
    quantized: QuantizedInput,
    weight_codes: Operand,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    across: Shards | None,
) -> torch.Tensor:
    """(T, N) float32; sums of the ranks of `across` are made whole before they are scaled."""
    output = gemm(quantized.rows, weight_codes, "nt")
    if across is not None:
        across.sum(output)
    scale_(output, quantized.rows.scale_inv, _transposed(weight_codes.scale_inv))
    if quantized.residual is not None:
        output += _compensation(quantized.residual, weight, across)
    if bias is not None:
        output += bias
    return output


def _compensation(residual: Residual, weight: torch.Tensor, across: Shards | None) -> torch.Tensor:
    """dx W^T, (T, N) float32; in float64 until the ranks' parts are summed."""
    if across is None:
        return residual.matmul_t(weight)
    announce("residual torch.mm float64")
    part = residual.to_dense().to(torch.float64) @ weight.t().to(torch.float64)
    return across.sum(part).to(torch.float32)


def _dgrad(grad_output: torch.Tensor, saved: _Saved, run: LayerRun) -> torch.Tensor:
    """(T, K) float32."""
    spec, shards = run.spec, run.shards
    if spec.dgrad == "fp4":
        grad = quantize_operand(grad_output, spec.grad_output, axes="tn", shards=shards)
        transposed = saved.weight.t().contiguous()
        columns = quantize_operand(transposed, spec.weight, axes="kn", shards=shards)
        grad_input = gemm(grad, columns, "nt")
        return scale_(grad_input, grad.scale_inv, _transposed(columns.scale_inv))
    codes = saved.weight_codes or quantize_operand(
        saved.weight, spec.weight, axes="nk", shards=shards
    )
    folded = scaled(grad_output, _transposed(codes.scale_inv))
    grad = _grad_operand(folded, grad_output.dtype, spec.dgrad, run, "tn")
    return scale_(gemm(grad, codes, "nn"), grad.scale_inv)


def _wgrad(grad_output: torch.Tensor, saved: _Saved, run: LayerRun) -> torch.Tensor:
    """(N, K) float32."""
    activation, spec = saved.activation, run.spec
    if spec.keeps_transposed_input:
        transposed = grad_output.t().contiguous()
        grad = quantize_operand(transposed, spec.grad_output, axes="nt", shards=run.shards)
        grad_weight = gemm(grad, activation, "nt")
        scale_(grad_weight, grad.scale_inv, _transposed(activation.scale_inv))
    else:
        # Transposed before it is folded: a copy of BF16 moves half the bytes of one of float32.
        folded = scaled(grad_output.t().contiguous(), _transposed(activation.scale_inv))
        grad = _grad_operand(folded, grad_output.dtype, spec.wgrad, run, "nt")
        grad_weight = scale_(gemm(grad, activation, "nn"), grad.scale_inv)
    if spec.weight.format is not None:
        weight = scaled_weight(saved.weight, spec.weight, run.shards)
        slope = spec.estimator.slope(weight, spec.weight.format)
        scale_(grad_weight, slope)
    if saved.residual is not None:
        num_columns = saved.weight.shape[1]
        grad_weight += saved.residual.weight_gradient(grad_output, num_columns)
    return grad_weight


def _grad_operand(
    folded: torch.Tensor, dtype: torch.dtype, arithmetic: str, run: LayerRun, axes: str
) -> Operand:
    """The folded gradient as the GEMM reads it: 8-bit rows, or values of the gradient's dtype.

    Folded float16 stays float32: its product with a scale leaves float16's range.
    """
    if arithmetic == "fp8":
        return quantize_operand(folded, run.spec.grad_output, axes=axes, shards=run.shards)
    values = folded if dtype == torch.float16 else folded.to(dtype)
    return Operand(values, None, None, values.shape[1])


def _transposed(scale_inv: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale_inv is None else scale_inv.t()


def _save(ctx: Any, quantized: QuantizedInput, weight_codes: Operand, weight: torch.Tensor) -> None:
    """Every tensor goes through save_for_backward, where hooks and checkpointing see it."""
    run: LayerRun = ctx.run
    activation = quantized.transposed or quantized.rows
    residual = quantized.residual
    of_residual = (residual.columns, residual.values, residual.offsets) if residual else (None,) * 3
    of_input = (activation.data, activation.scale_inv, *of_residual)
    keeps_codes = run.keep_weight_codes and run.spec.weight.format and run.spec.dgrad != "fp4"
    of_weight = (weight_codes.data, weight_codes.scale_inv) if keeps_codes else (None, None)
    ctx.save_for_backward(weight, *of_input, *of_weight)
    num_elements = ctx.num_tokens * weight.shape[1]
    run.record.count_saved(num_elements, of_input, of_weight)


def _restore(ctx: Any) -> _Saved:
    weight, data, scale_inv, columns, values, offsets, codes, codes_scale = ctx.saved_tensors
    spec: LinearSpec = ctx.run.spec
    num_columns = ctx.num_tokens if spec.keeps_transposed_input else weight.shape[1]
    return _Saved(
        weight=weight,
        activation=Operand(data, spec.input.format, scale_inv, num_columns),
        residual=None if columns is None else SparseRows(columns, values, offsets),
        weight_codes=None
        if codes is None
        else Operand(codes, spec.weight.format, codes_scale, weight.shape[1]),
    )
