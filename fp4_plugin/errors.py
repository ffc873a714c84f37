"""Every error this package raises on purpose.

    Fp4Error
    |-- ConfigError         the `fp4` section (or a file around it) asks for what it cannot have
    |-- UnsupportedError    a valid request that this machine, version or combination cannot honour
    |-- DataError           training text, tokens or a tokenizer that cannot be used
    |-- CommunicationError  a collective failed, or a message from a peer cannot be read
    |-- CheckpointError     a checkpoint that cannot be written, trusted or used here
    |-- MismatchError       what ran is not what was asked for
    `-- NotRunYet           a question about a run that has not happened yet

The first three are also `ValueError`, the others `RuntimeError`, so callers need not import us.
A message says what, the value, what is allowed and what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DataError",
    "Fp4Error",
    "MismatchError",
    "NotRunYet",
    "UnsupportedError",
]


class Fp4Error(Exception):
    """Base of all errors raised by fp4_plugin."""


class ConfigError(Fp4Error, ValueError):
    """A configuration that is wrong in itself; the message names path, value, what is allowed."""


class UnsupportedError(Fp4Error, ValueError):
    """A request that this combination of software and hardware cannot honour."""


class DataError(Fp4Error, ValueError):
    """Training data or a tokenizer that cannot be used."""


class CommunicationError(Fp4Error, RuntimeError):
    """Gradients could not be reduced: a rank, a link or a message is not what it has to be."""


class CheckpointError(Fp4Error, RuntimeError):
    """A checkpoint could not be written, is damaged, or belongs to another run than this one."""


class MismatchError(Fp4Error, RuntimeError):
    """What really ran differs from what the configuration asked for."""


class NotRunYet(Fp4Error, RuntimeError):
    """Nothing has run yet that could be checked."""
