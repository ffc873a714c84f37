"""Blocks of floats to FP8 messages and back.

A message is what one rank sends another: a header, the block scales and the codes in one row of
bytes, so that one collective moves them together.

    bytes 0 .. 15          header: magic and version, format, block size, number of elements (int32)
    4 per block            scale_inv, float32
    1 per element          codes, E4M3 or E5M2

A block is quantised like a row of a matrix (`core.ops.quantize_rows`): absmax scale, nearest-even,
saturating. A block that holds a NaN or an Inf has scale NaN and decodes to NaN everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fp4_plugin.core.codes import decode
from fp4_plugin.core.formats import E4M3, E5M2, FORMATS, MiniFloat
from fp4_plugin.core.ops import quantize_rows
from fp4_plugin.errors import CommunicationError, ConfigError
from fp4_plugin.registry import nearest_name

__all__ = ["BLOCK_SIZES", "WIRE_FORMATS", "BlockCodec", "MessageParts"]

WIRE_FORMATS: tuple[MiniFloat, ...] = (E4M3, E5M2)
BLOCK_SIZES = tuple(2**n for n in range(4, 17))

HEADER_BYTES = 16
_MAGIC = int.from_bytes(b"fp8", "little") << 8
_VERSION = 1
# Names and how a message writes their values.
_FIELDS = {"magic and version": "#x", "format": "#x", "block size": "d", "number of elements": "d"}
_MAX_ELEMENTS = 2**31 - 1
# Messages start at multiples of this: scales are read in place as float32.
ALIGNMENT = 16
# Elements handled at a time, so that float32 temporaries stay small next to the messages (and in
# the cache of a CPU).
_CHUNK_ELEMENTS_CPU, _CHUNK_ELEMENTS = 1 << 18, 1 << 25


@dataclass(frozen=True)
class MessageParts:
    """Views into one message: header (4,) int32, scale_inv (blocks,) float32, codes (n,) uint8."""

    header: torch.Tensor
    scale_inv: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True)
class BlockCodec:
    """How gradients are written on the wire; equal codecs understand each other.

    block_size: elements that share a scale, a power of two. Raises ConfigError for a format or
    block size that is not one of WIRE_FORMATS and BLOCK_SIZES.
    """

    format: MiniFloat = E4M3
    block_size: int = 1024

    def __post_init__(self) -> None:
        if self.format not in WIRE_FORMATS:
            allowed = [fmt.name for fmt in WIRE_FORMATS]
            name = getattr(self.format, "name", self.format)
            raise ConfigError(f"format {name!r} cannot travel: allowed are {allowed}")
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"block_size {self.block_size!r}: a power of two from {BLOCK_SIZES[0]} to "
                f"{BLOCK_SIZES[-1]} is needed"
            )

    @classmethod
    def named(cls, format: str, block_size: int = 1024) -> BlockCodec:
        """The codec of a format given by name, as in JSON."""
        if not isinstance(format, str) or format not in FORMATS:
            allowed = [fmt.name for fmt in WIRE_FORMATS]
            guess = nearest_name(str(format), allowed)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise ConfigError(f"format {format!r} cannot travel: allowed are {allowed}{hint}")
        return cls(FORMATS[format], block_size)

    def identity(self) -> list[int]:
        """Integers that are equal on two ranks if and only if they understand each other."""
        return self._header(0)[:3]

    @staticmethod
    def describe_identity(identity: Sequence[int]) -> str:
        """What `identity` means, for an error message."""
        magic, layout, block_size = identity
        names = {_layout_of(fmt): fmt.name for fmt in WIRE_FORMATS}
        return (
            f"format {names.get(layout, layout)!r}, block_size {block_size} "
            f"(message version {magic - _MAGIC})"
        )

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def num_bytes(self, numel: int) -> int:
        """Length of a message of `numel` elements; nothing at all is sent for none."""
        return HEADER_BYTES + 4 * self.num_blocks(numel) + numel if numel else 0

    def slot_bytes(self, numel: int) -> int:
        """`num_bytes` rounded up so that the next message is aligned."""
        return -(-self.num_bytes(numel) // ALIGNMENT) * ALIGNMENT

    def parts(self, message: torch.Tensor, numel: int) -> MessageParts:
        """Views into `message` (uint8, 1-D, contiguous, at a multiple of 4 bytes).

        Raises CommunicationError for a wrong length.
        """
        if message.dtype != torch.uint8 or message.numel() != self.num_bytes(numel):
            raise CommunicationError(
                f"a message of {numel} elements has {self.num_bytes(numel)} bytes, not "
                f"{message.numel()} of {message.dtype}: it was cut, or written with other settings"
            )
        scales_end = HEADER_BYTES + 4 * self.num_blocks(numel)
        return MessageParts(
            header=message[:HEADER_BYTES].view(torch.int32),
            scale_inv=message[HEADER_BYTES:scales_end].view(torch.float32),
            codes=message[scales_end:],
        )

    def encode(
        self, values: torch.Tensor, message: torch.Tensor, amax: torch.Tensor | None = None
    ) -> MessageParts:
        """Write `values` (1-D, contiguous, any float) into `message`; returns its parts.

        amax: (1, 1) float32 that takes the place of every block's own; values beyond it saturate.
        """
        parts = self.begin(message, values.numel())
        self.encode_into(parts, 0, values, amax)
        return parts

    def begin(self, message: torch.Tensor, numel: int) -> MessageParts:
        """Write the header of a message whose values follow by `encode_into`."""
        parts = self.parts(message, numel)
        if numel:
            parts.header.copy_(_header_tensor(self, numel, message.device))
        return parts

    def encode_into(
        self,
        parts: MessageParts,
        start: int,
        values: torch.Tensor,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantise `values` to the elements from `start`, a multiple of the block size."""
        for low, high in self.chunks(values.numel(), values.device):
            whole = low + (high - low) // self.block_size * self.block_size
            self._encode_rows(parts, start + low, values[low:whole].view(-1, self.block_size), amax)
            self._encode_rows(parts, start + whole, values[whole:high].view(1, -1), amax)

    def _encode_rows(
        self, parts: MessageParts, start: int, rows: torch.Tensor, amax: torch.Tensor | None
    ) -> None:
        if rows.numel() == 0:
            return
        if amax is not None:
            # A non-finite block must not vanish into a shared scale.
            finite = rows.abs().amax(dim=1, keepdim=True).isfinite()
            amax = torch.where(finite, amax, torch.nan)
        codes, scale_inv = quantize_rows(rows, self.format, amax=amax)
        parts.codes[start : start + rows.numel()].copy_(codes.view(-1))
        first = start // self.block_size
        parts.scale_inv[first : first + rows.shape[0]].copy_(scale_inv.view(-1))

    def decode(self, message: torch.Tensor, numel: int) -> torch.Tensor:
        """The float32 values of a message. Raises CommunicationError as `checked`."""
        self.parts(message, numel)  # `sum` would take another dtype for values
        out = torch.empty(numel, dtype=torch.float32, device=message.device)
        self.sum([message], numel, lambda start, part: out[start:][: part.numel()].copy_(part))
        return out

    def sum(
        self,
        terms: Sequence[torch.Tensor],
        numel: int,
        consume: Callable[[int, torch.Tensor], object],
    ) -> None:
        """Add up terms in the given order, in float32.

        terms: messages (uint8) of `numel` elements, or such elements themselves (1-D, any float).
        Calls `consume(start, values)` chunk by chunk; starts are multiples of the block size, and
        `values` may be kept or changed by the callee. Raises CommunicationError as `checked`.
        """
        if numel == 0:
            return
        parts = [
            self.checked(term, numel, sender) if term.dtype == torch.uint8 else term
            for sender, term in enumerate(terms)
        ]
        for low, high in self.chunks(numel, terms[0].device):
            total = self._chunk(parts[0], low, high)
            for other in parts[1:]:
                total.add_(self._chunk(other, low, high))
            consume(low, total)

    def chunks(self, numel: int, device: torch.device) -> list[tuple[int, int]]:
        """Ranges that cover `numel` elements and start at block boundaries."""
        size = _CHUNK_ELEMENTS_CPU if device.type == "cpu" else _CHUNK_ELEMENTS
        size = max(size, self.block_size)
        return [(low, min(low + size, numel)) for low in range(0, numel, size)]

    def _chunk(self, term: MessageParts | torch.Tensor, low: int, high: int) -> torch.Tensor:
        if isinstance(term, torch.Tensor):
            return term[low:high].to(torch.float32, copy=True)
        return self._decode_chunk(term, low, high)

    def _decode_chunk(self, parts: MessageParts, low: int, high: int) -> torch.Tensor:
        values = decode(parts.codes[low:high], self.format)
        whole = (high - low) // self.block_size * self.block_size
        first = low // self.block_size
        scales = parts.scale_inv[first : first + self.num_blocks(high - low)]
        if whole:
            rows = values[:whole].view(-1, self.block_size)
            rows.mul_(scales[: rows.shape[0]].unsqueeze(1))
        if whole < high - low:
            values[whole:].mul_(scales[-1])
        return values

    def checked(self, message: torch.Tensor, numel: int, sender: int = 0) -> MessageParts:
        """`parts` of a received message whose header and scales are what a peer may send.

        On a CPU a wrong header, or a scale that is neither NaN nor a positive number, raises
        CommunicationError. Elsewhere reading would stop the device, so such a message decodes to
        NaN instead, which gradient-norm and overflow checks see. NaN codes decode to NaN.
        """
        parts = self.parts(message, numel)
        scales = parts.scale_inv
        if message.device.type == "cpu":
            self._refuse_header(parts.header.tolist(), self._header(numel), sender)
            if not ((scales > 0) & scales.isfinite() | scales.isnan()).all():
                raise CommunicationError(
                    f"message {sender} holds block scales that are zero, negative or infinite: it "
                    "was damaged on its way"
                )
            return parts
        return self._masked(parts, numel)

    def _masked(self, parts: MessageParts, numel: int) -> MessageParts:
        """`parts` with NaN for every scale that is wrong, all of them if the header is."""
        header, scales = parts.header, parts.scale_inv
        is_ours = (header == _header_tensor(self, numel, header.device)).all()
        valid = is_ours & (scales > 0) & scales.isfinite()
        return MessageParts(header, torch.where(valid, scales, torch.nan), parts.codes)

    def _header(self, numel: int) -> list[int]:
        if numel > _MAX_ELEMENTS:
            raise ConfigError(
                f"{numel} elements for one rank are more than a message holds ({_MAX_ELEMENTS}); "
                "reduce in smaller buckets (reduce_bucket_size)"
            )
        return [_MAGIC | _VERSION, _layout_of(self.format), self.block_size, numel]

    def _refuse_header(self, found: list[int], expected: list[int], sender: int) -> None:
        wrong = [
            f"{name} {value:{spec}} instead of {right:{spec}}"
            for (name, spec), value, right in zip(_FIELDS.items(), found, expected, strict=True)
            if value != right
        ]
        if wrong:
            raise CommunicationError(
                f"message {sender} has another header: {', '.join(wrong)}; all ranks need the same "
                "fp4-plugin version, format, block_size and tensor sizes"
            )


def _layout_of(fmt: MiniFloat) -> int:
    return fmt.exponent_bits << 4 | fmt.mantissa_bits


@lru_cache(maxsize=1024)
def _header_tensor(codec: BlockCodec, numel: int, device: torch.device) -> torch.Tensor:
    """Kept on the device: copying it there each time would wait for the device."""
    with torch.inference_mode(mode=False):
        return torch.tensor(codec._header(numel), dtype=torch.int32, device=device)
