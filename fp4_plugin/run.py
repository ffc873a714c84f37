"""FP4 training for a script that nobody may edit.

    python -m fp4_plugin.run train.py --deepspeed_config ds.json
    python -m fp4_plugin.run -m package.train --deepspeed_config ds.json
    deepspeed --module fp4_plugin.run train.py --deepspeed_config ds.json
    torchrun --nproc_per_node=2 -m fp4_plugin.run train.py --deepspeed_config ds.json

`deepspeed.initialize` is armed, then the script runs as `__main__`, with `sys.argv` and
`sys.path[0]` as Python would have set them. DeepSpeed's launcher puts `--local_rank=N` before
everything else; the script gets it as its first argument, where the launcher would have put it.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from fp4_plugin.integrations.deepspeed import arm

__all__ = ["main"]

_USAGE = "usage: python -m fp4_plugin.run [--local_rank=N] (script.py | -m module) [arguments ...]"
_LAUNCHER_OPTION = "--local_rank"


def main(argv: Sequence[str]) -> None:
    """Run the script (or, after `-m`, the module) that `argv` names, with the rest of `argv`."""
    launcher_arguments, rest = _split_launcher_arguments(list(argv))
    is_module = rest[:1] == ["-m"]
    target, arguments = rest[is_module : is_module + 1], rest[is_module + 1 :]
    if not target or target[0].startswith("-"):
        raise SystemExit(_USAGE)
    arm()
    sys.argv = [target[0], *launcher_arguments, *arguments]
    if is_module:
        _set_import_root(os.getcwd())
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        _set_import_root(os.path.dirname(os.path.realpath(target[0])))
        runpy.run_path(target[0], run_name="__main__")


def _set_import_root(folder: str) -> None:
    """Put `folder` where `python -m` put the current one; `python -P` put nothing there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _split_launcher_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """(what DeepSpeed's launcher put in front, the rest)."""
    count = 0
    if argv and argv[0] == _LAUNCHER_OPTION:
        count = 2
    elif argv and argv[0].startswith(f"{_LAUNCHER_OPTION}="):
        count = 1
    return argv[:count], argv[count:]


if __name__ == "__main__":
    main(sys.argv[1:])
