"""Checkpoints that can be trusted: written aside, checksummed, put in place in one moment.

files -> manifest -> pending (writing) / verification -> search (reading). Nothing here knows a
framework, or more than one process: integrations share the work over their ranks.
"""

from __future__ import annotations

from fp4_plugin.checkpoint.files import write_json, write_safetensors, write_text
from fp4_plugin.checkpoint.manifest import CHECKPOINT_NAME, FileRecord, Manifest, describe_file
from fp4_plugin.checkpoint.pending import PendingCheckpoint
from fp4_plugin.checkpoint.preemption import Preemption
from fp4_plugin.checkpoint.rng import restore_rng, save_rng
from fp4_plugin.checkpoint.search import committed, find_folder, last_good, read_latest
from fp4_plugin.checkpoint.space import require_space
from fp4_plugin.checkpoint.verification import verify_checkpoint

__all__ = [
    "CHECKPOINT_NAME",
    "FileRecord",
    "Manifest",
    "PendingCheckpoint",
    "Preemption",
    "committed",
    "describe_file",
    "find_folder",
    "last_good",
    "read_latest",
    "require_space",
    "restore_rng",
    "save_rng",
    "verify_checkpoint",
    "write_json",
    "write_safetensors",
    "write_text",
]
