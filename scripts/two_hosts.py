#!/usr/bin/env python3
"""Two hosts on one machine, with a slow link between them: does FP8 communication pay there?

    sudo python scripts/two_hosts.py --collectives     the bare reductions
    sudo python scripts/two_hosts.py                   a DeepSpeed ZeRO-2 job, with and without

Each host is a network and a UTS namespace, the link a veth pair that `tc tbf` slows down. Bytes are
the kernel's: what an interface sent by /proc/net/dev, with the headers of TCP, IP and Ethernet.
Namespaces are removed at the end, also after Ctrl-C.

Exit codes: 0 measured, 1 too many bytes were sent, 2 a run failed, 3 this machine does not allow it
(the reason is printed).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from namespaces import (
    ADDRESSES,
    PORT,
    ROOT,
    Refused,
    RunFailed,
    TwoHosts,
    own_sent_bytes,
    require_hosts,
)

sys.path.insert(0, str(ROOT))

REFUSED = 3
# What was promised about bytes, against an all-reduce in BF16 over the same link.
BOUNDS = {"all_reduce": 0.53, "reduce_to_owners": 0.28}
MICRO_BATCHES = (1, 3)
FIRST_STEPS = 3  # they allocate; they are not the speed of the run
RATE = r"(\d+(\.\d+)?)([kmg]?)bit"
CORPUS_CHARACTERS = 1_000_000


def collectives_rank(settings: Mapping[str, Any]) -> None:
    """What a host runs: all contenders in turn; rank 0 leaves seconds, both leave bytes."""
    import torch
    import torch.distributed as dist

    from fp4_plugin.bench.comm.contenders import compressed, plain
    from fp4_plugin.bench.comm.gradients import heavy_tailed
    from fp4_plugin.comm.codec import BlockCodec
    from fp4_plugin.comm.transport import members_of

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    members, codec = members_of(), BlockCodec.named(settings["format"], settings["block_size"])
    contenders = [plain("all_reduce", torch.bfloat16, members)]
    contenders += [compressed(operation, codec, members) for operation in BOUNDS]
    source = heavy_tailed(settings["size"], 0, members.rank)
    seconds = torch.zeros(len(contenders), settings["rounds"], dtype=torch.float64)
    sent = torch.zeros_like(seconds, dtype=torch.int64)
    for number in range(-1, settings["rounds"]):  # the first is for warming up
        for index, one in enumerate(contenders):
            buffer = source.clone()
            dist.barrier()
            bytes_before, start = own_sent_bytes(), time.perf_counter()
            one.reduce(buffer)
            elapsed = time.perf_counter() - start
            dist.barrier()  # what was sent has arrived
            if number >= 0:
                seconds[index, number] = elapsed
                sent[index, number] = own_sent_bytes() - bytes_before
    for values in (seconds, sent):
        dist.all_reduce(values, dist.ReduceOp.MAX)
    if members.rank == 0:
        record = {"seconds": seconds.tolist(), "bytes": sent.tolist()}
        Path(settings["results"]).write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def bits_per_second(rate: str) -> float:
    """Of a rate as tc writes it."""
    number, unit = re.fullmatch(RATE, rate).group(1, 3)  # type: ignore[union-attr]
    return float(number) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[unit]


def measure_collectives(hosts: TwoHosts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes and times of both reductions against BF16's all-reduce."""
    from fp4_plugin.bench.comm.verdict import judge, ratios

    with tempfile.TemporaryDirectory(prefix="fp4_two_hosts_") as folder:
        results = Path(folder) / "results.json"
        settings = {
            "size": arguments.size, "rounds": arguments.rounds, "results": str(results),
            "format": arguments.format, "block_size": arguments.block_size,
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", json.dumps(settings)]
        hosts.run([command, command], Path(folder), 60 * arguments.timeout_minutes)
        record = json.loads(results.read_text())
    baseline_bytes = statistics.median(record["bytes"][0])
    rows = []
    for index, operation in enumerate(BOUNDS, start=1):
        median_bytes = statistics.median(record["bytes"][index])
        time_ratio = ratios(record["seconds"][index], record["seconds"][0])
        rows.append({
            "operation": operation,
            "bytes_ratio": median_bytes / baseline_bytes,
            "bound": BOUNDS[operation],
            "time_ratio": vars(time_ratio),
            "verdict": judge(time_ratio),
            "bytes": median_bytes,
            "bf16_bytes": baseline_bytes,
            "seconds": statistics.median(record["seconds"][index]),
            "bf16_seconds": statistics.median(record["seconds"][0]),
        })  # fmt: skip
    return {"rate": arguments.rate, "elements": arguments.size, "collectives": rows}


def show_collectives(record: Mapping[str, Any]) -> None:
    print(
        f"\n{record['elements']:,} elements, 2 hosts, {record['rate']}; bytes are what the busier "
        "host sent, headers included\n\n"
        "| operation | bytes / bf16 all-reduce | bound | time / bf16 | spread | bytes | ms | "
        "against bf16 |\n|---|---|---|---|---|---|---|---|"
    )
    for row in record["collectives"]:
        ratio = row["time_ratio"]
        print(
            f"| {row['operation']} | {row['bytes_ratio']:.3f} | {row['bound']} | "
            f"{ratio['median']:.2f} | {ratio['low']:.2f} .. {ratio['high']:.2f} | "
            f"{row['bytes']:,.0f} of {row['bf16_bytes']:,.0f} | "
            f"{1e3 * row['seconds']:.0f} of {1e3 * row['bf16_seconds']:.0f} | {row['verdict']} |"
        )
    bits_per_s = 8 * row["bf16_bytes"] / row["bf16_seconds"]
    print(f"\nBF16 sent {bits_per_s / 1e6:.0f} Mbit/s.")
    if bits_per_s < bits_per_second(record["rate"]) / 2:
        print("That is less than half of what the link takes: this machine was the limit, too.")


@dataclass(frozen=True)
class JobRun:
    """One run: bytes of the busier host from start to end, seconds of each step but the first."""

    sent: int
    seconds: tuple[float, ...]


class Job:
    """`fp4 pretrain` on both hosts, through torchrun, as two processes under ZeRO-2."""

    def __init__(self, hosts: TwoHosts, folder: Path, arguments: argparse.Namespace) -> None:
        self._hosts = hosts
        self._folder = folder
        self._arguments = arguments
        self._corpus = folder / "corpus.txt"
        self._corpus.write_text(library_text())

    def run(self, *, compressed: bool, steps: int, micro_batches: int) -> JobRun:
        arm = "fp8" if compressed else "bf16"
        print(f"{arm}: {steps} steps of {micro_batches} micro batch(es)", flush=True)
        output = self._folder / "run"
        shutil.rmtree(output, ignore_errors=True)
        config = self._folder / f"{arm}.json"
        config.write_text(json.dumps(self._ds_config(compressed), indent=1))
        flags = {
            "--config": config, "--output": output, "--steps": steps, "--data": self._corpus,
            "--cache-dir": self._folder / "tokens", "--grad-accum": micro_batches,
            "--micro-batch": 1, "--seq-len": self._arguments.seq_len, "--eval-sequences": 2,
            "--preset": self._arguments.preset, "--timeout-minutes": 2,
        }  # fmt: skip
        job = [str(text) for pair in flags.items() for text in pair]
        commands = [[*torchrun(host), *job, "--no-export"] for host in (0, 1)]
        timeout_s = 60 * self._arguments.timeout_minutes
        sent = self._hosts.run(commands, self._folder, timeout_s)
        with (output / "losses.csv").open() as file:
            seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
        return JobRun(max(sent), tuple(seconds[FIRST_STEPS:]))

    def _ds_config(self, compressed: bool) -> dict[str, Any]:
        """The twins differ in nothing but `gradient_communication`."""
        settings = {"format": self._arguments.format, "block_size": self._arguments.block_size}
        return {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self._arguments.zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            # The BF16 recipe: simulated FP4 would only add arithmetic to both.
            "fp4": {
                "recipe": "bf16",
                "gradient_communication": settings if compressed else None,
            },
        }


def torchrun(host: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", "--node-rank", str(host), "--max-restarts", "0"]
    command += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    return [*command, "--module", "fp4_plugin.pretrain"]


def library_text() -> str:
    """Some of the standard library's source, the same on every machine with this Python."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, texts)) > CORPUS_CHARACTERS:
            break
    return "\n\n".join(texts)


def measure_job(hosts: TwoHosts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Repeats with and without compression in turn, then the runs that separate the bytes.

    More micro batches per step change nothing but the gradients that are reduced (under ZeRO-2
    after each); more steps change gradients and the gathering of parameters. Start, evaluation and
    end cancel out in both differences.
    """
    from fp4_plugin.bench.comm.verdict import judge, ratios

    steps, (few, many) = arguments.steps, MICRO_BATCHES
    with tempfile.TemporaryDirectory(prefix="fp4_two_hosts_") as folder:
        job = Job(hosts, Path(folder), arguments)
        job.run(compressed=False, steps=1, micro_batches=few)  # fills the token cache
        runs: dict[bool, list[JobRun]] = {True: [], False: []}
        for number in range(arguments.repeats):
            # The other one first each time: neither always runs on a warmer machine.
            for compressed in sorted(runs, reverse=number % 2 == 0):
                runs[compressed].append(
                    job.run(compressed=compressed, steps=steps, micro_batches=few)
                )
        gradients, steps_bytes = {}, {}
        for compressed in (False, True):
            base = statistics.median(run.sent for run in runs[compressed])
            more = job.run(compressed=compressed, steps=steps, micro_batches=many)
            longer = job.run(compressed=compressed, steps=2 * steps, micro_batches=few)
            gradients[compressed] = (more.sent - base) / (steps * (many - few))
            steps_bytes[compressed] = (longer.sent - base) / steps
    medians = {c: [statistics.median(run.seconds) for run in runs[c]] for c in runs}
    time_ratio = ratios(medians[True], medians[False])
    return {
        "rate": arguments.rate,
        "preset": arguments.preset,
        "zero_stage": arguments.zero_stage,
        "gradient_bytes": {"fp8": gradients[True], "bf16": gradients[False]},
        "step_bytes": {"fp8": steps_bytes[True], "bf16": steps_bytes[False]},
        "run_bytes": {
            "fp8": [run.sent for run in runs[True]], "bf16": [run.sent for run in runs[False]],
        },
        "gradient_bytes_ratio": gradients[True] / gradients[False],
        "step_bytes_ratio": steps_bytes[True] / steps_bytes[False],
        "seconds_per_step": {"fp8": medians[True], "bf16": medians[False]},
        "time_ratio": vars(time_ratio),
        "verdict": judge(time_ratio),
        "bound": BOUNDS["reduce_to_owners" if arguments.zero_stage in (1, 2) else "all_reduce"],
    }  # fmt: skip


def show_job(record: Mapping[str, Any]) -> None:
    ratio, seconds = record["time_ratio"], record["seconds_per_step"]
    print(
        f"\n{record['preset']}, ZeRO-{record['zero_stage']}, 2 hosts, {record['rate']}; bytes are "
        "what the busier host sent, headers included\n\n"
        "| | fp8 / bf16 | fp8 | bf16 |\n|---|---|---|---|"
    )
    for name, title in (
        ("gradient_bytes", "bytes of gradients, per micro batch"),
        ("step_bytes", "all bytes, per step of one micro batch"),
    ):
        fp8, bf16 = record[name]["fp8"], record[name]["bf16"]
        print(f"| {title} | {fp8 / bf16:.3f} | {fp8:,.0f} | {bf16:,.0f} |")
    rest = [record["step_bytes"][arm] - record["gradient_bytes"][arm] for arm in ("fp8", "bf16")]
    print(f"| of these not gradients | {rest[0] / rest[1]:.3f} | {rest[0]:,.0f} | {rest[1]:,.0f} |")
    fp8, bf16 = (statistics.median(seconds[arm]) for arm in ("fp8", "bf16"))
    print(
        f"| seconds per step | {ratio['median']:.2f} ({ratio['low']:.2f} .. {ratio['high']:.2f}) "
        f"| {fp8:.3f} | {bf16:.3f} |\n\nIn time, compression here: {record['verdict']}."
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--collectives", action="store_true", help="measure the bare reductions, no training")
    add("--rate", default="200mbit", help="of the link, as tc writes it (default: 200mbit)")
    add("--format", default="e4m3", help="on the wire: e4m3 or e5m2 (default: e4m3)")
    add("--block-size", type=int, default=1024, metavar="N", help="(default: 1024)")
    add("--output", type=Path, metavar="FILE", help="write everything as JSON")
    add("--timeout-minutes", type=float, default=10.0, metavar="M", help="of one run (default: 10)")
    bare = parser.add_argument_group("with --collectives")
    bare.add_argument("--size", type=int, default=4_194_304, metavar="N", help="elements, even")
    bare.add_argument("--rounds", type=int, default=11, metavar="N", help="(default: 11)")
    job = parser.add_argument_group("without")
    job.add_argument("--steps", type=int, default=8, metavar="N", help="per run (default: 8)")
    job.add_argument("--repeats", type=int, default=3, metavar="N", help="per arm (default: 3)")
    job.add_argument("--preset", default="tiny", help="model (default: tiny)")
    job.add_argument("--seq-len", type=int, default=128, metavar="N", help="(default: 128)")
    job.add_argument("--zero-stage", type=int, default=2, choices=range(4), help="(default: 2)")
    add("--rank", type=json.loads, help=argparse.SUPPRESS)  # what a host runs
    arguments = parser.parse_args(argv)
    for name in ("block_size", "size", "rounds", "repeats", "timeout_minutes"):
        if not 0 < getattr(arguments, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if not re.fullmatch(RATE, arguments.rate):
        parser.error(f"--rate {arguments.rate}: must be like 200mbit or 1gbit")
    if arguments.size % 2:
        parser.error(f"--size {arguments.size}: must be even, as there are two hosts")
    if arguments.steps <= FIRST_STEPS:
        parser.error(f"--steps {arguments.steps}: more than {FIRST_STEPS} are needed")
    return arguments


def measure(arguments: argparse.Namespace) -> int:
    require_hosts()
    with TwoHosts(arguments.rate) as hosts:
        record = (measure_collectives if arguments.collectives else measure_job)(hosts, arguments)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.collectives:
        show_collectives(record)
        too_many = [r for r in record["collectives"] if r["bytes_ratio"] > r["bound"]]
    else:
        show_job(record)
        too_many = [record] if record["gradient_bytes_ratio"] > record["bound"] else []
    if too_many:
        print("two_hosts: more bytes than promised", file=sys.stderr)
    return 1 if too_many else 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.rank is not None:
        collectives_rank(arguments.rank)
        return 0
    # A polite request to stop cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return measure(arguments)
    except Refused as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        return REFUSED
    except RunFailed as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("two_hosts: interrupted; the namespaces are removed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
