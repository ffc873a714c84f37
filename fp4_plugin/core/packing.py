"""Two 4-bit codes in a byte: the low nibble is the even index along K, odd K is padded with 0."""

from __future__ import annotations

import torch

__all__ = ["pack", "unpack"]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes: (..., K) uint8 below 16 -> (..., ceil(K / 2)) uint8."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # Seen as int16 a pair is `odd << 8 | even`; shifting by 4 moves the odd code next to the even.
    pairs = codes.contiguous().view(-1).view(torch.int16)
    packed = (pairs | (pairs >> 4)).to(torch.uint8)
    return packed.view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """packed: (..., ceil(K / 2)) uint8 -> (..., K) uint8 with K = num_columns."""
    both = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return both.flatten(-2)[..., :num_columns]
