"""A small checkpoint, written as an integration writes one, and what a reader makes of it."""

from __future__ import annotations

import torch

from fp4_plugin.checkpoint import Manifest, PendingCheckpoint, describe_file, write_safetensors
from fp4_plugin.checkpoint.files import flush

SHARDS = ("shard_0.safetensors", "shard_1.pt", "inner/part.bin")
NUM_CHUNKS = 3


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(300, generator=generator), "b": torch.arange(7) + seed}


def save(save_dir, tag, seed, identifier=None, between=lambda stage: None, latest=True):
    """A checkpoint of `seed`; calls `between` at the places where no file is opened or renamed."""
    pending = PendingCheckpoint(save_dir, tag, identifier or f"id{seed}")
    pending.create()
    pending.remove_leftovers()
    write_safetensors(pending.folder / SHARDS[0], tensors(seed), {"seed": str(seed)})
    _write_in_chunks(pending.folder / SHARDS[1], torch_bytes(seed), between)
    (pending.folder / "inner").mkdir()
    _write_in_chunks(pending.folder / SHARDS[2], bytes([seed]) * 1000, between)
    (pending.root / "recover.py").write_text(f"print({seed})\n")
    between("after the shards")
    files = {name: describe_file(pending.folder / name) for name in SHARDS}
    pending.commit(Manifest(tag, pending.identifier, files, {"seed": seed}), name_it_latest=latest)
    return pending.target


def torch_bytes(seed):
    """What torch.save writes for `tensors(seed)`."""
    import io

    buffer = io.BytesIO()
    torch.save(tensors(seed), buffer)
    return buffer.getvalue()


def _write_in_chunks(path, content, between):
    size = len(content) // NUM_CHUNKS + 1
    with path.open("wb") as file:
        for start in range(0, len(content), size):
            between(f"inside {path.name}")
            file.write(content[start : start + size])
            file.flush()
    flush(path)


def seed_in(folder):
    """The seed of the checkpoint in `folder`; fails unless every file holds what it should."""
    from safetensors.torch import load_file

    found = load_file(folder / SHARDS[0])
    seed = int(found["b"][0])
    expected = tensors(seed)
    again = torch.load(folder / SHARDS[1], weights_only=True)
    for state in (found, again):
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert (folder / SHARDS[2]).read_bytes() == bytes([seed]) * 1000
    return seed
