"""Sources of text: what is read, in which order, and what is said about text that cannot be."""

from __future__ import annotations

import json
import re

import pytest

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain.corpus import HELD_OUT_ONE_IN, is_held_out, open_corpus


def _names(corpus):
    return [document.name for document in corpus.documents()]


def test_a_folder_is_read_recursively_in_sorted_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", ".hidden", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert _names(open_corpus(tmp_path)) == ["a/b/c.md", "a/z.txt", "b.txt"]


def test_a_jsonl_file_is_one_document_per_line(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "id": 7}\n')
    documents = list(open_corpus(path).documents())
    assert [(d.name, d.text) for d in documents] == [
        ("notes.jsonl:1", "one"),
        ("notes.jsonl:3", "two"),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"content": "x"}', "no 'text' field (found ['content'])"),
        ('["text"]', "no 'text' field (found list)"),
        ('{"text": 3}', "'text' is int, not a string"),
        ('{"text": ', "not JSON"),
        ('{"text": "a"', "not JSON (Expecting ',' delimiter, column 13)"),
        ('{"text": "\\ud800"}', "'text' is not Unicode text (surrogates not allowed)"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=re.escape(f"{path}:2: {complaint}")):
        list(open_corpus(path).documents())


@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_a_file_that_is_not_text_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match=rf"{name} is not UTF-8 text"):
        list(open_corpus(path).documents())


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        open_corpus(tmp_path).fingerprint()


def test_line_ends_are_kept_as_they_are(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"a\r\nb\n")
    (document,) = open_corpus(path).documents()
    assert document.text == "a\r\nb\n"


def test_a_missing_path_and_an_empty_folder_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        open_corpus(tmp_path / "absent")
    with pytest.raises(DataError, match="the folder holds no files"):
        open_corpus(tmp_path)


def test_the_fingerprint_changes_with_names_sizes_and_times(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = open_corpus(tmp_path).fingerprint()
    assert open_corpus(tmp_path).fingerprint() == first
    path.write_text("three")
    second = open_corpus(tmp_path).fingerprint()
    path.rename(tmp_path / "b.txt")
    assert len({first, second, open_corpus(tmp_path).fingerprint()}) == 3


def test_the_default_corpus_is_the_library_without_tests_and_packages():
    corpus = open_corpus(None)
    names = [path.relative_to(corpus.root).as_posix() for path in corpus.files]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}
    assert not [name for name in names if "_sysconfigdata" in name]


def test_about_one_library_file_in_twenty_is_held_out():
    corpus = open_corpus(None)
    held_out = [
        path for path in corpus.files if is_held_out(path.relative_to(corpus.root).as_posix())
    ]
    assert 0.02 < len(held_out) / len(corpus.files) < 0.10


def test_the_split_is_the_same_on_every_machine():
    held_out = [name for name in (f"{i}.txt" for i in range(200)) if is_held_out(name)]
    assert len(held_out) in range(200 // HELD_OUT_ONE_IN // 2, 200 // HELD_OUT_ONE_IN * 2)
    assert held_out[:3] == ["15.txt", "39.txt", "49.txt"]
