"""Token streams cut into training sequences, from any source that `--data` may name.

Sequence i covers tokens i * L .. i * L + L, one more than L: the last is only a target. Documents
are packed end to end and attention may look across their boundaries, as is usual in pre-training.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain.corpus import open_corpus
from fp4_plugin.pretrain.megatron_index import is_megatron_prefix, open_megatron
from fp4_plugin.pretrain.token_cache import cached_tokens
from fp4_plugin.pretrain.tokenizer import Tokenizer

__all__ = ["DataSource", "TokenSequences", "TrainingData", "load_training_data"]

HELD_OUT_TAIL_FRACTION = 0.05
# A corpus of our own making was checked when it was written; of a foreign one this much is checked
# at the start, and every batch when it is read.
CHECKED_TOKENS = 1 << 24
# Of longer streams a fingerprint covers this many pieces of this many tokens, evenly spaced.
FINGERPRINT_PIECES, FINGERPRINT_TOKENS = 1024, 4096


@dataclass(frozen=True)
class DataSource:
    """Where text comes from: paths as given on the command line, None for the default corpus."""

    train: Path | None
    held_out: Path | None
    cache_dir: Path


@dataclass(frozen=True)
class TokenSequences:
    """`tokens` (1-D, any integer type, usually memory-mapped) as sequences of `seq_len` + 1."""

    tokens: np.ndarray
    seq_len: int
    vocab_size: int
    name: str

    def __post_init__(self) -> None:
        if len(self.tokens) < self.seq_len + 1:
            raise DataError(
                f"{self.name} has {len(self.tokens)} tokens, less than one sequence of "
                f"{self.seq_len} + 1; give more text (--data) or a shorter --seq-len"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def read(self, indices: np.ndarray) -> torch.Tensor:
        """The sequences `indices` as (B, seq_len + 1) int64. Raises DataError on a foreign id."""
        rows = [self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in indices]
        batch = np.stack(rows).astype(np.int64)
        self._check_ids(batch)
        return torch.from_numpy(batch)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """At most `count` sequence indices spread over the whole stream, ascending."""
        count = min(count, len(self))
        return np.arange(count, dtype=np.int64) * len(self) // count

    def fingerprint(self) -> str:
        """Number of tokens and a hash of them: of all, or of samples of a long stream.

        Depends neither on the place of the data nor on the integer type it is stored in.
        """
        length = len(self.tokens)
        piece = length if length <= CHECKED_TOKENS else FINGERPRINT_TOKENS
        last_start = length - piece
        starts = {last_start * i // (FINGERPRINT_PIECES - 1) for i in range(FINGERPRINT_PIECES)}
        digest = hashlib.sha256()
        for start in sorted(starts):
            digest.update(np.asarray(self.tokens[start : start + piece]).astype("<u4").tobytes())
        return f"{length} tokens, {digest.hexdigest()[:16]}"

    def check_head(self) -> None:
        """Check the first tokens of a foreign stream before any process starts."""
        self._check_ids(np.asarray(self.tokens[:CHECKED_TOKENS]))

    def _check_ids(self, ids: np.ndarray) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"{self.name} holds token id {low if low < 0 else high}, but the model has "
                f"{self.vocab_size} ids (0..{self.vocab_size - 1}); use the tokenizer it was made "
                "with, or set --vocab-size"
            )


@dataclass(frozen=True)
class TrainingData:
    train: TokenSequences
    held_out: TokenSequences


def load_training_data(
    source: DataSource, tokenizer: Tokenizer, *, vocab_size: int, seq_len: int
) -> TrainingData:
    """Open (and where needed tokenise) the training and the held-out text.

    Held out is, in this order: the source given for it; the documents that `is_held_out` names; or,
    where those are too few (one long file, a Megatron pair), the last 5 % of the token stream.
    """
    name = str(source.train or "the default corpus")
    held_out_name = str(source.held_out or name)
    open_tokens = partial(_token_streams, source, tokenizer, vocab_size)
    train, held_out = open_tokens(source.train, split=source.held_out is None)
    if source.held_out is not None:
        held_out, _ = open_tokens(source.held_out, split=False)
    elif min(len(train), len(held_out)) < seq_len + 1:
        train, held_out = _cut_tail(train, held_out, seq_len, name)
    data = TrainingData(
        TokenSequences(train, seq_len, vocab_size, f"the training text ({name})"),
        TokenSequences(held_out, seq_len, vocab_size, f"the held-out text ({held_out_name})"),
    )
    data.train.check_head()
    data.held_out.check_head()
    return data


def _token_streams(
    source: DataSource, tokenizer: Tokenizer, vocab_size: int, path: Path | None, *, split: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(train, held out) tokens at `path`; the second is empty without `split`."""
    flag = "--data" if path is source.train else "--eval-data"
    if path is not None and is_megatron_prefix(path):
        tokens = open_megatron(path, flag)
        return tokens, tokens[:0]
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model only "
            f"{vocab_size}; pass --vocab-size {tokenizer.vocab_size} or another --tokenizer"
        )
    cached = cached_tokens(open_corpus(path, flag), tokenizer, source.cache_dir, split=split)
    if len(cached.train) + len(cached.held_out) == 0:
        raise DataError(f"{path} holds no text")
    return cached.train, cached.held_out


def _cut_tail(
    train: np.ndarray, held_out: np.ndarray, seq_len: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Split a corpus of too few documents by tokens instead of by document."""
    # Copying is fine: a stream this short of documents that has two parts is small.
    parts = [part for part in (train, held_out) if len(part)]
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if len(tokens) < 2 * (seq_len + 1):
        raise DataError(
            f"{name} has {len(tokens)} tokens; training and held-out text need at least one "
            f"sequence of {seq_len} + 1 each: give more text (--data) or a shorter --seq-len"
        )
    tail = max(seq_len + 1, int(len(tokens) * HELD_OUT_TAIL_FRACTION))
    return tokens[:-tail], tokens[-tail:]
