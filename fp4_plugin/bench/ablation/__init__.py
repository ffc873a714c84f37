"""`fp4 bench ablation`: which parts of the method change the held-out loss.

    options --sweep--> learning rate --arms x seeds--> results --pair by seed--> report

Read `arms` (what is compared), `training` (one run), `study` (the protocol), `verdict` (when two
arms may be called different).
"""

from __future__ import annotations
