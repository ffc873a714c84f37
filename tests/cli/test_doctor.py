"""`fp4 doctor`: each known trap is planted and must be found; a sound machine passes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time

import pytest
import torch

from fp4_plugin.cli import check_installation, check_machine, doctor
from fp4_plugin.cli.check import Check, run_guarded
from fp4_plugin.cli.main import main


def test_json_output_is_complete_and_matches_the_exit_code(capsys):
    exit_code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (exit_code == 0)
    names = [check["name"] for check in report["checks"]]
    for name in ("python", "torch", "deepspeed", "apex", "extension locks", "cpu", "kernels cpu"):
        assert name in names
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn", "fail"}
    assert all(check["remedy"] for check in report["checks"] if check["status"] != "ok")


def test_exit_code_is_one_if_a_check_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("disk", "fail", "full", "empty it")])
    assert main(["doctor"]) == 1
    assert "1 failed" in capsys.readouterr().out


def test_warnings_do_not_change_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("disk", "warn", "low", "empty it")])
    assert main(["doctor"]) == 0
    assert "-> empty it" in capsys.readouterr().out


def test_table_is_aligned_and_wrapped():
    checks = [
        Check("a", "ok", "word " * 30),
        Check("longer name", "fail", "short", "rm " + "x" * 90),
    ]
    lines = doctor.format_table(checks, width=80).splitlines()
    column = lines[0].index("word")
    assert lines[1].index("word") == column
    assert lines[-2].index("short") == column
    assert lines[-1] == " " * column + "-> rm " + "x" * 90
    assert max(len(line) for line in lines[:-1]) <= 80


def test_a_check_that_raises_does_not_hide_the_others():
    def broken():
        raise OSError("no such thing")

    first, second = run_guarded([("one", broken), ("two", lambda: [Check("two", "ok", "fine")])])
    assert (first.name, first.status) == ("one", "fail")
    assert "OSError: no such thing" in first.detail
    assert second.status == "ok"


@pytest.fixture
def fake_apex(tmp_path, monkeypatch):
    """Writes a package `apex` with the given files that shadows any other."""

    def write(files, summary=None):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if summary:
            info = tmp_path / "apex-0.9.10.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\nSummary: {summary}\n"
            )

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


REAL_APEX = {
    "apex/__init__.py": "",
    "apex/optimizers.py": "class FusedAdam: pass",
}


@pytest.mark.parametrize(
    ("files", "summary", "seen"),
    [
        ({"apex/__init__.py": ""}, None, "no apex.multi_tensor_apply"),
        (
            {"apex/__init__.py": "raise ImportError('cannot import name X from pyramid.session')"},
            None,
            "pyramid.session",
        ),
        ({"apex/__init__.py": ""}, "A toolkit for Pyramid, a Pylons web framework", "toolkit"),
        (
            {"apex/__init__.py": "", "apex/multi_tensor_apply.py": "", "apex/optimizers.py": ""},
            None,
            "FusedAdam",
        ),
    ],
    ids=["empty", "import-error", "metadata", "no-fused-adam"],
)
def test_wrong_apex_is_named(fake_apex, files, summary, seen):
    fake_apex(files, summary)
    (check,) = check_installation.check_apex()
    assert check.status == "fail"
    assert seen in check.detail
    assert check.remedy == "pip uninstall apex"


@pytest.mark.parametrize(("available", "status"), [(True, "ok"), (False, "warn")])
def test_nvidia_apex_is_recognised(fake_apex, available, status):
    applier = f"class multi_tensor_applier: available = {available}"
    fake_apex({**REAL_APEX, "apex/multi_tensor_apply.py": applier})
    (check,) = check_installation.check_apex()
    assert check.status == status


@pytest.mark.parametrize(
    ("age_s", "status"), [(3 * 3600, "fail"), (60, "warn")], ids=["old", "new"]
)
@pytest.mark.parametrize("folder", ["cpu_adam", "py311_cpu/deepspeed_shm_comm"])
def test_a_build_lock_is_found_with_the_command_that_removes_it(
    tmp_path, monkeypatch, folder, age_s, status
):
    lock = tmp_path / folder / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (check,) = check_installation.check_extension_locks()
    assert check.status == status
    assert str(lock) in check.detail
    assert f"rm {lock}" in check.remedy
    lock.unlink()
    assert check_installation.check_extension_locks()[0].status == "ok"


def test_missing_build_tools_are_named(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (check,) = check_installation.check_build_tools()
    assert check.status == "warn"
    assert "c++ and ninja" in check.detail
    assert check.remedy == "apt-get install g++ && pip install ninja"


@pytest.mark.parametrize(
    ("free_bytes", "status"),
    [(2**20, "fail"), (2**30, "warn"), (2**40, "ok")],
    ids=["1M", "1G", "1T"],
)
def test_disk_space_is_judged(monkeypatch, tmp_path, free_bytes, status):
    usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert check_installation.check_disk()[0].status == status


def test_an_unsupported_version_is_a_warning_with_the_supported_range(monkeypatch):
    monkeypatch.setattr(
        check_installation.metadata,
        "requires",
        lambda name: ['deepspeed<0.20,>=0.14; extra == "deepspeed"', "torch>=2.6"],
    )
    versions = {"deepspeed": "0.12.1", "torch": "2.13.0", "fp4-plugin": "0.1.0"}
    monkeypatch.setattr(check_installation, "_version", versions.get)
    checks = {check.name: check for check in check_installation.check_versions()}
    assert checks["torch"].status == "ok"
    assert checks["deepspeed"].status == "warn"
    assert ">=0.14" in checks["deepspeed"].detail
    assert checks["accelerate"].status == "warn"
    assert checks["triton"].status == "ok"


def test_a_missing_framework_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(
        check_installation.metadata, "requires", lambda name: ['deepspeed; extra == "deepspeed"']
    )
    monkeypatch.setattr(check_installation, "_version", lambda name: None)
    checks = {check.name: check for check in check_installation.check_versions()}
    assert checks["deepspeed"].remedy == "pip install 'fp4-plugin[deepspeed]'"


def test_kernels_of_the_cpu_are_exact():
    (check,) = check_machine.check_kernels("cpu")
    assert check.status == "ok"
    for variant in ("float32", "int8", "float8"):
        assert f"{variant} exact" in check.detail


def test_a_kernel_that_is_off_by_one_bit_fails(monkeypatch):
    def wrong(a_codes, b_codes):
        exact = check_machine.gemm.code_gemm_float32(a_codes, b_codes)
        return torch.nextafter(exact, torch.full_like(exact, 1e9))

    monkeypatch.setitem(check_machine.VARIANTS, "int8", wrong)
    (check,) = check_machine.check_kernels("cpu")
    assert check.status == "fail"
    assert "int8 WRONG" in check.detail


def test_a_kernel_that_cannot_run_is_reported_and_does_not_fail(monkeypatch):
    def missing(a_codes, b_codes):
        raise RuntimeError("not compiled for this device\nlong explanation")

    monkeypatch.setitem(check_machine.VARIANTS, "float8", missing)
    (check,) = check_machine.check_kernels("cpu")
    assert check.status == "ok"
    assert "float8 unavailable (not compiled for this device)" in check.detail


def test_gpus_are_described_by_their_arithmetic(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    (check,) = check_machine.check_gpus()
    assert check.name == "gpu 0"
    assert "NVIDIA H200, 141 GiB" in check.detail
    assert "simulated exactly on FP8" in check.detail
