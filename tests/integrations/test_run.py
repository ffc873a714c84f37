"""`python -m fp4_plugin.run` is `python`, with the hook armed."""

from __future__ import annotations

import json
import sys

import pytest

from fp4_plugin.run import main
from tests.distributed import run_command

REPORT = """
import json, sys
from fp4_plugin.integrations.deepspeed import is_armed
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "armed": is_armed(),
    "main": sys.modules["__main__"].__file__,
}))
"""


@pytest.fixture
def program(tmp_path):
    """A package `job` with a module `train`, which also is the script `job/train.py`."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(REPORT)
    return folder / "train.py"


def report(arguments, cwd):
    (output,) = run_command([sys.executable, *arguments], cwd=cwd, timeout_s=60)
    return json.loads(output)


def test_a_script_sees_what_python_would_have_shown_it(program):
    seen = report(["-m", "fp4_plugin.run", "job/train.py", "--lr", "1"], program.parent.parent)
    assert seen == {
        "argv": ["job/train.py", "--lr", "1"],
        "path": str(program.parent),
        "name": "__main__",
        "file": "job/train.py",
        "main": "job/train.py",
        "armed": True,
    }


def test_a_module_sees_what_python_would_have_shown_it(program):
    seen = report(["-m", "fp4_plugin.run", "-m", "job.train", "--lr", "1"], program.parent.parent)
    assert seen == {
        "argv": [str(program), "--lr", "1"],
        "path": str(program.parent.parent),
        "name": "__main__",
        "file": str(program),
        "main": str(program),
        "armed": True,
    }


def test_the_rank_of_the_launcher_goes_on_to_the_script(program):
    arguments = ["-m", "fp4_plugin.run", "--local_rank=1", "job/train.py", "--lr", "1"]
    seen = report(arguments, program.parent.parent)
    assert seen["argv"] == ["job/train.py", "--local_rank=1", "--lr", "1"]


def test_the_rank_may_be_an_argument_of_its_own(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["--local_rank", "1", str(program), "--lr", "1"])
    assert json.loads(capsys.readouterr().out)["argv"][1:] == ["--local_rank", "1", "--lr", "1"]


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["-m"], ["--lr"]], ids=str)
def test_without_a_program_the_usage_is_printed(arguments):
    with pytest.raises(SystemExit, match=r"usage: python -m fp4_plugin\.run"):
        main(arguments)
