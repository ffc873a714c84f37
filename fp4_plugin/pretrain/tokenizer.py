"""Text to token ids: bytes by default, or any Hugging Face tokenizer.

A tokenizer here is four things: a name that says which ids it makes (it enters the key of the token
cache), the number of ids, the id that ends a document (or None), and `encode` for a batch of
documents. `for_export` gives the equivalent Hugging Face tokenizer to ship beside the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fp4_plugin.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "load_tokenizer"]

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    name: str
    vocab_size: int
    end_of_document: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array per text, without special tokens."""
        ...

    def for_export(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer that makes the same ids."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text, 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document: int | None = 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def for_export(self) -> PreTrainedTokenizerBase:
        """A byte-level BPE without merges: the same 257 ids in the form transformers loads."""
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END_OF_DOCUMENT)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes.

    Visible Latin-1 characters stand for themselves; the rest are counted up from 256.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible}
    characters.update({byte: chr(256 + index) for index, byte in enumerate(hidden)})
    return [characters[byte] for byte in range(256)]


class HuggingFaceTokenizer:
    """Any tokenizer that `AutoTokenizer` can load, from a folder or by name."""

    def __init__(self, source: str, backend: Any) -> None:
        self._backend = backend
        self.vocab_size = len(backend)
        self.end_of_document: int | None = backend.eos_token_id
        # The ids depend on the vocabulary, not on where it was found.
        vocabulary = repr(sorted(backend.get_vocab().items(), key=lambda item: item[1]))
        digest = hashlib.sha256(vocabulary.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.name = f"{type(backend).__name__}:{source}:{digest}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        batch = self._backend(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a document may be longer than the model's context; it is cut later
        )
        return [np.asarray(ids, dtype=np.int64) for ids in batch["input_ids"]]

    def for_export(self) -> PreTrainedTokenizerBase:
        return self._backend


def load_tokenizer(source: str | None) -> Tokenizer:
    """Bytes for None or "bytes", else the Hugging Face tokenizer at `source` (folder or name)."""
    if source in (None, "bytes"):
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # transformers answers a bad tokenizer with any of these, over many lines: keep the first.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"--tokenizer {source!r} cannot be loaded: {reason[0]} (give a folder that holds "
            "tokenizer.json, or a Hugging Face name; leave it out for bytes)"
        ) from error
    if len(backend) == 0:
        raise DataError(f"--tokenizer {source!r} has an empty vocabulary")
    return HuggingFaceTokenizer(str(source), backend)
