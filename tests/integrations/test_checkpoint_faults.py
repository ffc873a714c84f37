"""Disks that fill up and processes that are killed: the checkpoint before stays, all ranks say why.

What does not end a process shares one spawn. Ranks that are killed need one each; a last one goes
on from what they left, beside a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fp4_plugin.checkpoint import Manifest, last_good, read_latest
from fp4_plugin.integrations.deepspeed import checkpoint_saving
from tests.distributed import initialize_distributed, run_ranks, started_ranks
from tests.integrations.test_deepspeed_checkpoints import on_rank_0, outcome, weights_of
from tests.integrations.training import Trainer, batch, ds_config

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timed]

PAPER = {"recipe": "paper"}
TIMEOUT_S = 10.0
MARGIN_S = 20.0
SMALL_DISK = "30m"  # one checkpoint takes 20 MB
STEPS = 5


def state_of(folder):
    """What the folder of checkpoints holds, the contents verified."""
    folder = Path(folder)
    good = last_good(folder)
    return {
        "names": sorted(path.name for path in folder.iterdir() if path.suffix != ".py"),
        "good": None if good is None else good.name,
        "latest": read_latest(folder),
    }


def failing_saves(trainer, folder, failures):
    """{failure: [what the save says, what is there afterwards]}; the last one may succeed again."""
    import torch.distributed as dist

    found = {}
    for name, failure in failures.items():
        with failure():
            dist.barrier()
            said = outcome(trainer.engine.save_checkpoint, folder, tag="next")
            dist.barrier()
        found[name] = [said, state_of(folder)]
        dist.barrier()
    said = outcome(trainer.engine.save_checkpoint, folder, tag="at last")
    return found | {"none": [said, state_of(folder)]}


@contextlib.contextmanager
def replaced(owner, name, value, on_rank=None):
    import torch.distributed as dist

    if on_rank is not None and dist.get_rank() != on_rank:
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def limited_file_size(on_rank):
    import torch.distributed as dist

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def leftovers(folder):
    """What a save that was killed leaves: it does no harm, and the next save removes it."""
    aside = folder / ".fp4_saving.dead" / "first"
    on_rank_0(lambda: shutil.copytree(folder / "first", aside))
    yield


def raises(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def replace_unless_it_commits(source, target, replace=os.replace):
    if Path(target).name == "next":
        raise OSError(5, "Input/output error")
    replace(source, target)


def no_bytes(engine):
    return 0


def small_disk(folder):
    import torch.distributed as dist

    trainer = Trainer(ds_config(2, PAPER))
    trainer.train(1)
    trainer.engine.save_checkpoint(folder, tag="first")
    found = {"saved": state_of(folder)}
    for name, estimate in (("foreseen", None), ("not foreseen", no_bytes)):
        estimate = estimate or checkpoint_saving.checkpoint_bytes
        with replaced(checkpoint_saving, "checkpoint_bytes", estimate):
            said = outcome(trainer.engine.save_checkpoint, folder, tag="next")
            dist.barrier()  # rank 0 removes what was written
            found[name] = [said, state_of(folder)]
    on_rank_0(lambda: subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True))
    said = outcome(trainer.engine.save_checkpoint, folder, tag="next")
    found["read-only"] = [said, state_of(folder)]
    return found | {"going on": trainer.train(1, first=1)}


def failures_of(trainer, folder):
    """Ways to fail on one rank, while the other one waits in DeepSpeed's collectives."""
    engine = trainer.engine
    full = raises(OSError(28, "No space left on device"))
    return {
        "recovery script": lambda: replaced(engine, "_copy_recovery_script", full, on_rank=0),
        "shard": lambda: limited_file_size(on_rank=1),
        "engine": lambda: replaced(engine.checkpoint_engine, "save", full, on_rank=0),
        "random states": lambda: replaced(checkpoint_saving, "save_rng", full, on_rank=1),
        "flush": lambda: replaced(checkpoint_saving, "flush", full, on_rank=1),
        "commit": lambda: replaced(os, "replace", replace_unless_it_commits, on_rank=0),
    }


def failing_ranks(folder):
    """In ZeRO-3 too, which gathers parameters at the end of a save."""
    found = {}
    for stage in (2, 3):
        trainer, undisturbed = Trainer(ds_config(stage, PAPER)), Trainer(ds_config(stage, PAPER))
        root = folder / f"zero{stage}"
        trainer.train(1)
        undisturbed.train(1)
        trainer.engine.save_checkpoint(root, tag="first")
        failures = failures_of(trainer, root) | {"leftovers": lambda root=root: leftovers(root)}
        found[stage] = failing_saves(trainer, root, failures)
        found[stage]["goes on"] = trainer.train(2, first=1) == undisturbed.train(2, first=1)
    return found


