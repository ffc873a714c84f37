"""A rank that stops in the middle of training: the others end with an error, in the time given."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest

from fp4_plugin.errors import CommunicationError
from tests.distributed import started_ranks

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timed]

TIMEOUT_S = 5.0
MARGIN_S = 15.0
STEPS_BEFORE = 2


def train(fate):
    """What each rank runs; rank 1 meets its fate after a few steps."""
    import deepspeed

    from tests.integrations.training import Trainer, batch, ds_config

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    deepspeed.init_distributed("gloo", timeout=limit, verbose=False)
    trainer = Trainer(ds_config(2, {"recipe": "bf16", "gradient_communication": {}}))
    for step in range(STEPS_BEFORE):
        trainer.step(batch(step))
    if os.environ["RANK"] == "1":
        print("stopping", flush=True)
        os.kill(os.getpid(), getattr(signal, fate))
    start = time.monotonic()
    try:
        while True:
            trainer.step(batch(0))
    except CommunicationError as error:
        print(f"waited {time.monotonic() - start:.1f} s: {error}", flush=True)
    os._exit(0)


def wait_for(text, path, limit_s):
    deadline = time.monotonic() + limit_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.exists() and path.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_the_other_rank_ends_with_an_error_within_the_timeout(fate, tmp_path):
    with started_ranks(train, fate, warm="deepspeed", logs=tmp_path):
        wait_for("stopping", tmp_path / "rank1.log", 120)
        wait_for("waited", tmp_path / "rank0.log", TIMEOUT_S + MARGIN_S)
    text = (tmp_path / "rank0.log").read_text()
    line = next(one for one in text.splitlines() if "waited" in one)
    print(line)
    assert "FP8 all-to-all failed on rank 0" in line
