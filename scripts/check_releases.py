"""Run the tests of all that hooks into a framework on the last release of each of its minors.

    python scripts/check_releases.py                                     DeepSpeed from 0.16
    python scripts/check_releases.py --package megatron-core             Megatron from 0.12
    python scripts/check_releases.py --minors 0.17 0.18 --tests tests/integrations

Layouts that a release gets wrong by itself are skipped, with the reason in the table; they are
listed in tests/integrations/training.py.

Run it with the Python of the environment that `make install` or `make test` made. Each release gets
an environment of its own that holds the package, and whatever it needs in another version, and sees
all other packages of the running environment through a .pth file, the package too if it has that
release. Measured, that takes 15 s and 20 MB per release and a complete environment 170 s and 1.3
GB, and it tests the same: what comes first on the path is what is imported, which is checked before
the tests start.

Results go to DIR/results.json and DIR/results.md, the output of pip and pytest to DIR/<release>/. A
release that does not install or import beside this torch is a row with the reason, no failure.
Exit status: 0 if the tests pass on every release that installs, 1 if not, 2 for bad arguments, 130
after Ctrl-C or SIGTERM, which leave no process behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil
from packaging.version import Version

__all__ = [
    "PACKAGES",
    "Package",
    "Row",
    "check_release",
    "last_releases",
    "main",
    "markdown",
    "read_report",
    "run",
]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Package:
    """What pip calls it, what Python does, the first minor that is tested, and the tests."""

    name: str
    module: str
    first_minor: Version
    tests: tuple[str, ...]


_DEEPSPEED = (
    "gradients gradient_faults gradient_groups optimizer optimizer_section optimizer_checkpoints "
    "checkpoints"
)
_MEGATRON = "layers"
PACKAGES = {
    name: Package(
        name,
        module,
        Version(first),
        tuple(f"tests/integrations/test_{kind}_{one}.py" for one in tests.split()),
    )
    for name, module, first, kind, tests in (
        ("deepspeed", "deepspeed", "0.16", "deepspeed", _DEEPSPEED),
        ("megatron-core", "megatron.core", "0.12", "megatron", _MEGATRON),
    )
}
INSTALL_TIMEOUT_S = 900
# How long an interrupted pytest has to end its ranks before they are killed.
GRACE_S = 10
_SITE = ("site-packages", "dist-packages")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Failed)\b|what\(\): ")  # the latter of C++
# What a rank says that lost its peer: true, but not why.
_AFTERMATH = re.compile(r"RankFailure|Connection reset|closed by peer|did not finish")
_PROBE = """
import importlib, importlib.metadata, json, sys
module = importlib.import_module(sys.argv[2])
print()
print(json.dumps([module.__version__, importlib.metadata.version(sys.argv[1]), module.__file__]))
"""


@dataclass
class Row:
    """What happened with one release; `reason` is why there are no complete test results."""

    release: str
    installed: bool = False
    reason: str = ""
    passed: int = 0
    failed: int = 0  # failures, and errors while setting up
    skipped: int = 0
    seconds: int = 0  # of the tests
    first_failure: str = ""
    skips: dict[str, int] = field(default_factory=dict)  # how often for which reason

    @property
    def ok(self) -> bool:
        """Whether the release is no reason to fail: it cannot be used, or all its tests pass."""
        return not self.installed or (not self.reason and not self.failed and self.passed > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.default_int_handler)
    rows: list[Row] = []
    try:
        package = options.package
        releases = _select(last_releases(_available(package), package), options.minors)
        for release in releases:
            rows.append(check_release(release, options))
            _write(rows, options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(markdown(rows, options))
    return 0 if all(row.ok for row in rows) and any(row.installed for row in rows) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog="Exit status 0: the tests pass on every release that installs.",
    )
    parser.add_argument("--package", choices=PACKAGES, default="deepspeed")
    parser.add_argument("--minors", nargs="+", metavar="X.Y", help="default: all that are tested")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="for pytest")
    parser.add_argument("--output", type=Path, help="default: runs/PACKAGE-releases")
    parser.add_argument("--minutes", type=float, default=30.0, help="limit of one release's tests")
    parser.add_argument("--keep", action="store_true", help="leave the environments in the output")
    options = parser.parse_args(arguments)
    options.package = PACKAGES[options.package]
    options.tests = options.tests or list(options.package.tests)
    for path in options.tests:
        if not (ROOT / path.split("::")[0]).exists():
            parser.error(f"--tests: there is no {path} in {ROOT}")
    output = options.output or Path(f"runs/{options.package.name}-releases")
    options.output = output.resolve()
    return options


def _available(package: Package) -> list[str]:
    """All releases that pip finds, wherever it is configured to look."""
    command = [sys.executable, "-m", "pip", "index", "versions", package.name]
    found = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    listed = re.search(r"^Available versions: (.+)$", found.stdout, re.MULTILINE)
    if listed is None:
        sys.exit(f"pip lists no release of {package.name}: {found.stderr.strip()[-500:]}")
    return listed[1].split(", ")


def last_releases(versions: Iterable[str], package: Package) -> dict[str, str]:
    """{minor "X.Y": its last final release}, from the package's first minor on, oldest first."""
    releases = sorted(map(Version, versions))
    return {
        f"{one.major}.{one.minor}": str(one)
        for one in releases
        if not one.is_prerelease and one >= package.first_minor
    }