def node_local(folder):
    """Each rank has a disk of its own, as the first rank of each of two machines has."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    mine = folder / f"machine {rank}"
    config = ds_config(2, PAPER, checkpoint={"use_node_local_storage": True})
    trainer = Trainer(config)
    trainer.train(1)
    trainer.engine.save_checkpoint(mine, tag="first")
    trainer.engine.save_checkpoint(mine, tag="second")
    trainer.engine.save_checkpoint(mine, tag="second")
    names = sorted(path.name for path in mine.iterdir() if path.suffix != ".py")
    continued = trainer.train(1, first=1)
    resumed = Trainer(config)
    loaded = outcome(resumed.engine.load_checkpoint, mine)
    losses = resumed.train(1, first=1)
    if rank == "1":
        path = mine / "second" / "fp4_rng_rank_00001.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    damaged = outcome(Trainer(config).engine.load_checkpoint, mine)
    os.environ["LOCAL_RANK"] = rank
    return {
        "names": names,
        "files": sorted(Manifest.read(mine / "second").files),
        "loaded": loaded,
        "resumed": losses == continued,
        "damaged": damaged,
    }


def a_file_for_a_folder(folder):
    engine = Trainer(ds_config(2, PAPER)).engine
    on_rank_0(lambda: (folder / "file").write_text("not a folder"))
    return [
        outcome(engine.save_checkpoint, folder / "file"),
        outcome(engine.load_checkpoint, folder / "file", tag="tag"),
        (folder / "file").read_text(),
    ]


def disturbances(folder, disk):
    initialize_distributed()
    root = Path(folder)
    return {
        "small disk": None if disk is None else small_disk(Path(disk)),
        "failing ranks": failing_ranks(root),
        "node local": node_local(root),
        "file": a_file_for_a_folder(root),
    }


# Ranks that are killed.


def train_until_killed(folder, moment):
    """Save after every step; rank 1 kills itself in the third step, or while it saves after it."""
    import datetime

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    deepspeed.init_distributed("gloo", timeout=limit, verbose=False)
    engine = (trainer := Trainer(ds_config(2, PAPER))).engine
    start = time.monotonic()
    try:
        for step in range(STEPS):
            if step == 2 and os.environ["RANK"] == "1":
                print("killed", flush=True)
                kill_at(engine, moment)
            start = time.monotonic()
            trainer.step(batch(step))
            engine.save_checkpoint(folder)
    except Exception as error:
        print(f"waited {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)


def kill_at(engine, moment):
    if moment == "step":
        layer = engine.module.model.layers[1]
        layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return
    save = engine.checkpoint_engine.save

    def write_half(state_dict, path):
        save(state_dict, path)
        os.truncate(path, os.stat(path).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    engine.checkpoint_engine.save = write_half


def launch_and_kill(folder, moment, logs):
    """Returns the line of the surviving rank; both processes are gone afterwards."""
    arguments = str(folder), moment
    with started_ranks(train_until_killed, *arguments, warm="deepspeed", logs=logs) as ranks:
        code = ranks[1].wait(120)
        ranks[0].wait(TIMEOUT_S + MARGIN_S)
    assert code == -signal.SIGKILL, (logs / "rank1.log").read_text()[-3000:]
    text = (logs / "rank0.log").read_text()
    return next((line for line in text.splitlines() if line.startswith("waited")), text[-3000:])


def resume(folders):
    """Go on from each folder; beside it a run that was never disturbed."""
    initialize_distributed()
    config = ds_config(2, PAPER)
    undisturbed = Trainer(config)
    losses = undisturbed.train(STEPS)
    found = {}
    for name, folder in folders.items():
        trainer = Trainer(config)
        loaded = outcome(trainer.engine.load_checkpoint, folder)
        first = trainer.engine.global_steps
        again = trainer.train(STEPS - first, first=first)
        pairs = zip(weights_of(trainer.engine), weights_of(undisturbed.engine), strict=True)
        trainer.engine.save_checkpoint(folder)
        found[name] = {
            "first": first,
            "loaded": loaded,
            "losses": again == losses[first:],
            "weights": all(torch.equal(one, other) for one, other in pairs),
            "after": state_of(folder),
        }
    return found


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small tmpfs, or None where this user may not mount one."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, disk):
    folder = tmp_path_factory.mktemp("faults")
    return run_ranks(
        disturbances, str(folder), None if disk is None else str(disk), warm="deepspeed"
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """{moment: [what the other rank said, what is there, what came of going on]}"""
    folders = {moment: tmp_path_factory.mktemp(f"killed in a {moment}") for moment in KILLED}
    said = {}
    for moment, folder in folders.items():
        line = launch_and_kill(folder, moment, tmp_path_factory.mktemp("logs"))
        said[moment] = [line, state_of(folder)]
    ranks = run_ranks(
        resume, {moment: str(folder) for moment, folder in folders.items()}, warm="deepspeed"
    )
    return {moment: [*said[moment], [one[moment] for one in ranks]] for moment in folders}


KILLED = ("step", "save")
UNTOUCHED = {"names": ["first", "latest"], "good": "first", "latest": "first"}


def error_of(ranks, *keys):
    """The error of a save that failed: the same on every rank; what was there before still is."""
    for key in keys:
        ranks = [one[key] for one in ranks]
    for said, state in ranks:
        assert state == UNTOUCHED, (said, state)
    messages = {said["error"] for said, _ in ranks}
    assert len(messages) == 1 and "CheckpointError" in str(messages), messages
    return messages.pop()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("foreseen", "not enough space for a checkpoint in .*Nothing was written"),
        (
            "not foreseen",
            r"on rank [01].*: cannot write .*\.pt: No space left on device; free some space",
        ),
        ("read-only", "cannot make .*Read-only file system; .*save elsewhere"),
    ],
)
def test_a_disk_that_is_full_or_read_only_keeps_the_checkpoint_before(ranks, disk, case, said):
    if disk is None:
        pytest.skip("this user may not mount a tmpfs")
    import re

    small = [one["small disk"] for one in ranks]
    assert all(one["saved"] == UNTOUCHED for one in small)
    message = error_of(small, case)
    print(message)
    assert re.search(said, message)
    assert all(len(one["going on"]) == 1 for one in small)


@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("recovery script", "on rank 0: cannot use a file: No space left on device; free"),
        (
            "shard",
            "on rank 1: cannot write .*rank_1_mp_rank_00_optim_states.pt: File too large; .*ulimit",
        ),
        ("engine", "on rank 0: cannot write .*_states.pt: No space left on device; free"),
        ("random states", "on rank 1: cannot use a file: No space left on device; free"),
        ("flush", "on rank 1: cannot write .*No space left on device; free"),
        ("commit", "on rank 0: cannot put a checkpoint in place at .*next: Input/output error"),
    ],
)
def test_one_rank_that_cannot_write_fails_all_and_harms_nothing(ranks, stage, case, said):
    import re

    message = error_of(ranks, "failing ranks", stage, case)
    print(message)
    assert re.search(said, message)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_after_failed_saves_training_and_saving_go_on(ranks, stage):
    for one in ranks:
        found = one["failing ranks"][stage]
        said, state = found["leftovers"]
        assert said["error"] is None
        assert state == {"names": ["first", "latest", "next"], "good": "next", "latest": "next"}
        said, state = found["none"]
        assert said["error"] is None and state["good"] == state["latest"] == "at last"
        assert found["goes on"]


def test_machines_with_disks_of_their_own_keep_their_part_each(ranks):
    for rank, one in enumerate(ranks):
        found = one["node local"]
        assert found["names"] == ["first", "latest", "second"]
        assert found["files"] == sorted(
            [
                f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                f"fp4_rng_rank_{rank:05d}.safetensors",
                "mp_rank_00_model_states.pt",
                *(["fp4_manifest.json"] if rank == 0 else []),
            ]
        )
        assert found["loaded"] == {"error": None, "loaded": "second", "warnings": []}
        assert found["resumed"]
        assert found["damaged"]["loaded"] == "first"  # on both, though one disk is fine


def test_a_file_where_the_folder_should_be_is_named(ranks):
    for one in ranks:
        save, load, text = one["file"]
        assert "a file is where a folder has to be" in save["error"]
        assert "CheckpointError" in load["error"] and "file" in load["error"]
        assert text == "not a folder"


@pytest.mark.parametrize("moment", KILLED)
def test_a_killed_rank_costs_no_more_than_the_step(killed, moment):
    line, state, resumed = killed[moment]
    print(line)
    waited = float(line.split()[1])
    assert waited < TIMEOUT_S + MARGIN_S
    # Of the save that was killed nothing is left but what the next save removes.
    assert state["good"] == state["latest"] == "global_step2"
    for one in resumed:
        assert one["loaded"] == {"error": None, "loaded": "global_step2", "warnings": []}
        assert one["first"] == 2
        assert one["losses"] and one["weights"]
        assert one["after"]["names"] == ["global_step1", "global_step2", "global_step5", "latest"]


def test_the_rank_that_survives_a_killed_save_says_so(killed):
    line, _, _ = killed["save"]
    assert "CheckpointError" in line and "saving a checkpoint" in line
