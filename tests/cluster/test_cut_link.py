"""A link that is cut in the middle of a series of reductions: both ends get an error, in time."""

from __future__ import annotations

import datetime
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.distributed import ROOT

pytestmark = pytest.mark.timed

SCRIPTS = ROOT / "scripts"
TIMEOUT_S = 5.0
MARGIN_S = 10.0


def reduce_until_it_fails(rank: int, address: str) -> None:
    """What each host runs; says "ready" once reductions work, and how long the failing one took."""
    import torch
    import torch.distributed as dist

    from fp4_plugin import comm
    from fp4_plugin.errors import CommunicationError

    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2, timeout=limit
    )
    start, is_ready = time.monotonic(), False
    try:
        while True:
            start = time.monotonic()
            tensor = torch.ones(100_000)
            comm.all_reduce(tensor)
            assert (tensor == 2).all()
            if not is_ready:
                print("ready", flush=True)
                is_ready = True
    except CommunicationError as error:
        print(f"waited {time.monotonic() - start:.1f} s: {error}", flush=True)


def wait_for(word: str, logs: list[Path], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not all(log.exists() and word in log.read_text() for log in logs):
        assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
        time.sleep(0.05)


@pytest.mark.distributed
def test_both_ends_of_a_cut_link_get_an_error_within_the_timeout(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import namespaces

    address = f"{namespaces.ADDRESSES[0]}:{namespaces.PORT}"
    call = "from tests.cluster.test_cut_link import reduce_until_it_fails as run; run({}, {!r})"
    commands = [[sys.executable, "-c", call.format(host, address)] for host in (0, 1)]
    logs = [tmp_path / f"host{host}.log" for host in (0, 1)]
    try:
        namespaces.require_hosts()
        with namespaces.TwoHosts("1gbit") as hosts:
            series = threading.Thread(target=hosts.run, args=(commands, tmp_path, 90.0))
            series.start()
            wait_for("ready", logs, 60)
            hosts.cut_link()
            wait_for("waited", logs, TIMEOUT_S + MARGIN_S)
            series.join(30)
    except namespaces.Refused as reason:
        pytest.skip(str(reason))
    for rank, log in enumerate(logs):
        line = next(one for one in log.read_text().splitlines() if "waited" in one)
        print(line[:120])
        assert f"failed on rank {rank}" in line
        assert float(re.findall(r"waited ([\d.]+) s", line)[0]) < TIMEOUT_S + 2
