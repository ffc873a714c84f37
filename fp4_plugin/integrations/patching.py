"""Replacing one attribute of somebody else's module, so that it can be taken back.

A `Patch` is idempotent (an attribute is replaced at most once), keeps the original in
`__wrapped__`, checks that the original still takes the parameters we rely on, and is reversible
even when a third party wrapped our replacement in the meantime: the replacement stays in the
chain then, but only passes calls on.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fp4_plugin.errors import UnsupportedError

__all__ = ["Patch", "patch_function", "require_parameters", "require_symbols"]

logger = logging.getLogger(__name__)

# Found on a replacement, so that a second patch (or a second copy of this package) sees the first.
_MARKER = "__fp4_plugin_patch__"

Around = Callable[..., Any]  # around(original, *args, **kwargs) -> result of the call


@dataclass
class Patch:
    """One replaced attribute of `owner`; `undo` restores it."""

    owner: Any
    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    active: bool = True

    def undo(self) -> None:
        """Put the original back; harmless when it is back already."""
        self.active = False
        if vars(self.owner).get(self.name) is self.replacement:
            setattr(self.owner, self.name, self.original)


def patch_function(owner: Any, name: str, around: Around, parameters: Iterable[str] = ()) -> Patch:
    """Replace `owner.name` by a function that returns `around(original, *args, **kwargs)`.

    `parameters` are the names that the original has to accept. Raises UnsupportedError that names
    the symbol and the version of its package where the original, or a parameter, is missing.
    """
    require_symbols(owner, [name])
    current: Callable[..., Any] = getattr(owner, name)
    existing: Patch | None = getattr(current, _MARKER, None)
    if existing is not None and existing.active:
        return existing
    require_parameters(owner, name, parameters)
    patch = Patch(owner, name, current, current)
    patch.replacement = _replacement(patch, around)
    setattr(owner, name, patch.replacement)
    logger.debug("fp4_plugin replaced %s.%s", _label(owner), name)
    return patch


def _replacement(patch: Patch, around: Around) -> Callable[..., Any]:
    @functools.wraps(patch.original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return patch.original(*args, **kwargs)
        return around(patch.original, *args, **kwargs)

    setattr(replacement, _MARKER, patch)
    return replacement


def require_symbols(owner: Any, names: Iterable[str]) -> None:
    """Raise UnsupportedError unless `owner` has every attribute in `names`."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"{_label(owner)} has no {', '.join(missing)} in {_version_of(owner)}; "
            f"this version of fp4_plugin cannot hook into it"
        )


def require_parameters(owner: Any, name: str, parameters: Iterable[str]) -> None:
    """Raise UnsupportedError unless the function `owner.name` takes every name in `parameters`."""
    accepted = inspect.signature(getattr(owner, name)).parameters
    missing = [parameter for parameter in parameters if parameter not in accepted]
    if missing:
        raise UnsupportedError(
            f"{_label(owner)}.{name} takes no parameter {', '.join(missing)} in "
            f"{_version_of(owner)}; this version of fp4_plugin cannot hook into it"
        )


def _label(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    owner_class = owner if isinstance(owner, type) else type(owner)
    return f"{owner_class.__module__}.{owner_class.__qualname__}"


def _version_of(owner: Any) -> str:
    """The package that owns the symbol and its version, as in "deepspeed 0.19.8"."""
    import sys

    package = _label(owner).partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "of unknown version")
    return f"{package} {version}"
