"""One registry type for everything that JSON refers to by name (formats, estimators, recipes)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from fp4_plugin.errors import ConfigError

__all__ = ["Registry", "nearest_name"]

T = TypeVar("T")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The name in `names` that `name` was probably meant to be, or None if none is close."""
    lowered = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


class Registry(Generic[T]):
    """Names to values of one kind; `kind` appears in error messages ("number format")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Add `value` under `name` and return it. Raises ConfigError if the name is taken."""
        if name in self._values:
            raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name")
        self._values[name] = value
        return value

    def unregister(self, name: str) -> None:
        """Remove `name`; the counterpart of `register` for tests and plugins that unload."""
        self._values.pop(name, None)

    def names(self) -> list[str]:
        return list(self._values)

    def __getitem__(self, name: str) -> T:
        if name in self._values:
            return self._values[name]
        guess = nearest_name(name, self._values)
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"unknown {self.kind} {name!r}: allowed are {self.names()}{hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)
