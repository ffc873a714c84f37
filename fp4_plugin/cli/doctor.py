"""`fp4 doctor`: what this machine can run, and what is known to go wrong on it.

Each check gives a name, a status (ok, warn, fail), what was seen, and what to do about it. The exit
code is 1 if any check fails, so that a job script can start with `fp4 doctor`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from fp4_plugin.cli.check import Check
from fp4_plugin.cli.check_installation import installation_checks
from fp4_plugin.cli.check_machine import machine_checks

__all__ = ["add_parser", "format_table", "run_checks"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check versions, devices, kernels and known traps of this machine",
        description="Check this machine. Exit code 0 if nothing fails, 1 otherwise.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=_run)


def run_checks() -> list[Check]:
    """All checks of this machine, in the order in which they are shown."""
    return [*installation_checks(), *machine_checks()]


def format_table(checks: Sequence[Check], *, width: int) -> str:
    """The checks as an aligned table of at most `width` characters a line (if that is possible)."""
    name_width = max(len(check.name) for check in checks)
    margin = " " * (6 + name_width + 2)
    lines: list[str] = []
    for check in checks:
        first = f"{check.status:<6}{check.name:<{name_width}}  "
        lines += textwrap.wrap(check.detail, width, initial_indent=first, subsequent_indent=margin)
        if check.remedy:
            # Not wrapped: a remedy is often a command to copy.
            lines.append(f"{margin}-> {check.remedy}")
    return "\n".join(lines)


def _run(arguments: argparse.Namespace) -> int:
    checks = run_checks()
    counts = Counter(check.status for check in checks)
    if arguments.json:
        report = {"ok": not counts["fail"], "checks": [asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        print(f"fp4 doctor on {platform.node()} ({platform.platform()})\n")
        print(format_table(checks, width=max(72, min(shutil.get_terminal_size().columns, 110))))
        print(f"\n{counts['ok']} ok, {counts['warn']} to note, {counts['fail']} failed")
    return 1 if counts["fail"] else 0
