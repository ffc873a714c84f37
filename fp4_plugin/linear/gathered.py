"""A quantised input whose tokens are spread over ranks (sequence parallelism), made whole.

What travels are codes, scales and the residual of clamping, not values: with rows of 4,096, alpha
0.99 and BF16 that is 2.5 KB a token instead of 8. A row is quantised by itself, so that the result
has the bits of quantising the gathered values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from fp4_plugin.core.outliers import Residual
from fp4_plugin.linear.operand import QuantizedInput
from fp4_plugin.linear.spec import LinearSpec

__all__ = ["can_gather", "gather_input"]


def can_gather(spec: LinearSpec) -> bool:
    """Whether every row of the input is quantised by itself."""
    return (
        spec.input.format is not None
        and spec.input.granularity == "row"
        and not spec.keeps_transposed_input
        and (spec.outliers is None or spec.outliers.scope == "row")
    )


def gather_input(part: QuantizedInput, group: dist.ProcessGroup) -> QuantizedInput:
    """part: as many tokens on every rank, for a spec that `can_gather` -> all of them.

    One collective; tokens are in the order of the ranks.
    """
    rows, residual = part.rows, part.residual
    assert rows.scale_inv is not None
    tensors = [rows.data, rows.scale_inv]
    if residual is not None:
        tensors += [residual.columns, residual.values, residual.low, residual.high]
    data, scale_inv, *of_residual = _gather_rows(tensors, group)
    if residual is not None:
        columns, values, low, high = of_residual
        shape = torch.Size((len(columns), residual.shape[-1]))
        residual = Residual(columns, values, None, low, high, shape)
    return QuantizedInput(replace(rows, data=data, scale_inv=scale_inv), None, residual)


def _gather_rows(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Tensors (T, ...) of any dtypes -> (T * ranks, ...), side by side in one message of bytes."""
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    message = torch.cat(as_bytes, dim=1)
    whole = message.new_empty((message.shape[0] * group.size(), message.shape[1]))
    dist.all_gather_into_tensor(whole, message, group)
    widths = [one.shape[1] for one in as_bytes]
    return [
        # A copy: a slice of a row begins where its dtype may not.
        part.contiguous().view(tensor.dtype)
        for part, tensor in zip(whole.split(widths, dim=1), tensors, strict=True)
    ]
