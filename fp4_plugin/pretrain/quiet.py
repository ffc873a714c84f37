"""Keeps the lines of other libraries from burying the losses; ours come from rank 0 alone."""

from __future__ import annotations

import logging
import os
import warnings

__all__ = ["set_up_logging"]


def set_up_logging() -> None:
    """Before DeepSpeed is imported: INFO of this package on rank 0, warnings of everybody else.

    The process that only starts the ranks has no RANK and nothing to tell.
    """
    logging.basicConfig(format="%(message)s")
    level = logging.INFO if os.environ.get("RANK") == "0" else logging.WARNING
    logging.getLogger("fp4_plugin").setLevel(level)
    # On a CPU every process says that it found no GPU; the banner of the run names the device.
    logging.getLogger("DeepSpeed").addFilter(_is_worth_reading)
    # DeepSpeed calls collectives by names that torch 2.13 is about to drop: not the user's doing.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()
