"""`torchrun ... -m fp4_plugin.integrations.megatron pretrain_gpt.py ...`: see launch.py."""

from __future__ import annotations

import sys

from fp4_plugin.integrations.megatron.launch import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
