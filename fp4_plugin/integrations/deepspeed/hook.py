"""Arming: from now on `deepspeed.initialize` reads the "fp4" section.

Replacing the attribute `deepspeed.initialize` is enough for scripts, the Hugging Face Trainer and
Accelerate, which look it up at call time. Importing DeepSpeed takes seconds and needs it to be
installed, so a finder on `sys.meta_path` waits until somebody else imports it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fp4_plugin.integrations.deepspeed.initialization import initialize_with_fp4
from fp4_plugin.integrations.patching import Patch, patch_function

__all__ = ["arm", "disarm", "is_armed"]

_MODULE = "deepspeed"
# What the wrapper reads from a call; an original without them cannot be served.
_PARAMETERS = ("args", "model", "config", "config_params")

_patches: list[Patch] = []


class _DeepSpeedFinder(MetaPathFinder):
    """Finds `deepspeed` where the other finders do, and patches it once it has run.

    Asking for the spec (`importlib.util.find_spec`) changes nothing; the patch happens when the
    loader executes the module, on the first import and on every `importlib.reload`.
    """

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another hook of this kind may ask all finders again, us among them.
        if fullname != _MODULE or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = self._find_with_the_others(fullname, path, target)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            _patch_after_exec(spec.loader)
        return spec

    def _find_with_the_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


_finder = _DeepSpeedFinder()


def _patch_after_exec(loader: Loader) -> None:
    """Shadow `exec_module` on this loader object only, so that its type (and all else) stays."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if is_armed():
            _patch(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def arm() -> None:
    """Make `deepspeed.initialize` honour the "fp4" section, now or as soon as it is imported."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    deepspeed = sys.modules.get(_MODULE)
    original = getattr(deepspeed, "initialize", None)
    if deepspeed is not None and original is not None:
        _patch(deepspeed)
        _patch_earlier_imports(original)


def disarm() -> None:
    """Undo `arm`: DeepSpeed behaves as if this package had never been imported."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _patches:
        _patches.pop().undo()


def is_armed() -> bool:
    """Whether calls of `deepspeed.initialize` read (or will read) the section."""
    return _finder in sys.meta_path


def _patch(deepspeed: ModuleType) -> None:
    # A folder that happens to be called "deepspeed" imports as an empty namespace package.
    if not hasattr(deepspeed, "initialize"):
        return
    patch = patch_function(deepspeed, "initialize", initialize_with_fp4, _PARAMETERS)
    if patch not in _patches:
        _patches.append(patch)


def _patch_earlier_imports(original: Callable[..., Any]) -> None:
    """Also replace what `from deepspeed import initialize` bound before this package came.

    Such a name would go on calling the original, and train in BF16 without a word.
    """
    for module in list(sys.modules.values()):
        if type(module) is not ModuleType:  # looking into a lazy module would load it
            continue
        names = [name for name, value in vars(module).items() if value is original]
        _patches.extend(patch_function(module, name, initialize_with_fp4) for name in names)
