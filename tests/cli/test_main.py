"""The `fp4` command as a whole: help that teaches, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from fp4_plugin import __version__
from fp4_plugin.cli import main as cli
from fp4_plugin.errors import ConfigError, DataError, MismatchError


def _commands(parser):
    (action,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return action.choices


def test_help_names_every_command_and_a_first_session(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for command in _commands(cli.build_parser()):
        assert f"fp4 {command}" in text
    assert '"fp4": {"recipe": "paper"}' in text


@pytest.mark.parametrize("command", sorted(_commands(cli.build_parser())))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: fp4 {command}" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"fp4-plugin {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["config"]], ids=["nothing", "unknown", "half"])
def test_wrong_usage_exits_with_two(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.fixture
def command_that(monkeypatch):
    """Replaces the parser by one whose only command does what is given."""

    def install(function):
        parser = argparse.ArgumentParser()
        parser.set_defaults(func=function)
        monkeypatch.setattr(cli, "build_parser", lambda: parser)

    return install


@pytest.mark.parametrize("error", [ConfigError, DataError, MismatchError], ids=lambda e: e.__name__)
def test_our_errors_are_one_line_and_exit_code_two(error, command_that, capsys):
    def fail(arguments):
        raise error("the file is empty")

    command_that(fail)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == "fp4: error: the file is empty\n"


def test_other_errors_keep_their_traceback(command_that):
    def fail(arguments):
        raise ZeroDivisionError

    command_that(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_interrupt_exits_with_130(command_that, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    command_that(interrupt)
    assert cli.main([]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4_plugin.cli", "config", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, b"")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "fp4_plugin.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, f"fp4-plugin {__version__}\n")


def test_building_the_parser_loads_no_framework():
    code = (
        "import sys; from fp4_plugin.cli.main import build_parser; build_parser();"
        "print([m for m in ('deepspeed', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == "[]\n", result.stderr
