"""The `fp4` command. One module per sub-command; each offers `add_parser(subparsers)`."""

from __future__ import annotations

__all__: list[str] = []
