"""Options: the flags, their limits, and the way to a worker process."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fp4_plugin.errors import ConfigError
from fp4_plugin.pretrain.arguments import add_arguments, options_from
from fp4_plugin.pretrain.options import PretrainOptions


def _parse(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_from(parser.parse_args(argv))


def test_no_flag_means_the_defaults():
    assert _parse() == PretrainOptions()


def test_options_reach_the_worker_as_they_are():
    options = _parse("--data", "a/b", "--lr", "1e-4", "--twin", "--no-export", "--steps", "7")
    assert PretrainOptions.from_json(options.to_json()) == options
    assert (options.data, options.lr, options.export) == (Path("a/b"), 1e-4, False)


def test_the_argument_of_the_deepspeed_launcher_is_accepted():
    assert _parse("--local_rank=1") == PretrainOptions()


@pytest.mark.parametrize(
    "flag",
    [
        *("--steps", "--lr", "--nproc", "--micro-batch", "--eval-interval"),
        *("--save-interval", "--keep"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_count_that_is_not_positive_is_refused(flag, value):
    with pytest.raises(ConfigError, match=f"{flag} .*must be above 0"):
        _parse(flag, value)


@pytest.mark.parametrize("flag", ["--lr", "--timeout-minutes"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(flag, value):
    with pytest.raises(ConfigError, match=f"{flag} .*finite"):
        _parse(f"{flag}={value}")


def test_two_lengths_of_the_run_are_refused():
    with pytest.raises(ConfigError, match="choose one"):
        _parse("--steps", "1", "--tokens", "2")


def test_a_seed_outside_32_bits_is_refused():
    with pytest.raises(ConfigError, match="--seed"):
        _parse("--seed", str(1 << 32))
