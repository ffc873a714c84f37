"""`fp4 bench`: measurements that take minutes or hours. One file per benchmark."""

from __future__ import annotations

import argparse

from fp4_plugin.cli.bench import ablation, comm, convergence

__all__ = ["add_parser"]

BENCHMARKS = (ablation, comm, convergence)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure: what FP4 does to the loss, what FP8 gradients do to bytes and time",
        description=__doc__,
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for benchmark in BENCHMARKS:
        benchmark.add_parser(benchmarks)
