"""The text of a study: bytes, opened by every worker from the same memory-mapped cache."""

from __future__ import annotations

import hashlib

import numpy as np

from fp4_plugin.bench.ablation.settings import StudyOptions
from fp4_plugin.pretrain.dataset import DataSource, TrainingData, load_training_data
from fp4_plugin.pretrain.presets import ModelPreset
from fp4_plugin.pretrain.token_cache import default_cache_dir
from fp4_plugin.pretrain.tokenizer import ByteTokenizer

__all__ = ["corpus_digest", "corpus_source", "open_data"]


def corpus_source(options: StudyOptions) -> DataSource:
    return DataSource(options.data, None, options.cache_dir or default_cache_dir())


def open_data(source: DataSource, shape: ModelPreset) -> TrainingData:
    """The corpus as byte sequences. Raises DataError."""
    return load_training_data(
        source, ByteTokenizer(), vocab_size=shape.vocab_size, seq_len=shape.seq_len
    )


def corpus_digest(data: TrainingData) -> str:
    """16 hex digits of the tokens themselves, so that a copied corpus is the same corpus."""
    digest = hashlib.sha256()
    for sequences in (data.train, data.held_out):
        digest.update(np.ascontiguousarray(sequences.tokens).tobytes())
        digest.update(b"/")
    return digest.hexdigest()[:16]
