"""What the report says, and what it must not say."""

from __future__ import annotations

import pytest

from fp4_plugin.bench.ablation.report import Report
from tests.bench.studies import outcome

LOSSES = {
    "bf16": [2.00, 2.10, 1.90],
    "bf16_perturbed": [2.01, 2.09, 1.88],
    "bf16_dge_slope": [1.95, 2.05, 1.85],
    "paper": [1.94, 2.05, 1.85],
    "w4a4_ste": [2.01, 2.11, 1.91],
    "w4a4_tensor": [2.20, 2.30, 2.10],
}


@pytest.fixture
def report(tmp_path):
    return Report(outcome(tmp_path, LOSSES))


def test_noise_floor_comes_from_the_perturbed_arm(report):
    assert report.floor == pytest.approx(0.02)
    assert "noise floor: 0.0200 nats (1.00 %)" in report.text()


def test_table_has_loss_paired_difference_bounds_and_verdict(report):
    rows = {line.split(" | ")[0].strip("| "): line for line in report.arm_table().splitlines()}
    assert rows["w4a4_tensor"] == (
        "| w4a4_tensor | 2.2000 | 2.1000 .. 2.3000 | +0.2000 (+10.00 %) | +0.2000 .. +0.2000 "
        "| +9.00 % .. +11.00 % | higher |"
    )
    assert rows["w4a4_ste"].endswith("| -0.50 % .. +1.50 % | cannot be told apart |")
    assert rows["bf16"].endswith("| - | - | - | - |")


def test_pairs_are_named_in_plain_words(report):
    lines = {line.split(":")[0]: line for line in report.pair_lines()}
    assert lines["paper"] == (
        "paper: lower than bf16, bf16_perturbed, w4a4_ste, w4a4_tensor; cannot be told apart from "
        "bf16_dge_slope"
    )
    assert lines["w4a4_tensor"].startswith("w4a4_tensor: higher than bf16, bf16_perturbed, ")


def test_a_loss_below_bf16_is_called_an_artefact_and_never_a_win(report):
    (slope, paper, advice) = report.artefact_lines()
    assert slope.startswith("bf16_dge_slope ends 0.0500 nats below BF16 (and it quantises nothing)")
    assert paper.startswith("paper ends 0.0533 nats below BF16: no win, but the artefact")
    assert "repeat at a quarter" in advice
    assert "better" not in report.text()


def test_a_study_that_keeps_the_rules_names_no_limits_but_its_batch(report):
    assert report.limit_lines() == ["fewer than 4096 tokens in a batch"]


def test_a_study_that_breaks_the_rules_says_so(tmp_path):
    losses = {arm: values[:1] for arm, values in LOSSES.items()}
    text = Report(outcome(tmp_path, losses, learning_rates=(2e-3,))).text()
    assert "fewer than 3 seeds say nothing" in text
    assert "fewer than 4 learning rates were tried" in text
    assert "at the edge of the sweep" in text
    assert "cannot be told apart from bf16, bf16_perturbed" in text


def test_without_a_noise_floor_no_arm_is_told_apart(tmp_path):
    losses = {**LOSSES, "bf16_perturbed": [2.0, None, 1.9]}
    report = Report(outcome(tmp_path, losses))
    assert "a control diverged, so there is no noise floor" in report.text()
    assert report.verdict("w4a4_tensor") == "cannot be told apart"
    assert report.record()["noise_floor"] is None


def test_record_lists_every_pair_once(report):
    pairs = {frozenset((p["arm"], p["other"])) for p in report.record()["pairs"]}
    assert len(pairs) == len(report.record()["pairs"]) == 15
