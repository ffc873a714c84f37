"""Trains with and without one part of the section, seed by seed, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fp4_plugin.bench.convergence.settings import ConvergenceOptions
from fp4_plugin.config import find_section, parse_section
from fp4_plugin.errors import ConfigError, MismatchError
from fp4_plugin.integrations.deepspeed.ds_config import read_config

__all__ = ["Outcome", "run_study"]


@dataclass(frozen=True)
class Outcome:
    """One run: losses in nats per token, seconds per step, bytes that rank 0 sent per step."""

    seed: int
    train_loss: float
    held_out_loss: float
    seconds_per_step: float
    wire_bytes_per_step: float


def run_study(options: ConvergenceOptions) -> dict[bool, list[Outcome]]:
    """is the part on? -> one outcome per seed.

    The two runs of a seed follow one another, so that a machine that slows down slows down both.
    Raises ConfigError for bad input and MismatchError, with the end of its log, if a run fails.
    """
    configs = _configs(options)
    outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
    runs = [(seed, is_on) for seed in options.seeds for is_on in (True, False)]
    for seed, is_on in tqdm(runs, unit="run", disable=None):
        outcomes[is_on].append(_run(options, configs[is_on], seed, is_on))
    return outcomes


def _configs(options: ConvergenceOptions) -> dict[bool, Path]:
    """The configuration with the part and the one without it, as files in the output folder."""
    base = {"fp4": {"recipe": "paper"}} if options.config is None else read_config(options.config)
    section = find_section(base)
    if section is None or parse_section(section).resolved()[options.without] is None:
        raise ConfigError(f'the "fp4" section has no {options.without!r} that could be left out')
    options.output.mkdir(parents=True, exist_ok=True)
    files = {}
    for is_on in (True, False):
        content = base if is_on else {**base, "fp4": {**section, options.without: None}}
        files[is_on] = options.output / f"{_name(options, is_on)}.json"
        files[is_on].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return files


def _run(options: ConvergenceOptions, config: Path, seed: int, is_on: bool) -> Outcome:
    folder = options.output / f"{_name(options, is_on)}_seed{seed}"
    command = [sys.executable, "-m", "fp4_plugin.cli", "pretrain", "--no-export"]
    for flag, value in {
        "--config": config,
        "--preset": options.preset,
        "--steps": options.steps,
        "--seed": seed,
        "--data": options.data,
        "--nproc": options.nproc,
        "--output": folder,
    }.items():
        command += [] if value is None else [flag, str(value)]
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if code.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        raise MismatchError(
            f"{' '.join(command)} ended with exit code {code.returncode}, see {log}:\n"
            + "\n".join(tail)
        )
    return _outcome(folder, seed, options.steps)


def _outcome(folder: Path, seed: int, steps: int) -> Outcome:
    report: Mapping[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    manifest = json.loads((folder / "fp4_manifest.json").read_text(encoding="utf-8"))
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    communication = manifest["gradient_communication"]
    return Outcome(
        seed,
        runs[0]["train_loss"],
        runs[0]["held_out_loss"],
        runs[0]["seconds_per_step"],
        communication.get("wire_bytes", 0) / steps,
    )


def _name(options: ConvergenceOptions, is_on: bool) -> str:
    return f"{'with' if is_on else 'without'}_{options.without}"
