"""Megatron .bin/.idx pairs, written here byte by byte as Megatron's own writer lays them out."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4_plugin.errors import DataError
from fp4_plugin.pretrain.megatron_index import is_megatron_prefix, open_megatron

CODES = {np.uint8: 1, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
HEADER_BYTES = 9 + 8 + 1 + 8 + 8


def write_pair(prefix, documents, dtype=np.uint16, gap=0):
    """One sequence per document. Returns the two paths."""
    data, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    data.write_bytes(b"".join(np.asarray(d, dtype).tobytes() for d in documents))
    lengths = np.array([len(d) for d in documents], "<i4")
    pointers = np.zeros(len(documents), "<i8")
    pointers[1:] = np.cumsum(lengths[:-1]) * np.dtype(dtype).itemsize + gap
    header = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, CODES[dtype], len(documents), len(documents) + 1
    )
    boundaries = np.arange(len(documents) + 1, dtype="<i8")
    index.write_bytes(header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    return data, index


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 127), max_size=20), min_size=1, max_size=8),
    st.sampled_from(sorted(CODES, key=str)),
)
def test_the_tokens_of_any_pair_come_back_in_order(tmp_path, documents, dtype):
    expected = [token for document in documents for token in document]
    data, index = write_pair(tmp_path / "corpus", documents, dtype)
    if not expected:
        with pytest.raises(DataError, match="holds no tokens"):
            open_megatron(data)
        return
    for name in (data, index, tmp_path / "corpus"):
        tokens = open_megatron(name)
        assert tokens.tolist() == expected
        assert isinstance(tokens, np.memmap) and not tokens.flags.writeable


def test_a_prefix_is_recognised_only_where_no_file_of_that_name_is(tmp_path):
    write_pair(tmp_path / "corpus", [[1]])
    assert is_megatron_prefix(tmp_path / "corpus")
    (tmp_path / "corpus").write_text("text")
    assert not is_megatron_prefix(tmp_path / "corpus")
    assert not is_megatron_prefix(tmp_path / "absent")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_half_is_named(tmp_path, suffix):
    write_pair(tmp_path / "corpus", [[1, 2]])
    (tmp_path / f"corpus{suffix}").unlink()
    with pytest.raises(DataError, match=rf"corpus\{suffix} is missing"):
        open_megatron(tmp_path / "corpus.bin")


@pytest.mark.parametrize("keep", [0, 5, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 11])
def test_a_truncated_index_is_refused(tmp_path, keep):
    data, index = write_pair(tmp_path / "corpus", [[1, 2], [3]])
    index.write_bytes(index.read_bytes()[:keep])
    with pytest.raises(
        DataError, match=r"corpus\.idx (is not a Megatron index|holds .* truncated)"
    ):
        open_megatron(data)


def test_a_truncated_bin_is_refused(tmp_path):
    data, _ = write_pair(tmp_path / "corpus", [[1, 2], [3]])
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"holds 5 bytes, but corpus\.idx describes 6"):
        open_megatron(data)


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [(0, b"X", "no MMIDIDX header"), (9, b"\x02", "index version 2"), (17, b"\x07", "type code 7")],
)
def test_a_foreign_header_is_refused(tmp_path, offset, value, complaint):
    data, index = write_pair(tmp_path / "corpus", [[1, 2]])
    content = index.read_bytes()
    index.write_bytes(content[:offset] + value + content[offset + 1 :])
    with pytest.raises(DataError, match=complaint):
        open_megatron(data)


def test_sequences_with_gaps_are_refused(tmp_path):
    data, _ = write_pair(tmp_path / "corpus", [[1], [2]], gap=2)
    with pytest.raises(DataError, match="gaps or overlaps"):
        open_megatron(data)
