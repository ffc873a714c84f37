"""The token cache: made once, made anew when text changes, never found half-written."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain.corpus import is_held_out, open_corpus
from fp4_plugin.pretrain.token_cache import cached_tokens
from fp4_plugin.pretrain.tokenizer import ByteTokenizer


class CountingTokenizer(ByteTokenizer):
    """Counts the texts it sees; can pretend to have more ids, or to make one too many."""

    def __init__(self, vocab_size=257, offset=0):
        self.name = f"counting{vocab_size}"
        self.vocab_size = vocab_size
        self.texts = 0
        self._offset = offset

    def encode(self, texts):
        self.texts += len(texts)
        return [ids.astype(np.int64) + self._offset for ids in super().encode(texts)]


@pytest.fixture
def folder(tmp_path):
    """Forty documents, of which some are held out."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"document {index}")
    return folder


def _cached(folder, tokenizer, split=True):
    return cached_tokens(open_corpus(folder), tokenizer, folder.parent / "cache", split=split)


def test_documents_end_with_their_id_and_are_split_by_name(folder):
    tokens = _cached(folder, ByteTokenizer())
    names = [path.name for path in open_corpus(folder).files]
    for stream, out in ((tokens.train, False), (tokens.held_out, True)):
        texts = [(folder / name).read_text() for name in names if is_held_out(name) == out]
        assert texts
        assert stream.tolist() == [i for text in texts for i in (*text.encode(), 256)]


def test_without_a_split_everything_is_for_training(folder):
    tokens = _cached(folder, ByteTokenizer(), split=False)
    assert tokens.train.tolist().count(256) == 40
    assert len(tokens.held_out) == 0


def test_text_is_tokenised_once_until_it_changes(folder):
    tokenizer = CountingTokenizer()
    first = _cached(folder, tokenizer)
    again = _cached(folder, tokenizer)
    assert tokenizer.texts == 40
    assert np.array_equal(first.train, again.train)
    (folder / "new.txt").write_text("new")
    _cached(folder, tokenizer)
    assert tokenizer.texts == 81


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), (1 << 17, np.uint32)])
def test_ids_take_two_bytes_where_they_fit_and_are_mapped_read_only(folder, vocab_size, dtype):
    train = _cached(folder, CountingTokenizer(vocab_size)).train
    assert train.dtype == dtype
    assert isinstance(train, np.memmap) and not train.flags.writeable


def test_many_processes_asking_at_once_tokenise_once(folder):
    tokenizer = CountingTokenizer()
    threads = [threading.Thread(target=_cached, args=(folder, tokenizer)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.texts == 40


def test_an_id_beyond_the_vocabulary_is_refused_and_leaves_nothing_behind(folder):
    with pytest.raises(DataError, match="beyond its own 257 ids"):
        _cached(folder, CountingTokenizer(offset=200))
    assert [path for path in (folder.parent / "cache").iterdir() if path.is_dir()] == []


def test_a_damaged_cache_is_named(folder):
    _cached(folder, ByteTokenizer())
    (train,) = (folder.parent / "cache").glob("*/train.bin")
    train.write_bytes(train.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"the token cache .* is damaged .*delete it"):
        _cached(folder, ByteTokenizer())


def test_a_cache_that_cannot_be_written_is_a_clear_error(folder):
    (folder.parent / "cache").write_text("a file where a folder should be")
    with pytest.raises(DataError, match="cannot write the token cache"):
        _cached(folder, ByteTokenizer())
