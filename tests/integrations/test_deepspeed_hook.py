"""Arming works before and after DeepSpeed is imported, disturbs no import, and can be undone."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks

pytestmark = pytest.mark.deepspeed


def _before_deepspeed():
    """fp4_plugin first; DeepSpeed is imported, reloaded and disarmed later."""
    import importlib
    import importlib.util
    import sys

    import fp4_plugin
    from fp4_plugin.integrations.deepspeed import arm, disarm, is_armed

    seen = {"eager": "deepspeed" in sys.modules, "armed": is_armed()}
    spec = importlib.util.find_spec("deepspeed")
    seen["probe"] = [spec is not None, type(spec.loader).__name__, "deepspeed" in sys.modules]
    sys.meta_path.insert(0, _AsksEverybody())
    import deepspeed

    original = deepspeed.initialize.__wrapped__
    seen["patched"] = [original.__module__, type(deepspeed.__loader__).__name__]
    arm()
    seen["twice"] = hasattr(deepspeed.initialize.__wrapped__, "__wrapped__")
    seen["finders"] = sum(type(one).__name__ == "_DeepSpeedFinder" for one in sys.meta_path)
    importlib.reload(deepspeed)
    seen["reloaded"] = hasattr(deepspeed.initialize, "__wrapped__")
    disarm()
    seen["disarmed"] = [hasattr(deepspeed.initialize, "__wrapped__"), is_armed()]
    importlib.reload(deepspeed)
    seen["reloaded disarmed"] = hasattr(deepspeed.initialize, "__wrapped__")
    seen["public"] = callable(fp4_plugin.initialize)
    return seen


class _AsksEverybody:
    """Another import hook of the usual kind: it delegates to all finders, ours among them."""

    def __init__(self):
        self.asking = False

    def find_spec(self, name, path=None, target=None):
        import importlib.util

        if name != "deepspeed" or self.asking:
            return None
        self.asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.asking = False


def _after_deepspeed():
    """DeepSpeed first, with a name bound to the original before the plugin comes."""
    import sys
    from types import ModuleType

    import deepspeed
    from deepspeed import initialize

    script = ModuleType("script")
    script.start = initialize
    sys.modules["script"] = script
    import fp4_plugin
    from fp4_plugin.integrations.deepspeed import disarm

    seen = {
        "patched": deepspeed.initialize.__wrapped__ is initialize,
        "earlier": script.start.__wrapped__ is initialize,
    }
    disarm()
    seen["disarmed"] = [deepspeed.initialize is initialize, script.start is initialize]
    seen["public"] = callable(fp4_plugin.initialize)
    return seen


def _without_deepspeed():
    import importlib.abc
    import sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "deepspeed":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    import fp4_plugin

    try:
        fp4_plugin.initialize(model=None, config={})
    except fp4_plugin.errors.UnsupportedError as error:
        return str(error)
    return "no error"


def test_armed_before_deepspeed_is_imported():
    (seen,) = run_ranks(_before_deepspeed, num_ranks=1, timeout_s=120)
    assert seen == {
        "eager": False,
        "armed": True,
        "probe": [True, "SourceFileLoader", False],
        "patched": ["deepspeed", "SourceFileLoader"],
        "twice": False,
        "finders": 1,
        "reloaded": True,
        "disarmed": [False, False],
        "reloaded disarmed": False,
        "public": True,
    }


def test_armed_after_deepspeed_was_imported():
    (seen,) = run_ranks(_after_deepspeed, num_ranks=1, timeout_s=120)
    assert seen == {"patched": True, "earlier": True, "disarmed": [True, True], "public": True}


def test_without_deepspeed_the_error_names_the_command():
    (message,) = run_ranks(_without_deepspeed, num_ranks=1, timeout_s=60)
    assert "pip install" in message
