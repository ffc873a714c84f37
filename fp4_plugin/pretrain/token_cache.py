"""Tokens on disk: a corpus is tokenised once and memory-mapped afterwards.

    <cache>/<key>/train.bin, held_out.bin    uint16 or uint32 ids, documents joined end to end
    <cache>/<key>/meta.json                  what they are; written last, so it vouches for the rest

The key hashes the files (names, sizes, times), the tokenizer and the layout version. Everything is
written into a folder of another name and renamed, under a file lock, so that any number of ranks
and jobs may ask for the same corpus at once and none ever sees half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain.corpus import Document, TextCorpus, is_held_out
from fp4_plugin.pretrain.tokenizer import Tokenizer

__all__ = ["CachedTokens", "cached_tokens", "default_cache_dir"]

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
DOCUMENTS_PER_BATCH = 64  # enough for a fast tokenizer to use its threads


@dataclass(frozen=True)
class CachedTokens:
    """The two token streams of one corpus, each a read-only 1-D memory map (maybe empty)."""

    train: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class _Meta:
    corpus: str
    tokenizer: str
    vocab_size: int
    dtype: str
    train_tokens: int
    held_out_tokens: int


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/fp4-plugin/tokens`, normally under `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fp4-plugin" / "tokens"


def cached_tokens(
    corpus: TextCorpus, tokenizer: Tokenizer, cache_dir: Path, *, split: bool
) -> CachedTokens:
    """The tokens of `corpus`, made now if the cache has none. Raises DataError on bad text.

    With `split`, the documents that `is_held_out` names form a stream of their own; without, all
    of them are in `train`.
    """
    folder = cache_dir / _key(corpus, tokenizer, split=split)
    if not (folder / "meta.json").is_file():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock")):
                if not (folder / "meta.json").is_file():
                    _build(corpus, tokenizer, folder, split=split)
        except OSError as error:
            raise DataError(f"cannot write the token cache {cache_dir}: {error}") from error
    return _open(folder)


def _key(corpus: TextCorpus, tokenizer: Tokenizer, *, split: bool) -> str:
    parts = [f"{LAYOUT_VERSION} {split}", corpus.fingerprint(), tokenizer.name]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it if we die, so it is never stale."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            # Some cluster file systems have no locks. Building twice is safe: renames are atomic.
            logger.info("no file lock on %s (%s); building without", path, error)
        yield


def _build(corpus: TextCorpus, tokenizer: Tokenizer, folder: Path, *, split: bool) -> None:
    """Tokenise into a folder beside `folder`, then rename it into place."""
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        meta = _write_tokens(corpus, tokenizer, aside, split=split)
        (aside / "meta.json").write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")
        with contextlib.suppress(FileExistsError, OSError):
            aside.rename(folder)  # fails if another job finished first: then its copy serves
        if not (folder / "meta.json").is_file():
            raise OSError(f"{folder} could not be put in place")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_tokens(corpus: TextCorpus, tokenizer: Tokenizer, folder: Path, *, split: bool) -> _Meta:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts = {False: 0, True: 0}
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as held:
        for name, ids in _encoded(corpus.documents(), tokenizer):
            out = split and is_held_out(name)
            (held if out else train).write(ids.astype(dtype).tobytes())
            counts[out] += len(ids)
    return _Meta(
        corpus.name, tokenizer.name, tokenizer.vocab_size, dtype.name, counts[False], counts[True]
    )


def _encoded(
    documents: Iterator[Document], tokenizer: Tokenizer
) -> Iterator[tuple[str, np.ndarray]]:
    """(document name, ids with the end-of-document id); documents without text are left out."""
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    while batch := list(itertools.islice(documents, DOCUMENTS_PER_BATCH)):
        encoded = tokenizer.encode([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            if len(ids) == 0:
                continue
            if ids.max() >= tokenizer.vocab_size:
                raise DataError(
                    f"{document.name}: the tokenizer {tokenizer.name} made id {ids.max()}, beyond "
                    f"its own {tokenizer.vocab_size} ids"
                )
            yield document.name, np.concatenate([ids, np.asarray(end, dtype=np.int64)])


def _open(folder: Path) -> CachedTokens:
    try:
        meta = _Meta(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
        train = _map(folder / "train.bin", meta.dtype, meta.train_tokens)
        held_out = _map(folder / "held_out.bin", meta.dtype, meta.held_out_tokens)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"the token cache {folder} is damaged ({error}); delete it") from error
    return CachedTokens(train, held_out)


def _map(path: Path, dtype: str, count: int) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} holds {path.stat().st_size} bytes, not {expected}")
    if count == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")
