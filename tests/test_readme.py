"""What the README shows works: its Python runs, its JSON is valid, its commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp4_plugin.cli.main import build_parser
from fp4_plugin.config import find_section, parse_section
from fp4_plugin.config.models import SectionModel

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", _blocks("python"), ids=lambda code: code.split("\n")[0][:40])
def test_the_python_of_the_readme_runs(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_json_of_the_readme_is_a_valid_configuration():
    (block,) = _blocks("json")
    section = find_section(json.loads(block))
    assert section is not None
    assert parse_section(section).recipe == "paper"


def test_what_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    root = Path(__file__).parent.parent
    assert [link for link in links if not (root / link).exists()] == []


def test_the_commands_of_the_readme_exist():
    commands = re.findall(r"^fp4 ([a-z]+)", "\n".join(_blocks("bash")), flags=re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        with pytest.raises(SystemExit) as done:
            build_parser().parse_args([command, "--help"])
        assert done.value.code == 0, command


def test_the_table_of_the_readme_names_every_key_of_the_section():
    table = README.split("## The section")[1].split("## What runs where")[0]
    for key in SectionModel.model_fields:
        assert f"`{key}" in table, key