def _select(releases: Mapping[str, str], minors: Sequence[str] | None) -> list[str]:
    unknown = [minor for minor in minors or () if minor not in releases]
    if unknown:
        print(f"--minors: {unknown} not among {sorted(releases)}", file=sys.stderr)
        sys.exit(2)
    return [releases[minor] for minor in minors or releases]


def check_release(release: str, options: argparse.Namespace) -> Row:
    """Install `release` into an environment of its own, run the tests there, remove it again."""
    row = Row(release)
    folder = options.output / release
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _say(f"{options.package.name} {release}", "installing")
        python = make_environment(folder / "environment")
        row.reason = _install(options.package, release, python, folder)
        row.installed = not row.reason
        if row.installed:
            _say(f"{options.package.name} {release}", f"testing, {options.minutes:g} min at most")
            _run_tests(row, python, folder, options)
    finally:
        if not options.keep:
            shutil.rmtree(folder / "environment", ignore_errors=True)
    counts = f"{row.passed} passed, {row.failed} failed, {row.skipped} skipped, {row.seconds} s"
    _say(f"{options.package.name} {release}", row.reason or counts)
    return row


def make_environment(folder: Path) -> Path:
    """An environment that sees the packages of the running one after its own; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    base = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", base))
    # Paths in a .pth file come after the folder that holds it.
    (own / "running_environment.pth").write_text("".join(f"{path}\n" for path in _shared()))
    return folder / "bin" / "python"


def _shared() -> list[str]:
    """The folders that hold the packages of the running environment."""
    return [path for path in sys.path if Path(path).name in _SITE]


def _install(package: Package, release: str, python: Path, folder: Path) -> str:
    """Why `release` cannot be used beside the torch of this environment; "" if it can."""
    import torch

    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={Version(torch.__version__).public}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    command = [*pip, f"{package.name}=={release}", "-c", str(constraints)]
    log = folder / "pip.log"
    # Its setup.py imports torch, which an isolated build would not find or would download again.
    # An environment without a package that builds wheels still gets the isolated build.
    for flags in (["--no-build-isolation"], []):
        status = run([*command, *flags], log=log, timeout_s=INSTALL_TIMEOUT_S)
        if status == 0:
            return _why_not_imported(package, release, python, folder)
    errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR: ")]
    return f"does not install: {errors[-1] if errors else _last_line(log)}"


def _why_not_imported(package: Package, release: str, python: Path, folder: Path) -> str:
    """Why it does not import; "" if it does. RuntimeError if what imports is another release."""
    log = folder / "import.log"
    command = [str(python), "-c", _PROBE, package.name, package.module]
    status = run(command, log=log, timeout_s=INSTALL_TIMEOUT_S, cwd=folder)
    if status != 0:
        return f"does not import: {_error_line(log.read_text()) or _last_line(log)}"
    version, metadata, file = json.loads(_last_line(log))
    # pip leaves a release where it is if the running environment has it.
    found = any(Path(file).is_relative_to(one) for one in (folder, *_shared()))
    if not found or {Version(v).base_version for v in (version, metadata)} != {release}:
        raise RuntimeError(
            f"wanted {package.name} {release}, imports {version} ({metadata}) of {file}"
        )
    return ""


def _run_tests(row: Row, python: Path, folder: Path, options: argparse.Namespace) -> None:
    report, log = folder / "report.xml", folder / "pytest.log"
    command = [str(python), "-m", "pytest", *options.tests, "-p", "no:cacheprovider"]
    start = time.monotonic()
    status = run([*command, f"--junitxml={report}"], log=log, timeout_s=60 * options.minutes)
    row.seconds = round(time.monotonic() - start)
    if report.exists():
        read_report(report.read_text(), row)
    if status is None:
        row.reason = f"the tests did not finish within {options.minutes:g} min"
    elif status not in (0, 1) or (status == 1 and not row.failed):
        row.reason = f"pytest ended with status {status}: {_last_line(log)}"


def read_report(text: str, row: Row) -> None:
    """Fill in the counts and the first failure from a JUnit report of pytest."""
    cases = list(ElementTree.fromstring(text).iter("testcase"))
    skips = [skip for case in cases if (skip := case.find("skipped")) is not None]
    row.skips = dict(Counter(skip.get("message") or "no reason given" for skip in skips))
    row.skipped = len(skips)
    problems = [(case, _problem(case)) for case in cases]
    failures = [(case, problem) for case, problem in problems if problem is not None]
    row.failed = len(failures)
    row.passed = len(cases) - row.failed - row.skipped
    if failures:
        case, problem = failures[0]
        detail = problem.text or problem.get("message") or ""
        line = _error_line(detail) or (problem.get("message") or "").split("\n")[0]
        row.first_failure = f"{case.get('name')}: {line}"


def _problem(case: ElementTree.Element) -> ElementTree.Element | None:
    failure = case.find("failure")
    return case.find("error") if failure is None else failure


def _error_line(text: str) -> str:
    """The line of a traceback, or of several ranks' tracebacks, that says what went wrong."""
    lines = [re.sub(r"^(E\s+|\[rank\d+\]:\s*)+", "", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    causes = [line for line in errors if not _AFTERMATH.search(line)]
    return next(iter(causes or errors), "")


def _last_line(log: Path) -> str:
    return next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")


def environment() -> dict[str, str]:
    """The variables of the programs that are run: nothing that leads to other packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "DS_BUILD_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(command: Sequence[str], *, log: Path, timeout_s: float, cwd: Path = ROOT) -> int | None:
    """The exit status of `command`, or None after `timeout_s`. Whatever it started is ended."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end itself and its children; end whatever is left, ranks included.

    Ranks have sessions of their own, so that no signal to a group reaches them.
    """
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(GRACE_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        family += psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def markdown(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """The table that is printed and written."""
    import torch

    names = ("release", "installed", "passed", "failed", "skipped", "seconds", "notes")
    lines = [
        f"{options.package.name} beside torch {torch.__version__}: {' '.join(options.tests)}",
        "",
        f"| {' | '.join(names)} |",
        "|" + "---|" * len(names),
    ]
    for row in rows:
        counts = [row.passed, row.failed, row.skipped, row.seconds] if row.installed else [""] * 4
        problems = [_cell(text) for text in (row.reason, row.first_failure) if text]
        skips = [_cell(f"{count} skipped: {reason}") for reason, count in row.skips.items()]
        note = "; ".join(problems + skips)
        cells = [row.release, "yes" if row.installed else "no", *counts, note]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _cell(text: str, width: int = 200) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= width else text[: width - 3] + "..."


def _write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    content = [asdict(row) | {"ok": row.ok} for row in rows]
    (options.output / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    (options.output / "results.md").write_text(markdown(rows, options) + "\n")


def _say(what: str, message: str) -> None:
    print(f"{what}: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
