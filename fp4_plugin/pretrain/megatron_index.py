"""Read-only access to Megatron's `.bin`/`.idx` pairs (index format MMIDIDX, version 1).

    .idx   9 bytes   magic "MMIDIDX\\0\\0"
           u64       version (1)
           u8        code of the token type
           u64       number of sequences S
           u64       number of document boundaries D
           i32[S]    tokens per sequence
           i64[S]    byte offset of each sequence in the .bin
           i64[D]    first sequence of each document
    .bin   the tokens, sequence after sequence

All little endian. Megatron writes the sequences without gaps, so the .bin is one token stream: it
is mapped, never read as a whole.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from fp4_plugin.errors import DataError

__all__ = ["is_megatron_prefix", "open_megatron"]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def _pair(path: Path) -> tuple[Path, Path]:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def is_megatron_prefix(path: Path) -> bool:
    """Whether `path` names such a pair: `corpus.bin`, `corpus.idx` or `corpus` beside either."""
    if path.suffix in (".bin", ".idx"):
        return True
    return not path.exists() and any(part.exists() for part in _pair(path))


def open_megatron(path: Path, flag: str = "--data") -> np.ndarray:
    """The tokens of the pair that `path` names: a read-only memory map, one dimension.

    Raises DataError for a missing half, a foreign or truncated index, or a .bin of another size.
    """
    data_path, index_path = _pair(path)
    for part in (data_path, index_path):
        if not part.is_file():
            raise DataError(f"{flag} {path}: {part} is missing (a Megatron corpus is .bin + .idx)")
    dtype, lengths = _read_index(index_path)
    expected_bytes = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    actual_bytes = data_path.stat().st_size
    if actual_bytes != expected_bytes:
        raise DataError(
            f"{data_path} holds {actual_bytes} bytes, but {index_path.name} describes "
            f"{expected_bytes}: the file is truncated or belongs to another index"
        )
    if expected_bytes == 0:
        raise DataError(f"{data_path} holds no tokens")
    return np.memmap(data_path, dtype=dtype, mode="r")


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray]:
    """Token type and tokens per sequence, after checking everything else in the index."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a Megatron index (no MMIDIDX header)")
    _, version, code, num_sequences, num_documents = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path} has index version {version}; version {VERSION} is readable")
    if code not in TOKEN_TYPES:
        raise DataError(f"{path}: token type code {code}; allowed are {sorted(TOKEN_TYPES)}")
    expected = HEADER.size + num_sequences * (4 + 8) + num_documents * 8
    if size != expected:
        raise DataError(f"{path} holds {size} bytes, its header describes {expected}: truncated")
    if num_sequences == 0:
        raise DataError(f"{path} lists no sequences")
    dtype = np.dtype(TOKEN_TYPES[code]).newbyteorder("<")
    lengths = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(num_sequences,))
    pointers = np.memmap(
        path, dtype="<i8", mode="r", offset=HEADER.size + 4 * num_sequences, shape=(num_sequences,)
    )
    _check_contiguous(path, lengths, pointers, dtype.itemsize)
    return dtype, lengths


def _check_contiguous(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> None:
    if (lengths < 0).any():
        raise DataError(f"{path} lists a sequence of negative length")
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    if pointers[0] != 0 or (pointers[1:] != ends[:-1]).any():
        raise DataError(f"{path}: sequences with gaps or overlaps; only a packed .bin is readable")
