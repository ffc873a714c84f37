"""What a configuration asks of gradient communication, typed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fp4_plugin.comm.codec import BlockCodec

__all__ = ["CommunicationSpec"]


@dataclass(frozen=True)
class CommunicationSpec:
    """FP8 gradient communication of one engine.

    min_numel: reductions of fewer elements stay exact: their time is latency, not bytes.
    error_feedback, automatic_factor: see `ErrorFeedback` and `AutomaticFactor`.
    """

    codec: BlockCodec
    min_numel: int = 2048
    error_feedback: bool = False
    automatic_factor: bool = False

    def describe(self) -> dict[str, Any]:
        """As in the configuration."""
        others = {key: value for key, value in asdict(self).items() if key != "codec"}
        return {
            "format": self.codec.format.name,
            "block_size": self.codec.block_size,
            **others,
        }
