"""One finding of `fp4 doctor`, and the guard that keeps one broken check from hiding the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "NamedCheck", "Status", "run_guarded"]

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """`detail` is what was seen; `remedy`, often a command, is what to do about it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


NamedCheck = tuple[str, Callable[[], list[Check]]]


def run_guarded(checks: Iterable[NamedCheck]) -> list[Check]:
    """Run each named check; one that raises becomes a failure that says so.

    Checks probe broken installations on purpose: the wrong apex raises whatever it likes.
    """
    findings: list[Check] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:
            detail = f"the check itself failed with {type(error).__name__}: {error}"
            findings.append(Check(name, "fail", detail, "a bug of fp4 doctor; please report it"))
    return findings
