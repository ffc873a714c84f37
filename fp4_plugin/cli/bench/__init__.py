"""`fp4 bench`: measurements that take minutes or hours. One file per benchmark."""

from __future__ import annotations

import argparse

from fp4_plugin.cli.bench import ablation, comm, convergence, optim

__all__ = ["add_parser"]

BENCHMARKS = (ablation, comm, convergence, optim)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure: FP4 and the loss, FP8 gradients and bytes and time, 16-bit optimizer states",
        description=__doc__,
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for benchmark in BENCHMARKS:
        benchmark.add_parser(benchmarks)
