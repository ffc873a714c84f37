"""Patches are made once, can be taken back, and say what is missing where they cannot be made."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import pytest

from fp4_plugin.errors import UnsupportedError
from fp4_plugin.integrations.patching import patch_function


@pytest.fixture
def framework():
    """A module with one function, as a framework would offer it."""
    module = ModuleType("framework")

    def start(model, config=None):
        """Start it."""
        return [model, config]

    module.start = start
    return module


def double(original, *args, **kwargs):
    return original(*args, **kwargs) * 2


def test_a_patched_function_keeps_name_docstring_and_original(framework):
    original = framework.start
    patch_function(framework, "start", double, ["model", "config"])
    assert framework.start(1, config=2) == [1, 2, 1, 2]
    assert framework.start.__wrapped__ is original
    assert framework.start.__doc__ == "Start it."


def test_patching_twice_wraps_once(framework):
    first = patch_function(framework, "start", double)
    assert patch_function(framework, "start", double) is first
    assert framework.start(1) == [1, None, 1, None]


def test_undo_restores_the_original_and_may_be_repeated(framework):
    original = framework.start
    patch = patch_function(framework, "start", double)
    patch.undo()
    patch.undo()
    assert framework.start is original


def test_undo_below_a_foreign_wrapper_makes_the_patch_pass_calls_on(framework):
    patch = patch_function(framework, "start", double)
    ours = framework.start

    @functools.wraps(ours)
    def foreign(*args, **kwargs):
        return ["foreign", *ours(*args, **kwargs)]

    framework.start = foreign
    assert patch_function(framework, "start", double) is patch
    patch.undo()
    assert framework.start(1) == ["foreign", 1, None]


def test_a_patch_can_be_made_again_after_undo(framework):
    patch_function(framework, "start", double).undo()
    patch_function(framework, "start", double)
    assert framework.start(1) == [1, None, 1, None]


def test_a_missing_symbol_is_named(framework):
    with pytest.raises(UnsupportedError, match="framework has no stop in framework"):
        patch_function(framework, "stop", double)


def test_a_missing_parameter_is_named(framework):
    with pytest.raises(UnsupportedError, match=r"framework\.start takes no parameter mesh"):
        patch_function(framework, "start", double, ["model", "mesh"])
    assert framework.start(1) == [1, None]


def test_a_patch_is_logged_once(framework, caplog):
    with caplog.at_level(logging.DEBUG, logger="fp4_plugin"):
        patch_function(framework, "start", double)
        patch_function(framework, "start", double)
    assert [record.getMessage() for record in caplog.records] == [
        "fp4_plugin replaced framework.start"
    ]
