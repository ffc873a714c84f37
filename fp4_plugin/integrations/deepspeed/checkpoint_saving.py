"""`engine.save_checkpoint`, so that what is in its place is complete and has a checksum per file.

    1. the ranks agree on the tag, make the folder aside, find out who shares a file system
    2. is there room for what all of them will write?
    3. DeepSpeed writes there; a rank that cannot write carries on to the end of DeepSpeed's
       collectives before it says so, or the others would wait for it
    4. every rank flushes and checksums the files that it wrote
    5. one rank per file system writes the manifest and puts the folder in place

A failure on any rank is a CheckpointError on all, and what was there before stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp4_plugin.checkpoint import (
    FileRecord,
    Manifest,
    PendingCheckpoint,
    describe_file,
    require_space,
    save_rng,
)
from fp4_plugin.checkpoint.files import disk_problem, flush
from fp4_plugin.checkpoint.manifest import file_names
from fp4_plugin.errors import CheckpointError
from fp4_plugin.integrations.deepspeed.agreement import gather
from fp4_plugin.integrations.deepspeed.checkpoint_facts import (
    checkpoint_bytes,
    checkpoint_facts,
    run_facts,
)
from fp4_plugin.integrations.deepspeed.checkpoint_ranks import (
    EngineCheckpoints,
    do_together,
    gather_parameters_again,
    require_equal,
    without_peers,
)
from fp4_plugin.integrations.deepspeed.timeouts import device_of
from fp4_plugin.telemetry.manifest import MANIFEST_NAME, write_manifest

__all__ = ["RNG_FILE", "Saver"]

logger = logging.getLogger("fp4_plugin")

RNG_FILE = "fp4_rng_rank_{rank:05d}.safetensors"
_MARK = ".rank_{rank:05d}"


class Saver(EngineCheckpoints):
    """Writes the checkpoints of one engine."""

    def save(self, original: Any, arguments: Mapping[str, Any]) -> bool:
        """Save as DeepSpeed would with these `arguments`. Raises CheckpointError on every rank."""
        with without_peers("saving a checkpoint"):
            pending = self._begin(Path(arguments["save_dir"]), arguments.get("tag"))
            sharing: list[int] = [self._rank]
            try:
                sharing = self._open(pending)
                self._require_space(pending, sharing)
                files = self._write(original, arguments, pending)
                records = self._checksum(pending, sharing, files)
                self._commit(pending, sharing, records, arguments.get("save_latest", True))
            except Exception:
                if self._rank == sharing[0]:
                    pending.discard()
                raise
            finally:
                pending.release()
        return True

    def _begin(self, save_dir: Path, tag: Any) -> PendingCheckpoint:
        """The checkpoint that all ranks mean: rank 0 makes up its identifier."""
        name = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        stated = gather((name, uuid.uuid4().hex[:16]), self._groups)
        require_equal("tag", {rank: name for rank, (name, _) in stated.items()})
        identifier = next(iter(stated.values()))[1]
        return do_together(lambda: PendingCheckpoint(save_dir, name, identifier), self._groups)

    def _open(self, pending: PendingCheckpoint) -> list[int]:
        """Make the folder; returns the ranks that see this rank's folder, itself among them.

        Without a shared file system (node-local storage) these are the ranks of one machine.
        """

        def mark() -> None:
            pending.create()
            (pending.root / _MARK.format(rank=self._rank)).touch()

        do_together(mark, self._groups)
        ranks = list(gather(None, self._groups))
        marks = {rank: pending.root / _MARK.format(rank=rank) for rank in ranks}
        seen = gather([rank for rank, path in marks.items() if path.exists()], self._groups)
        sharing = [rank for rank in ranks if self._rank in seen[rank] or rank in seen[self._rank]]
        if len(sharing) < len(ranks) and self._rank == 0:
            self._mention_node_local(pending.save_dir)
        return sharing

    def _mention_node_local(self, save_dir: Path) -> None:
        if not self._engine.use_node_local_storage():
            logger.warning(
                "fp4: %s is not shared by all machines: each keeps the part of its own ranks, and "
                'needs it to load. If that is meant, set "checkpoint": {"use_node_local_storage": '
                "true}",
                save_dir,
            )

    def _require_space(self, pending: PendingCheckpoint, sharing: list[int]) -> None:
        needed = gather(checkpoint_bytes(self._engine), self._groups)

        def check() -> None:
            if self._rank == sharing[0]:
                pending.remove_leftovers()
                require_space(pending.root, sum(needed[rank] for rank in sharing))

        do_together(check, self._groups)

    def _write(
        self, original: Any, arguments: Mapping[str, Any], pending: PendingCheckpoint
    ) -> list[str]:
        """Let DeepSpeed write, add our files; returns the names of what this rank wrote."""
        aside = {"save_dir": str(pending.root), "tag": pending.tag, "save_latest": False}

        def write() -> list[str]:
            with _recorded(self._engine.checkpoint_engine) as written:
                self._call(original, {**arguments, **aside})
            return [*written, *self._add_files(pending.folder)]

        if self._communication is not None:
            self._communication.exchange_reports()
        paths = do_together(write, self._groups)
        return [os.path.relpath(path, pending.folder) for path in paths]

    def _call(self, original: Any, arguments: Mapping[str, Any]) -> None:
        try:
            original(**arguments)
        except Exception:
            # DeepSpeed's save ends in a barrier; the other ranks must find this one there.
            from deepspeed import comm

            gather_parameters_again(self._engine)
            comm.barrier()
            raise

    def _add_files(self, folder: Path) -> list[str]:
        rng = folder / RNG_FILE.format(rank=self._rank)
        save_rng(rng, device_of(self._engine))
        added = [rng]
        if self._communication is not None:
            added += self._communication.memory.save(folder)
        if self._rank == 0:
            path = folder / MANIFEST_NAME
            try:
                write_manifest(path, self._activation.manifest(**run_facts(self._engine)))
            except OSError as error:
                raise disk_problem("write", path, error) from error
            added.append(path)
        return [str(path) for path in added]

    def _checksum(
        self, pending: PendingCheckpoint, sharing: list[int], mine: list[str]
    ) -> dict[str, FileRecord]:
        """Flush and checksum all files; returns the records of those on this file system."""
        listing = file_names(pending.folder) if self._rank == sharing[0] else []
        told = gather((mine, listing), self._groups)
        claimed = {name for rank in sharing for name in told[rank][0]}
        # What DeepSpeed wrote by other means than its checkpoint engine (offloaded tensors).
        rest = [name for name in told[sharing[0]][1] if name not in claimed]
        part = rest[sharing.index(self._rank) :: len(sharing)]

        def record() -> dict[str, FileRecord]:
            return {name: self._flushed(pending.folder / name) for name in (*mine, *part)}

        found = gather(do_together(record, self._groups), self._groups)
        return {name: one for rank in sharing for name, one in found[rank].items()}

    def _flushed(self, path: Path) -> FileRecord:
        try:
            flush(path)
        except OSError as error:
            raise disk_problem("write", path, error) from error
        return describe_file(path, self._rank)

    def _commit(
        self,
        pending: PendingCheckpoint,
        sharing: list[int],
        records: Mapping[str, FileRecord],
        name_it_latest: bool,
    ) -> None:
        facts = checkpoint_facts(self._engine, self._activation, self._groups)

        def commit() -> None:
            if self._rank == sharing[0]:
                manifest = Manifest(pending.tag, pending.identifier, records, facts)
                pending.commit(manifest, name_it_latest=name_it_latest)

        do_together(commit, self._groups)


@contextlib.contextmanager
def _recorded(writer: Any) -> Iterator[list[str]]:
    """The paths that `writer.save` writes in this block; its first failure is raised at the end.

    Until then the rank takes part in DeepSpeed's collectives as if it had written.
    """
    original = writer.save
    written: list[str] = []
    problems: list[CheckpointError] = []

    def save(state_dict: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if problems:
            return None
        try:
            result = original(state_dict, path, *args, **kwargs)
        except Exception as error:
            _close_files_of(error)
            problems.append(disk_problem("write", path, error))
            return None
        written.append(str(path))
        return result

    writer.save = save
    try:
        yield written
    finally:
        del writer.save
        if problems:
            raise problems[0]


def _close_files_of(error: BaseException) -> None:
    """Let go of what the frames of an error hold: a file, open and with it space on a full disk."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
