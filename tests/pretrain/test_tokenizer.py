"""Tokenizers: bytes, their Hugging Face twin, and a Hugging Face tokenizer from a folder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain.tokenizer import END_OF_DOCUMENT, ByteTokenizer, load_tokenizer

EXPORTED = ByteTokenizer().for_export()
# Lone surrogates are no text: they cannot come out of a UTF-8 file.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(TEXT)
def test_byte_ids_are_the_bytes_of_the_text(text):
    (ids,) = ByteTokenizer().encode([text])
    assert bytes(ids.astype(np.uint8)).decode("utf-8") == text


@settings(deadline=None)
@given(TEXT.filter(lambda text: END_OF_DOCUMENT not in text))
def test_the_exported_byte_tokenizer_makes_the_same_ids_and_decodes_them(text):
    (ids,) = ByteTokenizer().encode([text])
    assert EXPORTED(text, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert EXPORTED.decode(ids.tolist(), clean_up_tokenization_spaces=False) == text


def test_the_exported_byte_tokenizer_survives_saving_with_its_end_of_document(tmp_path):
    EXPORTED.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == ByteTokenizer.vocab_size
    assert loaded.eos_token_id == ByteTokenizer.end_of_document
    assert loaded("a\n\xe9")["input_ids"] == [97, 10, 0xC3, 0xA9]


def test_a_hugging_face_tokenizer_is_loaded_from_a_folder(tmp_path):
    EXPORTED.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    (ids,) = tokenizer.encode(["hello"])
    assert ids.tolist() == list(b"hello")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_tokenizers_with_other_vocabularies_have_other_names(tmp_path):
    names = set()
    for extra in ("<a>", "<b>"):
        backend = PreTrainedTokenizerFast(tokenizer_object=EXPORTED.backend_tokenizer)
        backend.add_tokens([extra])
        backend.save_pretrained(tmp_path)
        names.add(load_tokenizer(str(tmp_path)).name)
    assert len(names) == 2


@pytest.mark.parametrize("source", ["missing/folder", "no-such-owner/no-such-tokenizer"])
def test_a_tokenizer_that_cannot_be_loaded_is_one_clear_line(source):
    with pytest.raises(DataError, match=f"--tokenizer '{source}' cannot be loaded") as raised:
        load_tokenizer(source)
    assert "\n" not in str(raised.value)
