"""What is in a checkpoint is what was written, or the reader is told which file is not."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fp4_plugin.checkpoint import (
    CHECKPOINT_NAME,
    Manifest,
    PendingCheckpoint,
    committed,
    find_folder,
    last_good,
    read_latest,
    require_space,
    verify_checkpoint,
    write_json,
    write_safetensors,
    write_text,
)
from fp4_plugin.checkpoint.verification import inspect_files, verify_files
from fp4_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.samples import SHARDS, save, seed_in, tensors, torch_bytes


def flip_four_bytes(path):
    content = bytearray(path.read_bytes())
    for place in (0.2, 0.4, 0.6, 0.8):
        content[int(place * len(content))] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    "four flipped bytes": flip_four_bytes,
    "truncated": truncate,
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", SHARDS)
def test_damage_is_found_by_name_and_the_one_before_is_good(tmp_path, caplog, damage, name):
    save(tmp_path, "first", 1)
    newer = save(tmp_path, "second", 2)
    assert last_good(tmp_path) == newer
    DAMAGE[damage](newer / name)
    with pytest.raises(CheckpointError, match=f"{name} is damaged.*load another"):
        verify_checkpoint(newer)
    assert seed_in(last_good(tmp_path)) == 1
    assert str(newer / name) in caplog.text


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_byte_in_the_manifest_is_found(tmp_path, place):
    folder = save(tmp_path, "tag", 1)
    path = folder / CHECKPOINT_NAME
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x01
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=CHECKPOINT_NAME):
        verify_checkpoint(folder)
    assert last_good(tmp_path) is None


def test_a_manifest_of_a_later_format_says_so(tmp_path):
    folder = save(tmp_path, "tag", 1)
    path = folder / CHECKPOINT_NAME
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="format version 2, this release .* up to 1"):
        verify_checkpoint(folder)


def test_a_foreign_file_is_refused_where_it_could_be_loaded(tmp_path):
    folder = save(tmp_path, "tag", 1)
    (folder / "notes.txt").write_text("fine")
    (folder / "zero").mkdir()
    (folder / "zero" / "fp32.pt").write_text("a conversion, in a folder of its own")
    verify_checkpoint(folder)
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="mp_rank_01_model_states.pt is no part of this"):
        verify_checkpoint(folder)


def test_a_folder_without_a_manifest_is_no_committed_checkpoint(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=f"no {CHECKPOINT_NAME}, which is written last"):
        verify_checkpoint(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is no folder"):
        verify_checkpoint(tmp_path / "nowhere")
    assert last_good(tmp_path) is None and last_good(tmp_path / "nowhere") is None


def test_checksums_are_those_of_the_usual_tool(tmp_path):
    folder = save(tmp_path, "tag", 1)
    record = json.loads((folder / CHECKPOINT_NAME).read_text())
    for name in SHARDS:
        content = (folder / name).read_bytes()
        assert record["files"][name] == {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "rank": 0,
        }
    assert record["facts"] == {"seed": 1}


def test_processes_that_share_the_work_read_every_file_once(tmp_path):
    folder = save(tmp_path, "tag", 1)
    manifest = Manifest.read(folder)
    for name in SHARDS:
        shutil.copytree(folder, tmp_path / "copy")
        flip_four_bytes(tmp_path / "copy" / name)
        found = []
        for part in range(4):
            try:
                verify_files(tmp_path / "copy", manifest, part, 4)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1 and name in found[0]
        shutil.rmtree(tmp_path / "copy")


def test_the_newest_is_found_by_time_not_by_name(tmp_path):
    for seed, tag in enumerate(["global_step9", "global_step10", "global_step2"]):
        save(tmp_path, tag, seed)
    assert [folder.name for folder in committed(tmp_path)] == [
        "global_step2",
        "global_step10",
        "global_step9",
    ]
    assert read_latest(tmp_path) == "global_step2"
    assert (tmp_path / "recover.py").read_text() == "print(2)\n"


def test_latest_stays_where_it_is_told_to(tmp_path):
    save(tmp_path, "first", 1)
    save(tmp_path, "second", 2, latest=False)
    assert read_latest(tmp_path) == "first" and last_good(tmp_path).name == "second"
    (tmp_path / "latest").write_text("\n")
    assert read_latest(tmp_path) is None


def test_a_tag_is_replaced_as_a_whole(tmp_path):
    folder = save(tmp_path, "tag", 1)
    (folder / "extra.txt").write_text("of the first one")
    save(tmp_path, "tag", 2)
    assert seed_in(folder) == 2 and not (folder / "extra.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "recover.py", "tag"]


def test_a_checkpoint_that_stepped_aside_is_found_and_comes_back(tmp_path):
    save(tmp_path, "tag", 1)
    (tmp_path / "tag").rename(tmp_path / ".fp4_replaced.abc")
    assert find_folder(tmp_path, "tag") == tmp_path / ".fp4_replaced.abc"
    assert seed_in(last_good(tmp_path)) == 1
    save(tmp_path, "other", 2)
    verify_checkpoint(tmp_path / "tag")
    assert not (tmp_path / ".fp4_replaced.abc").exists()


def test_a_save_that_is_alive_is_left_alone(tmp_path):
    """Two engines may save to one place at the same time, also one that replaces a checkpoint."""
    save(tmp_path, "theirs", 1)
    theirs = PendingCheckpoint(tmp_path, "theirs", "alive")
    theirs.create()
    (tmp_path / "theirs").rename(tmp_path / ".fp4_replaced.alive")
    save(tmp_path, "ours", 2)
    assert theirs.folder.is_dir() and (tmp_path / ".fp4_replaced.alive").is_dir()
    theirs.release()
    save(tmp_path, "ours", 3)
    assert not theirs.root.exists() and not (tmp_path / ".fp4_replaced.alive").exists()
    verify_checkpoint(tmp_path / "theirs")


@pytest.mark.parametrize("tag", ["", "/etc", "../up", "a/../../b", ".fp4_saving.1"])
def test_a_tag_names_a_folder_inside(tmp_path, tag):
    with pytest.raises(ConfigError, match="is no tag for a checkpoint"):
        PendingCheckpoint(tmp_path, tag, "1")


def test_a_tag_may_have_folders(tmp_path):
    folder = save(tmp_path, "a/b", 1)
    verify_checkpoint(folder)
    assert find_folder(tmp_path, read_latest(tmp_path)) == folder == tmp_path / "a" / "b"


def test_everything_is_on_the_disk_before_the_folder_is_in_place(tmp_path, monkeypatch):
    flushed, at_commit = set(), []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_replace(source, target):
        if Path(target) == tmp_path / "tag":
            paths = [source, *source.rglob("*")]
            at_commit.extend(path.name for path in paths if path.stat().st_ino not in flushed)
        flushed.discard(tmp_path.stat().st_ino)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    save(tmp_path, "tag", 1)
    assert (tmp_path / "tag").is_dir() and at_commit == []
    assert tmp_path.stat().st_ino in flushed  # the names in it, after the last rename
    assert (tmp_path / "latest").stat().st_ino in flushed


def test_a_failed_commit_leaves_what_was_there(tmp_path, monkeypatch):
    save(tmp_path, "tag", 1)
    replace = os.replace

    def refuse(source, target):
        if Path(target).name == "tag" and ".fp4_saving" in str(source):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match="put a checkpoint in place at .*tag: Input/output"):
        save(tmp_path, "tag", 2)
    verify_checkpoint(tmp_path / "tag")
    assert seed_in(tmp_path / "tag") == 1


def test_the_message_says_when_only_latest_is_missing(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="is in place at .*tag, but not all around it"):
        save(tmp_path, "tag", 1)
    verify_checkpoint(tmp_path / "tag")


# Failures of the disk.


@pytest.fixture
def full_disk(tmp_path):
    """A tmpfs of 1 MB; tests that write more than fits need the right to mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip() or mounted.stdout.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def big(num_bytes):
    return {"a": torch.zeros(num_bytes // 4)}


def test_a_full_disk_is_named_and_nothing_is_left(full_disk):
    save(full_disk, "tag", 1)
    for write in (
        lambda path: write_safetensors(path, big(1 << 21)),
        lambda path: write_json(path, {"a": "x" * (1 << 21)}),
    ):
        with pytest.raises(CheckpointError, match="cannot write .*file: .*; free some space"):
            write(full_disk / "file")
    assert sorted(path.name for path in full_disk.iterdir()) == ["latest", "recover.py", "tag"]
    verify_checkpoint(full_disk / "tag")


def test_too_little_space_is_known_before_anything_is_written(full_disk):
    require_space(full_disk, 1 << 19)
    with pytest.raises(CheckpointError, match=r"takes about 2\.2 MB, 1\.05 MB are free; remove"):
        require_space(full_disk, 1 << 21)


def test_a_read_only_file_system_is_named(full_disk):
    save(full_disk, "tag", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(full_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system; save elsewhere"):
        save(full_disk, "tag", 2)
    verify_checkpoint(full_disk / "tag")


def test_a_limit_on_file_sizes_is_named(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        for write in (
            lambda: write_safetensors(tmp_path / "file", big(1 << 18)),
            lambda: write_text(tmp_path / "file", "x" * (1 << 18)),
        ):
            with pytest.raises(CheckpointError, match="cannot write .*file: .*ulimit -f"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make .*; a file is where a folder has to be"):
        save(tmp_path / "file", "tag", 1)
    with pytest.raises(CheckpointError, match="a file is where a folder has to be"):
        write_json(tmp_path / "file" / "a.json", {})


def test_a_write_that_fails_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match="No space left on device; free some space"):
            write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1} and list(tmp_path.iterdir()) == [path]


def test_tensors_come_back_whatever_their_strides_and_gradients(tmp_path):
    from safetensors.torch import load_file

    state = {"t": torch.randn(4, 6).t(), "p": torch.nn.Parameter(torch.randn(3)), **tensors(1)}
    write_safetensors(tmp_path / "a" / "s.safetensors", state, {"note": "x"})
    found = load_file(tmp_path / "a" / "s.safetensors")
    assert all(torch.equal(found[name], state[name]) for name in state)


# Checkpoints that nobody has written down the checksums of.


@pytest.mark.parametrize("zipped", [True, False])
def test_without_a_manifest_cut_off_files_are_found(tmp_path, zipped):
    path = tmp_path / "states.pt"
    torch.save(tensors(1), path, _use_new_zipfile_serialization=zipped)
    inspect_files(tmp_path)
    os.truncate(path, 0)
    with pytest.raises(CheckpointError, match="states.pt is damaged: empty"):
        inspect_files(tmp_path)
    for kept in (len(torch_bytes(1)) - 1, 1000, 30):
        path.write_bytes(torch_bytes(1)[:kept])
        with pytest.raises(CheckpointError, match=f"states.pt is damaged: cut off after {kept}"):
            inspect_files(tmp_path)
