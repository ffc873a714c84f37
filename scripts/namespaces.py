"""Two hosts made of namespaces on one Linux machine, and the slow link between them.

A host is a network namespace with a host name of its own (a UTS namespace) and its own /etc/hosts.
The link is a veth pair, slowed down by `tc tbf` on both sides. All of it needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "ADDRESSES",
    "PORT",
    "ROOT",
    "Refused",
    "RunFailed",
    "TwoHosts",
    "own_sent_bytes",
    "require_hosts",
]

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "fp4host"
INTERFACE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500
LOG_CHARACTERS = 3000


class Refused(Exception):
    """This machine does not allow what is needed; the message says what."""


class RunFailed(Exception):
    """A rank failed or did not finish in time."""


class TwoHosts:
    """Two hosts, node0 and node1, and the link between them. A context manager."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self._names = [f"{PREFIX}-{os.getpid()}-{host}" for host in (0, 1)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> TwoHosts:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            end(process)
        for name in self._names:
            remove_host(name)

    def _build(self) -> None:
        for host, name in enumerate(self._names):
            configure("ip", "netns", "add", name)
            configure("ip", "-n", name, "link", "set", "lo", "up")
            self._write_names(host)
        first, second = self._names
        pair = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
        configure("ip", "link", "add", INTERFACE, "netns", first, *pair)
        for name, address in zip(self._names, ADDRESSES, strict=True):
            configure("ip", "-n", name, "link", "set", INTERFACE, "up")
            configure("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            limit = ("tbf", "rate", self._rate, "burst", "64kb", "latency", "50ms")
            configure("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limit)

    def _write_names(self, host: int) -> None:
        """`ip netns exec` shows these files as /etc/*: no name server is asked."""
        folder = Path("/etc/netns") / self._names[host]
        folder.mkdir(parents=True)
        nodes = [f"{address} node{n}\n" for n, address in enumerate(ADDRESSES)]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *nodes]))
        (folder / "nsswitch.conf").write_text("hosts: files\n")

    def cut_link(self) -> None:
        """From now on nothing arrives at either host."""
        configure("ip", "-n", self._names[1], "link", "set", INTERFACE, "down")

    def sent_bytes(self, host: int) -> int:
        command = ["ip", "netns", "exec", self._names[host], "cat", "/proc/net/dev"]
        return sent_bytes(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )

    def run(self, commands: Sequence[Sequence[str]], folder: Path, timeout_s: float) -> list[int]:
        """One command per host, at once; the bytes each host sent meanwhile.

        Raises RunFailed, with the end of what it printed, for a command that fails.
        """
        before = [self.sent_bytes(host) for host in (0, 1)]
        logs = [folder / f"host{host}.log" for host in (0, 1)]
        started = [self._start(host, commands[host], logs[host]) for host in (0, 1)]
        deadline = time.monotonic() + timeout_s
        while True:
            codes = [process.poll() for process in started]  # None: still running
            if None not in codes or any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for process in started:
            end(process)
        self._processes.clear()
        if any(codes) or None in codes:
            # Where one has failed, the other is a victim.
            host = max((0, 1), key=lambda host: (bool(codes[host]), codes[host] is None))
            text = logs[host].read_text(errors="replace")[-LOG_CHARACTERS:]
            raise RunFailed(f"node{host} {_ending(codes[host])}:\n{text}")
        return [self.sent_bytes(host) - before[host] for host in (0, 1)]

    def _start(self, host: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        as_host = ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c"]
        as_host += [f'hostname node{host} && exec "$@"', "sh", *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                as_host, env=environment(host), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process


def _ending(code: int | None) -> str:
    return "did not finish in time" if code is None else f"ended with {code}"


def environment(host: int) -> dict[str, str]:
    """What a rank needs to find the other; one thread each, as two ranks share this machine."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {
        "RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


def sent_bytes(net_dev: str) -> int:
    """Of the interface between the hosts, from the text of /proc/net/dev."""
    for line in net_dev.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RunFailed(f"there is no {INTERFACE} in /proc/net/dev")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and everything it started; wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def configure(*command: str) -> None:
    """Run a command that builds the hosts; Refused, with what it said, if the kernel will not."""
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise Refused(f"`{' '.join(command)}` failed: {result.stderr.strip()}")


def remove_host(name: str) -> None:
    """Whatever exists of a host: its processes, its namespace, its files."""
    command = ["ip", "netns", "pids", name]
    listed = subprocess.run(command, check=False, capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def remove_leftovers() -> None:
    """Hosts of a run of this script that was killed."""
    folder = Path("/run/netns")
    names = [path.name for path in folder.glob(f"{PREFIX}-*-*")] if folder.is_dir() else []
    for name in names:
        if not Path("/proc", name.split("-")[1]).exists():
            remove_host(name)


def require_hosts() -> None:
    """Raise Refused where namespaces cannot be made."""
    if sys.platform != "linux":
        raise Refused(f"network namespaces exist on Linux only, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise Refused("making network namespaces needs root: run it with sudo, or in a container")
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        raise Refused(f"{', '.join(missing)} not found: install iproute2 and util-linux")


def own_sent_bytes() -> int:
    """Bytes that the host this process runs on has sent, headers included."""
    return sent_bytes(Path("/proc/net/dev").read_text())
