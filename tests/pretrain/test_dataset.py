"""Token streams cut into sequences, and text that does not suffice or does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain import dataset
from fp4_plugin.pretrain.dataset import DataSource, TokenSequences, load_training_data
from fp4_plugin.pretrain.tokenizer import ByteTokenizer
from tests.pretrain.test_megatron_index import write_pair


def _load(tmp_path, train, held_out=None, seq_len=8, vocab_size=320):
    source = DataSource(train, held_out, tmp_path / "cache")
    return load_training_data(source, ByteTokenizer(), vocab_size=vocab_size, seq_len=seq_len)


def _text(path, text):
    path.write_text(text)
    return path


def test_each_sequence_begins_with_the_last_target_of_the_one_before():
    sequences = TokenSequences(np.arange(13), 4, 100, "text")
    assert len(sequences) == 3
    assert sequences.read(np.array([0, 2])).tolist() == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12]]


def test_evenly_spaced_sequences_cover_the_whole_text():
    sequences = TokenSequences(np.arange(101), 10, 200, "text")
    assert sequences.evenly_spaced(4).tolist() == [0, 2, 5, 7]
    assert sequences.evenly_spaced(99).tolist() == list(range(10))


def test_a_fingerprint_is_of_the_tokens_not_of_how_they_are_stored():
    tokens = np.arange(5000) % 250
    expected = TokenSequences(tokens.astype(np.uint16), 10, 300, "text").fingerprint()
    assert TokenSequences(tokens.astype(np.int64), 7, 300, "elsewhere").fingerprint() == expected
    changed = tokens.copy()
    changed[4321] += 1
    assert TokenSequences(changed, 10, 300, "text").fingerprint() != expected
    assert TokenSequences(tokens[:-1], 10, 300, "text").fingerprint() != expected


def test_the_fingerprint_of_a_long_stream_covers_both_ends_and_places_between(monkeypatch):
    monkeypatch.setattr(dataset, "CHECKED_TOKENS", 1000)
    monkeypatch.setattr(dataset, "FINGERPRINT_PIECES", 11)
    monkeypatch.setattr(dataset, "FINGERPRINT_TOKENS", 10)
    tokens = np.zeros(5010, np.uint16)
    expected = TokenSequences(tokens, 10, 300, "text").fingerprint()
    for place, is_seen in [(0, True), (2505, True), (5009, True), (250, False)]:
        changed = tokens.copy()
        changed[place] = 1
        differs = TokenSequences(changed, 10, 300, "text").fingerprint() != expected
        assert differs == is_seen, place


def test_one_long_file_gives_its_end_as_held_out_text(tmp_path):
    data = _load(tmp_path, _text(tmp_path / "a.txt", "x" * 999))
    assert (len(data.train.tokens), len(data.held_out.tokens)) == (950, 50)
    assert data.held_out.tokens[-1] == ByteTokenizer.end_of_document


def test_held_out_text_can_be_given_apart_and_then_nothing_is_cut_off(tmp_path):
    train, held_out = _text(tmp_path / "a.txt", "x" * 99), _text(tmp_path / "b.txt", "y" * 49)
    data = _load(tmp_path, train, held_out)
    assert (len(data.train.tokens), len(data.held_out.tokens)) == (100, 50)


@pytest.mark.parametrize(("text", "tokens"), [("x" * 8, 9), ("x" * 16, 17)])
def test_a_corpus_shorter_than_two_sequences_says_how_long_it_is(tmp_path, text, tokens):
    with pytest.raises(DataError, match=rf"has {tokens} tokens; training and held-out text need"):
        _load(tmp_path, _text(tmp_path / "a.txt", text))


def test_training_text_shorter_than_a_sequence_is_refused(tmp_path):
    train, held_out = _text(tmp_path / "a.txt", "x"), _text(tmp_path / "b.txt", "y" * 49)
    with pytest.raises(DataError, match="has 2 tokens, less than one sequence of 8"):
        _load(tmp_path, train, held_out)


def test_empty_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no text"):
        _load(tmp_path, _text(tmp_path / "a.txt", ""))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has 257 ids, the model only 100; pass --vocab-size 257"):
        _load(tmp_path, _text(tmp_path / "a.txt", "x" * 99), vocab_size=100)


def test_a_megatron_pair_is_read_in_place_and_its_end_is_held_out(tmp_path):
    data_file, _ = write_pair(tmp_path / "corpus", [list(range(100)), list(range(60))])
    data = _load(tmp_path, data_file)
    assert data.train.tokens.tolist() == [*range(100), *range(51)]
    assert data.held_out.tokens.tolist() == list(range(51, 60))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("token", [320, -1])
def test_a_megatron_pair_of_another_vocabulary_is_refused_at_the_start(tmp_path, token):
    data_file, _ = write_pair(tmp_path / "corpus", [[5] * 50 + [token] + [5] * 50], np.int32)
    with pytest.raises(DataError, match=rf"holds token id {token}, but the model has 320 ids"):
        _load(tmp_path, data_file)


@pytest.mark.parametrize("name", ["absent.txt", "absent.bin"])
def test_what_is_missing_is_named_with_its_flag(tmp_path, name):
    text = _text(tmp_path / "a.txt", "x" * 99)
    with pytest.raises(DataError, match=f"^--data .*{name}"):
        _load(tmp_path, tmp_path / name)
    with pytest.raises(DataError, match=f"^--eval-data .*{name}"):
        _load(tmp_path, text, tmp_path / name)
