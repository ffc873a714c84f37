"""One rank of `fp4 bench comm`: `python -m fp4_plugin.bench.comm.worker FOLDER RANK NUM_RANKS`.

FOLDER holds `options.json` and the store by which the ranks find each other. Rank 0 leaves
`results.json` there; a rank that fails leaves `error_RANK.txt`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fp4_plugin.bench.comm.measure import WARMUP_ROUNDS, measure
from fp4_plugin.bench.comm.settings import CommOptions
from fp4_plugin.comm.transport import members_of
from fp4_plugin.errors import Fp4Error

__all__ = ["ERROR_NAME", "OPTIONS_NAME", "RESULTS_NAME", "main"]

OPTIONS_NAME, RESULTS_NAME, ERROR_NAME = "options.json", "results.json", "error_{rank}.txt"
# A collective waits at most this long, and no longer than the whole job.
_COLLECTIVE_MINUTES = 2.0


def main(folder: Path, rank: int, num_ranks: int) -> int:
    """Measure, and leave the results; 0, or 2 after an error that is on disk."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    options = CommOptions.from_json((folder / OPTIONS_NAME).read_text(encoding="utf-8"))
    try:
        _run(folder, rank, num_ranks, options)
    except (Fp4Error, RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        (folder / ERROR_NAME.format(rank=rank)).write_text(text, encoding="utf-8")
        return 2
    return 0


def _end_with_parent() -> None:
    """Leave as soon as stdin, a pipe held by the parent, is closed: its end is ours."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _run(folder: Path, rank: int, num_ranks: int, options: CommOptions) -> None:
    import torch.distributed as dist

    with contextlib.suppress(StopIteration):
        # gloo would look up the host's name otherwise, which not every machine resolves.
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.FileStore(str(folder / "store"), num_ranks)  # type: ignore[attr-defined]
    timeout = timedelta(minutes=min(options.timeout_minutes, _COLLECTIVE_MINUTES))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    results = _measure_all(options, rank, num_ranks)
    if rank == 0:
        aside = folder / f"{RESULTS_NAME}.tmp"
        aside.write_text(json.dumps(results), encoding="utf-8")
        aside.replace(folder / RESULTS_NAME)
    _leave_together(store, num_ranks)


def _measure_all(options: CommOptions, rank: int, num_ranks: int) -> list[dict[str, Any]]:
    members = members_of()
    jobs = [(operation, size) for operation in options.operations for size in options.sizes]
    results = []
    with tqdm(
        total=len(jobs) * (options.rounds + WARMUP_ROUNDS), desc=f"{num_ranks} ranks", unit="round",
        disable=rank > 0 or not sys.stderr.isatty(), dynamic_ncols=True, leave=False,
    ) as bar:  # fmt: skip
        for operation, size in jobs:
            bar.set_postfix_str(f"{operation}, {size:,} elements", refresh=False)
            results += measure(operation, size, options, members, bar.update)
    return [one.record() for one in results]


def _leave_together(store: Any, num_ranks: int) -> None:
    """End every process once all are done, without tearing gloo down.

    gloo's teardown aborts a process now and then when a peer has closed its sockets first.
    """
    import torch.distributed as dist

    dist.barrier()
    left = store.add("left", 1)
    while left < num_ranks:
        time.sleep(0.01)
        left = store.add("left", 0)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
