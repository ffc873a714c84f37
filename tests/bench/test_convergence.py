"""`fp4 bench convergence`: what it claims, and one real study as small as one can be."""

from __future__ import annotations

import json

import pytest

from fp4_plugin.bench.convergence.settings import ConvergenceOptions
from fp4_plugin.bench.convergence.study import Outcome
from fp4_plugin.bench.convergence.verdict import Verdict
from fp4_plugin.cli.main import main
from fp4_plugin.errors import ConfigError


def outcomes(*losses):
    return [Outcome(seed, loss, loss, 1.0, 0.0) for seed, loss in enumerate(losses)]


def test_a_difference_smaller_than_that_of_seeds_is_within_the_noise():
    verdict = Verdict("part", outcomes(2.01, 2.11, 1.91), outcomes(2.0, 2.1, 1.9))
    assert verdict.differences() == pytest.approx([0.01, 0.01, 0.01])
    assert verdict.seed_noise() == pytest.approx(0.1)
    assert "+0.0100 nats on average, within the seed noise of 0.1000" in verdict.sentence()


def test_a_larger_one_is_called_outside():
    verdict = Verdict("part", outcomes(2.3, 2.3), outcomes(2.0, 2.1))
    assert "OUTSIDE" in verdict.sentence()


def test_one_seed_says_nothing():
    assert "says nothing" in Verdict("part", outcomes(2.3), outcomes(2.0)).sentence()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"without": "linear"}, "--without linear: allowed are gradient_communication"),
        ({"seeds": ()}, "--seeds"),
        ({"seeds": (1, 1)}, "--seeds"),
        ({"steps": 0}, "--steps 0"),
    ],
)
def test_what_cannot_be_run_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ConvergenceOptions(**settings)


def test_a_section_without_the_part_is_refused(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"fp4": {"recipe": "bf16"}}))
    output = str(tmp_path / "out")
    arguments = ["bench", "convergence", "--config", str(config), "--output", output]
    assert main(arguments) == 2
    assert "no 'gradient_communication' that could be left out" in capsys.readouterr().err


def test_a_run_that_fails_is_named_with_the_end_of_its_log(tmp_path, capsys):
    arguments = ["bench", "convergence", "--output", str(tmp_path), "--data", str(tmp_path / "no")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "exit code 2" in error
    assert "with_gradient_communication_seed0.log" in error


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_study_trains_both_and_reports(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for index in range(30):
        (tmp_path / "text" / f"{index}.txt").write_text(f"line {index} of a small text\n" * 40)
    arguments = ["bench", "convergence", "--output", str(tmp_path), "--steps", "1", "--seeds", "5"]
    assert main([*arguments, "--data", str(tmp_path / "text")]) == 0
    assert "says nothing" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["with"][0]["seed"] == report["without"][0]["seed"] == 5
    assert report["with"][0]["wire_bytes_per_step"] > 0
    assert report["without"][0]["wire_bytes_per_step"] == 0
