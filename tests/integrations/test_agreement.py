"""Ranks that differ stop together, with the key path, the values and the ranks in the message."""

from __future__ import annotations

import pytest

from fp4_plugin.errors import ConfigError, MismatchError, UnsupportedError
from fp4_plugin.integrations.deepspeed.agreement import (
    common_problem,
    gather,
    require_agreement,
)
from tests.distributed import run_ranks

NESTED = {"fp4": {"linear": {"input": {"granularity": "row"}}, "recipe": "paper"}}
OTHER = {"fp4": {"linear": {"input": {"granularity": "tensor"}}, "recipe": "paper"}}


def test_one_rank_agrees_with_itself_and_keeps_its_error():
    require_agreement(NESTED)
    problem = UnsupportedError("no")
    assert gather(3) == {0: 3}
    assert common_problem(problem) is problem
    assert common_problem(None) is None


def _three_ranks():
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    def complaint(statement, cohort=0):
        try:
            require_agreement(statement, cohort)
        except ConfigError as error:
            return str(error)
        return None

    problem = common_problem(MismatchError("layer 3 ran in BF16") if rank == 1 else None)
    return {
        "same": complaint(NESTED),
        "value": complaint(OTHER if rank == 1 else NESTED),
        "absent": complaint({} if rank == 2 else NESTED),
        "by cohort": complaint({"layers": {f"layer{rank}": "paper"}}, cohort=rank),
        "in cohort": complaint({"layers": {f"layer{rank}": "paper"}}, cohort=rank // 2),
        "problem": f"{type(problem).__name__}: {problem}",
        "no problem": common_problem(None),
    }


@pytest.fixture(scope="module")
def answers():
    return run_ranks(_three_ranks, num_ranks=3, timeout_s=90, warm="torch")


pytestmark = pytest.mark.distributed


def test_every_rank_gets_the_same_answer(answers):
    assert answers[0] == answers[1] == answers[2]


def test_equal_statements_pass(answers):
    assert answers[0]["same"] is None
    assert answers[0]["no problem"] is None


def test_a_differing_value_is_named_with_its_path_and_ranks(answers):
    expected = 'fp4.linear.input.granularity: "row" on rank 0, 2; "tensor" on rank 1'
    assert expected in answers[0]["value"]
    assert "recipe" not in answers[0]["value"]


def test_a_missing_section_is_named(answers):
    assert "absent on rank 2" in answers[0]["absent"]


def test_only_ranks_of_one_cohort_are_compared(answers):
    assert answers[0]["by cohort"] is None
    assert 'layers.layer0: "paper" on rank 0; absent on rank 1' in answers[0]["in cohort"]
    assert "layer2" not in answers[0]["in cohort"]


def test_the_problem_of_one_rank_reaches_all(answers):
    assert answers[2]["problem"] == "MismatchError: on rank 1: layer 3 ran in BF16"
