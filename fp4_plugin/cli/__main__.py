"""`python -m fp4_plugin.cli` is the `fp4` command."""

from __future__ import annotations

import sys

from fp4_plugin.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
