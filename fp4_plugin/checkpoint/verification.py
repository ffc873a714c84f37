"""Is a checkpoint what was written? Files against the manifest, cheap questions first."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fp4_plugin.checkpoint.files import disk_problem
from fp4_plugin.checkpoint.manifest import CHECKPOINT_NAME, Manifest, describe_file, file_names
from fp4_plugin.errors import CheckpointError

__all__ = ["inspect_files", "verify_checkpoint", "verify_files", "verify_names"]

# A framework may find such a file by pattern and load it.
_LOADABLE = (".pt", ".pth", ".bin", ".safetensors")
_ZIP_START, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_END_BYTES = 22


def verify_checkpoint(folder: Path) -> None:
    """Raise CheckpointError unless `folder` is a committed checkpoint and every file is as written.

    Reads all of it, on this process. The error names the file and what to do.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    if manifest is None:
        what = "no folder" if not folder.is_dir() else f"no committed checkpoint: {_not_there()}"
        raise CheckpointError(f"{folder} is {what}; load another checkpoint")
    verify_names(folder, manifest)
    verify_files(folder, manifest)


def _not_there() -> str:
    return f"it has no {CHECKPOINT_NAME}, which is written last"


def verify_names(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for files of the wrong size or missing, and for ones too many.

    Reads no content. A file that the manifest does not know is refused where a framework could load
    it: its suffix is one of a tensor file, and it lies beside files of the checkpoint.
    """
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise _damage(path, f"missing (it had {record.bytes} bytes)") from None
        except OSError as error:
            raise disk_problem("read", path, error) from error
        if size != record.bytes:
            raise _damage(path, f"{size} bytes long, {record.bytes} were written")
    parents = {PurePosixPath(name).parent for name in manifest.files}
    for name in file_names(folder):
        known = name in manifest.files or PurePosixPath(name).parent not in parents
        if not known and name.endswith(_LOADABLE):
            raise CheckpointError(
                f"{folder / name} is no part of this checkpoint, but could be loaded with it; "
                f"remove that file"
            )


def verify_files(folder: Path, manifest: Manifest, part: int = 0, num_parts: int = 1) -> None:
    """Raise CheckpointError for a file whose content has another checksum than it had.

    With `num_parts` processes, each reads its `part` of the files: about the same number of bytes.
    """
    for name in _share(manifest, part, num_parts):
        found, written = describe_file(folder / name), manifest.files[name]
        if (found.bytes, found.sha256) != (written.bytes, written.sha256):
            raise _damage(
                folder / name,
                f"not what rank {written.rank} wrote: its SHA-256 is {found.sha256[:12]}..., "
                f"it was {written.sha256[:12]}...",
            )


def _share(manifest: Manifest, part: int, num_parts: int) -> list[str]:
    """Largest files first, each to whoever has least so far; the same on every process."""
    loads, shares = [0] * num_parts, [[] for _ in range(num_parts)]  # type: ignore[var-annotated]
    for name, record in sorted(manifest.files.items(), key=lambda one: (-one[1].bytes, one[0])):
        least = loads.index(min(loads))
        loads[least] += record.bytes + 1
        shares[least].append(name)
    return shares[part]


def inspect_files(folder: Path) -> None:
    """What can be said of a checkpoint without a manifest: raise CheckpointError for a broken file.

    Empty tensor files are found, and files of torch.save that are cut off (their table is at the
    end). Flipped bytes are not. Reads a few bytes of each file.
    """
    for name in file_names(folder):
        path = folder / name
        if not name.endswith(_LOADABLE):
            continue
        try:
            with path.open("rb") as file:
                start = file.read(len(_ZIP_START))
                size = file.seek(0, 2)
                file.seek(max(0, size - _ZIP_END_BYTES))
                end = file.read(len(_ZIP_END))
        except OSError as error:
            raise disk_problem("read", path, error) from error
        if size == 0:
            raise _damage(path, "empty")
        if start == _ZIP_START and end != _ZIP_END:
            raise _damage(path, f"cut off after {size} bytes")


def _damage(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}; load another checkpoint")
