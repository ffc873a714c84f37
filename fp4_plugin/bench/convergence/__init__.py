"""Does one part of the `fp4` section change the loss: with and without it, on several seeds.

settings -> study (runs `fp4 pretrain`) -> verdict (table and statement).
"""

from __future__ import annotations
