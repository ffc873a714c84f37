"""The files around the package agree with each other: metadata, constraints, Makefile, CI."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fp4_plugin

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What `make test` installs; the other extras are for other machines.
TESTED_EXTRAS = ("deepspeed", "hf", "plot", "dev")


def _pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints/cpu-py311.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_every_tested_dependency_is_pinned_exactly_within_its_range():
    pins = _pins()
    tested = [
        *PROJECT["dependencies"],
        *(line for extra in TESTED_EXTRAS for line in EXTRAS[extra]),
    ]
    for requirement in map(Requirement, tested):
        pin = pins[canonicalize_name(requirement.name)]
        (specifier,) = pin.specifier
        assert specifier.operator == "==", str(pin)
        assert requirement.specifier.contains(specifier.version), f"{pin} against {requirement}"


def test_constraints_pin_versions_and_nothing_else():
    pins = _pins()
    assert str(pins["torch"]) == "torch==2.13.0"
    assert "triton" not in pins
    assert [str(pin) for pin in pins.values() if pin.url or len(pin.specifier) != 1] == []


def test_apex_is_no_dependency():
    lines = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    assert "apex" not in {Requirement(line).name for line in lines}


def test_core_dependencies_stay_light():
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "pydantic", "packaging", "tqdm"}


def test_setup_py_imports_setuptools_alone():
    source = (ROOT / "setup.py").read_text()
    assert re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE) == ["setuptools"]


def test_console_script_points_at_a_function():
    module, _, name = PROJECT["scripts"]["fp4"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_citation_and_package_have_one_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fp4_plugin.__version__}\n" in citation
    assert "2501.17116" in citation


def test_license_is_the_whole_apache_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    (declared,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^make (\w+)", result.stdout, re.MULTILINE))
    assert listed == set(declared.split()) - {"help"}


def test_make_explains_an_unusable_python(tmp_path):
    command = ["make", "install", f"VENV={tmp_path}/venv", "PYTHON=false"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "PYTHON=" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_is_a_valid_script():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text()


CONFIGS = sorted((ROOT / "configs").rglob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_configs_are_json(path):
    assert isinstance(json.loads(path.read_text()), dict)
