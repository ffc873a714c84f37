"""Where training text comes from: `--data`, or the source text of Python's standard library.

A corpus is an ordered, deterministic stream of documents (name, text). Names are relative to the
corpus, so the split into train and held-out text is the same on every machine: a document is held
out if the hash of its name says so, one in `HELD_OUT_ONE_IN`. Files are never cut across the split.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fp4_plugin.errors import DataError

__all__ = ["Document", "TextCorpus", "is_held_out", "open_corpus", "standard_library"]

HELD_OUT_ONE_IN = 20

# Not prose, not everywhere, or different on every machine: never part of the default corpus.
_LIBRARY_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib-dynload",
}


@dataclass(frozen=True)
class Document:
    """One text; `name` is relative to the corpus ("json/decoder.py", "notes.jsonl:12")."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Whether the document of this name belongs to the held-out text. Depends on the name alone."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class TextCorpus:
    """Text and JSONL files under `root`, in sorted order."""

    name: str
    root: Path
    files: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Changes whenever a file is added, removed or written; does not read the files.

        Raises DataError for a file that is not there.
        """
        lines = [str(self.root.resolve())]
        for path in self.files:
            try:
                status = path.stat()
            except OSError as error:  # a link to nowhere, or a file that has just gone
                raise DataError(f"cannot read {path}: {error.strerror}") from error
            lines.append(f"{self._relative(path)} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            if path.suffix == ".jsonl":
                yield from self._lines(path)
            else:
                yield Document(self._relative(path), _read_text(path))

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _lines(self, path: Path) -> Iterator[Document]:
        with _open_text(path) as stream:
            try:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        text = _text_field(line, f"{path}:{number}")
                        yield Document(f"{self._relative(path)}:{number}", text)
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is not UTF-8 text ({error})") from error


def _open_text(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _read_text(path: Path) -> str:
    try:
        with _open_text(path) as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error})") from error


def _text_field(line: str, where: str) -> str:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict) or "text" not in record:
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no 'text' field (found {keys}); each line needs one")
    if not isinstance(record["text"], str):
        raise DataError(f"{where}: 'text' is {type(record['text']).__name__}, not a string")
    text: str = record["text"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half a character: "\ud800"
        raise DataError(f"{where}: 'text' is not Unicode text ({error.reason})") from error
    return text


def open_corpus(path: Path | None, flag: str = "--data") -> TextCorpus:
    """The corpus at `path` (a text file, a .jsonl file, a folder of both), or the default one.

    Raises DataError, which names `flag`, if nothing is there. Files are opened only when their
    documents are read.
    """
    if path is None:
        return standard_library()
    if path.is_file():
        return TextCorpus(str(path), path.parent, (path,))
    if not path.is_dir():
        raise DataError(f"{flag} {path}: no such file or folder")
    files = tuple(_walk(path, skipped=set()))
    if not files:
        raise DataError(f"{flag} {path}: the folder holds no files (hidden ones do not count)")
    return TextCorpus(str(path), path, files)


def standard_library() -> TextCorpus:
    """The .py files of this Python's own library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(
        path
        for path in _walk(root, skipped=_LIBRARY_SKIPPED)
        # _sysconfigdata_* records how and where this interpreter was built: not the same anywhere.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    )
    if not files:
        raise DataError(f"no library source under {root}; name your own text with --data")
    return TextCorpus("Python standard library", root, files)


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    """Files under `root` sorted by relative path; hidden names and `skipped` folders left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and name[0] != "."]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return iter(sorted(found, key=lambda path: path.relative_to(root).as_posix()))
