"""The logic of scripts/check_releases.py: no network, no DeepSpeed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from tests.integrations.training import UPSTREAM_FAULTS, upstream_fault

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts/check_releases.py"


def _script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


check = _script()
DEEPSPEED = check.PACKAGES["deepspeed"]
OPTIONS = argparse.Namespace(package=DEEPSPEED, tests=["tests/x.py"])

REPORT = """<testsuites><testsuite>
<testcase name="passes"/>
<testcase name="waits"><skipped message="no GPU"/></testcase>
<testcase name="breaks"><error message="failed on setup">
E   tests.distributed.RankFailure: --- rank 0 exit 1:
E   [rank0]:   File "engine.py", line 1, in step
E   [rank0]: RuntimeError: Connection reset by peer
E   --- rank 1 exit 1:
E   [rank1]: ImportError: cannot import name 'x' | y
</error></testcase>
<testcase name="fails"><failure message="assert 1 == 2">E   assert 1 == 2</failure></testcase>
</testsuite></testsuites>"""


def test_only_releases_before_0_19_have_known_faults():
    assert upstream_fault("BF16_Optimizer", Version("0.18.9")) is not None
    assert upstream_fault("zero2", Version("0.18.9")) is None
    for release in ("0.19.0", "0.19.8", "0.20.0", "1.0"):
        assert [one for one in UPSTREAM_FAULTS if upstream_fault(one, Version(release))] == []


def report_of(*cases):
    row = check.Row("0.18.9", installed=True)
    check.read_report(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", row)
    return row


def test_the_last_final_release_of_each_minor_from_0_16_is_taken():
    versions = ["0.18.2", "0.18.10", "0.18.9", "0.16.9", "0.15.4", "0.16.10rc1", "0.20.0", "1.0.1"]
    expected = {"0.16": "0.16.9", "0.18": "0.18.10", "0.20": "0.20.0", "1.0": "1.0.1"}
    assert check.last_releases(versions, DEEPSPEED) == expected


def test_minors_are_selected_and_an_unknown_one_is_refused(capsys):
    releases = {"0.16": "0.16.9", "0.18": "0.18.9"}
    assert check._select(releases, None) == ["0.16.9", "0.18.9"]
    assert check._select(releases, ["0.18"]) == ["0.18.9"]
    with pytest.raises(SystemExit) as refusal:
        check._select(releases, ["0.18", "0.7"])
    assert refusal.value.code == 2
    assert "['0.7'] not among ['0.16', '0.18']" in capsys.readouterr().err


def test_pips_answer_is_read_and_its_silence_ends_the_run(monkeypatch):
    answer = "deepspeed (0.18.9)\nAvailable versions: 0.18.9, 0.18.8\n  INSTALLED: 0.19.8\n"

    def pip(stdout, stderr=""):
        done = subprocess.CompletedProcess([], 0, stdout, stderr)
        monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: done)

    pip(answer)
    assert check._available(DEEPSPEED) == ["0.18.9", "0.18.8"]
    pip("", "ERROR: no such index")
    with pytest.raises(SystemExit, match="no such index"):
        check._available(DEEPSPEED)


def test_a_report_is_counted_and_the_cause_of_the_first_failure_found():
    row = check.Row("0.18.9", installed=True)
    check.read_report(REPORT, row)
    assert (row.passed, row.failed, row.skipped) == (1, 2, 1)
    assert row.skips == {"no GPU": 1}
    assert row.first_failure == "breaks: ImportError: cannot import name 'x' | y"
    assert not row.ok


def test_an_abort_in_cpp_explains_a_lost_connection():
    text = "RuntimeError: Connection reset by peer\nterminate called\n  what():  sizes differ\n"
    row = report_of(f'<testcase name="a"><error message="setup">{text}</error></testcase>')
    assert row.first_failure == "a: what():  sizes differ"


def test_a_failure_without_an_error_line_shows_its_message():
    row = report_of('<testcase name="a"><failure message="assert 1 == 2">x</failure></testcase>')
    assert row.first_failure == "a: assert 1 == 2"


@pytest.mark.parametrize(
    ("row", "ok"),
    [
        (check.Row("1", installed=True, passed=2, skipped=1), True),
        (check.Row("1", reason="does not install: no"), True),
        (check.Row("1", installed=True, passed=2, failed=1), False),
        (check.Row("1", installed=True, skipped=3), False),
        (check.Row("1", installed=True, passed=2, reason="did not finish"), False),
    ],
)
def test_only_an_installed_release_can_fail(row, ok):
    assert row.ok is ok


def test_the_table_has_a_row_for_every_release():
    rows = [
        check.Row("0.16.9", reason="does not install: ERROR: a | b"),
        check.Row("0.18.9", True, "", 3, 1, 0, 65, "test_x: AssertionError: " + "y" * 400),
    ]
    lines = check.markdown(rows, OPTIONS).splitlines()
    assert "tests/x.py" in lines[0]
    assert lines[-2] == "| 0.16.9 | no |  |  |  |  | does not install: ERROR: a \\| b |"
    assert lines[-1].startswith("| 0.18.9 | yes | 3 | 1 | 0 | 65 | test_x: AssertionError: yyy")
    assert lines[-1].endswith("... |")


def test_the_table_says_what_was_skipped_and_why():
    row = report_of(
        '<testcase name="a"/>',
        '<testcase name="b"><skipped message="broken there"/></testcase>',
        '<testcase name="c"><skipped message="broken there"/></testcase>',
        '<testcase name="d"><skipped/></testcase>',
    )
    last = check.markdown([row], OPTIONS).splitlines()[-1]
    notes = "2 skipped: broken there; 1 skipped: no reason given"
    assert last == f"| 0.18.9 | yes | 1 | 0 | 3 | 0 | {notes} |"
    assert row.ok


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([check.Row("1", True, passed=1), check.Row("2", reason="does not install")], 0),
        ([check.Row("1", True, passed=1), check.Row("2", True, failed=1)], 1),
        ([check.Row("2", reason="does not install")], 1),
    ],
    ids=["pass", "fail", "nothing shown"],
)
def test_the_exit_status_and_the_files_follow_from_the_rows(rows, status, tmp_path, monkeypatch):
    left = {f"0.{index}": row for index, row in enumerate(rows, 16)}
    monkeypatch.setattr(check, "_available", lambda package: [f"{minor}.1" for minor in left])
    monkeypatch.setattr(check, "check_release", lambda release, _: left[release.rpartition(".")[0]])
    monkeypatch.setattr(check.signal, "signal", lambda *_: None)
    assert check.main(["--output", str(tmp_path)]) == status
    assert len(check.json.loads((tmp_path / "results.json").read_text())) == len(rows)
    assert (tmp_path / "results.md").read_text().count("\n|") == len(rows) + 2


def test_tests_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit) as refusal:
        check.main(["--tests", "tests/nowhere.py"])
    assert refusal.value.code == 2
    assert "tests/nowhere.py" in capsys.readouterr().err


def test_variables_that_lead_to_other_packages_are_dropped(monkeypatch):
    for name in ("PYTHONPATH", "DS_BUILD_OPS", "PYTEST_XDIST_WORKER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    variables = check.environment()
    assert variables["DS_ACCELERATOR"] == "cpu"
    assert not {"PYTHONPATH", "DS_BUILD_OPS", "PYTEST_XDIST_WORKER"} & variables.keys()


@pytest.fixture
def own_environment(tmp_path):
    """(its Python, its folder for packages) of an environment as a release gets it."""
    python = check.make_environment(tmp_path / "environment")
    (own,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    return python, own


def _put(folder, version):
    """A package called deepspeed, with metadata, in `folder`."""
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed/__init__.py").write_text(f"__version__ = '{version}'\n")
    information = folder / f"deepspeed-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: deepspeed\nVersion: {version}\n")


def test_an_environment_sees_the_running_one_behind_its_own_packages(own_environment, tmp_path):
    python, own = own_environment
    _put(own, "0.18.9")
    code = "import pytest, deepspeed; print(pytest.__version__, deepspeed.__version__)"
    seen = subprocess.check_output([python, "-c", code], text=True, cwd=tmp_path).split()
    assert seen == [pytest.__version__, "0.18.9"]
    assert check._why_not_imported(DEEPSPEED, "0.18.9", python, tmp_path) == ""


def test_a_release_that_the_running_environment_has_is_used_from_there(tmp_path, monkeypatch):
    shared = tmp_path / "running/site-packages"
    _put(shared, "0.18.9")
    monkeypatch.syspath_prepend(shared)
    folder = tmp_path / "0.18.9"
    folder.mkdir()
    python = check.make_environment(folder / "environment")
    assert check._why_not_imported(DEEPSPEED, "0.18.9", python, folder) == ""
    with pytest.raises(RuntimeError, match=r"wanted deepspeed 0\.18\.8, imports 0\.18\.9"):
        check._why_not_imported(DEEPSPEED, "0.18.8", python, folder)
    monkeypatch.setattr(check, "_shared", list)  # found somewhere else
    with pytest.raises(RuntimeError, match=r"wanted deepspeed 0\.18\.9, imports 0\.18\.9"):
        check._why_not_imported(DEEPSPEED, "0.18.9", python, folder)


def test_another_deepspeed_than_the_one_under_test_stops_the_run(own_environment, tmp_path):
    python, own = own_environment
    _put(own, "0.18.8")
    with pytest.raises(RuntimeError, match=r"wanted deepspeed 0\.18\.9, imports 0\.18\.8"):
        check._why_not_imported(DEEPSPEED, "0.18.9", python, tmp_path)


def test_a_release_that_does_not_import_is_reported_with_the_reason(own_environment, tmp_path):
    python, own = own_environment
    _put(own, "0.18.9")
    (own / "deepspeed/__init__.py").write_text("from torch import a_name_it_dropped\n")
    reason = check._why_not_imported(DEEPSPEED, "0.18.9", python, tmp_path)
    assert reason.startswith("does not import: ImportError: cannot import name 'a_name_it_dropped'")


def test_a_release_that_does_not_install_is_reported_with_pips_reason(tmp_path, monkeypatch):
    flags = []

    def pip(command, *, log, timeout_s, cwd=ROOT):
        flags.append("--no-build-isolation" in command)
        log.write_text("Collecting deepspeed\nERROR: it needs torch<2\n\nnotice\n")
        return 1

    monkeypatch.setattr(check, "run", pip)
    reason = check._install(DEEPSPEED, "0.18.9", Path("python"), tmp_path)
    assert reason == "does not install: ERROR: it needs torch<2"
    assert flags == [True, False]
    assert (tmp_path / "constraints.txt").read_text().startswith("torch==")


# A child in a session of its own, as the ranks of a test are, that only its parent can end.
PARENT = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def _gone(pid, within_s=10.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def _pid_in(file, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, "the parent did not start"
        time.sleep(0.05)
    return int(file.read_text())


def test_a_time_limit_ends_processes_in_other_sessions_too(tmp_path):
    file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(file)]
    assert check.run(command, log=tmp_path / "log", timeout_s=3, cwd=tmp_path) is None
    assert _gone(_pid_in(file))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_check_leaves_no_process_and_no_environment(name, tmp_path):
    # Everything but the programs that are run: those are PARENT.
    driver = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("check", {str(SCRIPT)!r})
check = sys.modules["check"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)
check._available = lambda package: ["0.18.9"]
check._install = lambda *_: ""
run = check.run
parent = [sys.executable, "-c", {PARENT!r}, {str(tmp_path / "pid")!r}]
check.run = lambda command, **options: run(parent, **options)
sys.exit(check.main(["--output", {str(tmp_path / "output")!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        pid = _pid_in(tmp_path / "pid")
        os.kill(process.pid, getattr(signal, name))
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, error.decode()
    assert _gone(pid)
    assert not (tmp_path / "output/0.18.9/environment").exists()
