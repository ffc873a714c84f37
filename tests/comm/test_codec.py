"""Messages byte by byte against ml_dtypes and numpy, and every message that is not one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4_plugin.comm import BlockCodec
from fp4_plugin.comm.codec import BLOCK_SIZES, WIRE_FORMATS
from fp4_plugin.core.formats import E2M1
from fp4_plugin.errors import CommunicationError, ConfigError
from tests.comm.reference import message_of, rounded, rounded_in_blocks
from tests.oracles import GRIDS, dequantize

FORMATS = [fmt.name for fmt in WIRE_FORMATS]
DTYPES = ["float32", "bfloat16", "float16"]
BLOCK = 32
every_format = pytest.mark.parametrize("fmt", FORMATS)
HEADER, SCALE = 16, 4


def _encoded(values: np.ndarray, fmt: str, block: int = BLOCK, dtype: str = "float32"):
    codec = BlockCodec.named(fmt, block)
    message = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8)
    codec.encode(torch.from_numpy(values.copy()).to(getattr(torch, dtype)), message)
    return codec, message


def _gradients(numel: int, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    return rounded(values * np.float32(1e-3), dtype)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_messages_have_the_documented_bytes_and_decode_to_the_oracle(fmt, dtype, numel):
    values = _gradients(numel, dtype)
    codec, message = _encoded(values, fmt, dtype=dtype)
    assert message.numpy().tobytes() == message_of(values, fmt, BLOCK)
    decoded = codec.decode(message, numel)
    assert decoded.dtype == torch.float32
    expected = rounded_in_blocks(values, fmt, BLOCK).values
    assert (decoded.numpy().view(np.int32) == expected.view(np.int32)).all()


def test_long_messages_are_handled_in_parts_without_a_seam():
    """More elements than the codec handles at a time, with a ragged end."""
    numel, block = (1 << 18) * 2 + 1000, 1 << 16
    values = np.repeat(_gradients(1024), 2 + numel // 1024)[:numel] * np.float32(3)
    codec, message = _encoded(values, "e4m3", block)
    assert message.numpy().tobytes() == message_of(values, "e4m3", block)
    decoded = codec.decode(message, numel).numpy()
    assert (decoded == rounded_in_blocks(values, "e4m3", block).values).all()


@every_format
@pytest.mark.parametrize("block", [BLOCK_SIZES[0], BLOCK_SIZES[-1]])
def test_a_block_starts_a_new_scale(fmt, block):
    values = np.repeat(np.float32([1.0, 1e-4]), block)
    codec, message = _encoded(values, fmt, block)
    np.testing.assert_allclose(codec.decode(message, 2 * block).numpy(), values, rtol=1e-6)


@every_format
def test_a_given_amax_takes_the_place_of_all_others_and_saturates(fmt):
    values = np.linspace(-1, 1, 3 * BLOCK, dtype=np.float32)
    codec = BlockCodec.named(fmt, BLOCK)
    message = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8)
    values[40] = np.inf
    codec.encode(torch.from_numpy(values), message, torch.full((1, 1), 0.5))
    decoded = codec.decode(message, len(values)).numpy()
    assert np.isnan(decoded[BLOCK : 2 * BLOCK]).all()
    decoded, values = np.delete(decoded, slice(32, 64)), np.delete(values, slice(32, 64))
    assert np.abs(decoded).max() == pytest.approx(0.5, rel=1e-6)
    assert decoded[np.abs(values) > 0.5] == pytest.approx(np.sign(values[np.abs(values) > 0.5]) / 2)


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_untouched(fmt, bad):
    values = _gradients(3 * BLOCK + 5)
    clean = rounded_in_blocks(values, fmt, BLOCK).values
    values[BLOCK + 3] = bad
    codec, message = _encoded(values, fmt)
    decoded = codec.decode(message, len(values)).numpy()
    inside = np.zeros(len(values), bool)
    inside[BLOCK : 2 * BLOCK] = True
    assert np.isnan(decoded[inside]).all()
    assert (decoded[~inside] == clean[~inside]).all()


@every_format
def test_tiny_subnormal_and_zero_blocks_become_zeros_with_a_sign(fmt):
    tiny = np.float32(2.0**-103)
    values = np.concatenate(
        [
            np.full(BLOCK, tiny),
            np.full(BLOCK, np.float32(-1e-42)),
            np.zeros(BLOCK, np.float32),
            np.full(BLOCK, np.float32(2.0**-102)),
        ]
    )
    codec, message = _encoded(values, fmt)
    decoded = codec.decode(message, len(values)).numpy()
    assert (decoded[: 3 * BLOCK] == 0).all()
    assert np.signbit(decoded[BLOCK : 2 * BLOCK]).all()
    assert decoded[3 * BLOCK :] == pytest.approx(2.0**-102, rel=1e-6)
    scales = codec.parts(message, len(values)).scale_inv
    assert (scales > 0).all()


@every_format
def test_every_code_decodes_to_its_value(fmt):
    codec = BlockCodec.named(fmt, 256)
    message = torch.empty(codec.num_bytes(256), dtype=torch.uint8)
    parts = codec.begin(message, 256)
    parts.scale_inv.fill_(0.25)
    parts.codes.copy_(torch.arange(256))
    decoded = codec.decode(message, 256).numpy()
    grid = GRIDS[fmt]
    for sign in (0, 128):
        finite = decoded[sign : sign + len(grid)]
        assert (finite == dequantize(np.arange(sign, sign + len(grid)), grid_of(fmt)) / 4).all()
        reserved = decoded[sign + len(grid) : sign + 128]
        assert not np.isfinite(reserved).any() and np.isnan(reserved[-1])


def grid_of(fmt: str) -> np.ndarray:
    """The magnitudes padded to 128 entries, so that bit 7 is the sign."""
    return np.concatenate([GRIDS[fmt], np.full(128 - len(GRIDS[fmt]), np.nan)])


def test_messages_add_up_in_the_given_order_in_float32():
    # In this order the small numbers survive; in the opposite order they do not.
    terms = [np.float32([2.0**-24] * 16), np.float32([2.0**-24] * 16), np.float32([1.0] * 16)]
    codec = BlockCodec(block_size=16)
    messages = [_encoded(one, "e4m3", 16)[1] for one in terms]
    sums = []
    for order in (messages, messages[::-1]):
        codec.sum(order, 16, lambda start, values: sums.append(values.clone()))
    assert (sums[0] == 1 + 2.0**-23).all()
    assert (sums[1] == 1.0).all()


def _damaged(offset: int, value: int, numel: int = 2 * BLOCK):
    codec, message = _encoded(_gradients(numel), "e4m3")
    message[offset] = value
    return codec, message


@pytest.mark.parametrize(
    ("offset", "named"),
    [(0, "magic"), (3, "magic and version"), (4, "format"), (9, "block size"), (12, "elements")],
)
def test_a_message_with_another_header_is_refused_by_name(offset, named):
    codec, message = _damaged(offset, 0x63)
    with pytest.raises(CommunicationError, match=f"message 0 has another header.*{named}"):
        codec.decode(message, 2 * BLOCK)


def test_the_error_names_the_sender_and_both_values():
    codec, good = _encoded(_gradients(64), "e4m3")
    _, bad = _encoded(_gradients(64), "e5m2")
    with pytest.raises(CommunicationError, match=r"message 1 .* format 0x52 instead of 0x43"):
        codec.sum([good, bad], 64, lambda start, values: None)
    other = BlockCodec(block_size=64)
    with pytest.raises(CommunicationError, match="block size 32 instead of 64"):
        other.sum([good[: other.num_bytes(64)]], 64, lambda start, values: None)
    longer = torch.cat([good, good[:1]])
    with pytest.raises(CommunicationError, match="number of elements 64 instead of 65"):
        # 65 elements need one more scale as well.
        codec.decode(torch.cat([longer, good[:4]]), 65)


@pytest.mark.parametrize("change", [-1, 1, -16])
def test_a_message_of_the_wrong_length_is_refused(change):
    codec, message = _encoded(_gradients(64), "e4m3")
    wrong = torch.zeros(len(message) + change, dtype=torch.uint8)
    with pytest.raises(CommunicationError, match=f"has {len(message)} bytes, not {len(wrong)}"):
        codec.decode(wrong, 64)
    with pytest.raises(CommunicationError, match="torch.int8"):
        codec.decode(message.view(torch.int8), 64)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, np.inf, -np.inf])
def test_scales_no_sender_writes_are_refused(scale):
    codec, message = _encoded(_gradients(64), "e4m3")
    codec.parts(message, 64).scale_inv[1] = scale
    with pytest.raises(CommunicationError, match="zero, negative or infinite"):
        codec.decode(message, 64)


@every_format
def test_nan_scales_and_nan_codes_decode_to_nan(fmt):
    codec, message = _encoded(_gradients(64), fmt)
    parts = codec.parts(message, 64)
    parts.scale_inv[1] = np.nan
    parts.codes[5] = 0x7F
    decoded = codec.decode(message, 64)
    assert decoded.isnan().nonzero().flatten().tolist() == [5, *range(32, 64)]


def test_settings_that_cannot_travel_are_refused():
    with pytest.raises(ConfigError, match="format 'e2m1' cannot travel"):
        BlockCodec(E2M1)
    with pytest.raises(ConfigError, match="'e4m2' cannot travel"):
        BlockCodec.named("e4m2")
    for wrong in (8, 1000, 2**17, 1024.0, True, "1024", None):
        with pytest.raises(ConfigError, match="block_size .*a power of two from 16 to 65536"):
            BlockCodec(block_size=wrong)


def test_more_elements_than_a_header_can_say_are_refused():
    codec = BlockCodec()
    numel = 2**31
    message = torch.empty(codec.num_bytes(numel), dtype=torch.uint8, device="meta")
    with pytest.raises(ConfigError, match="2147483648 elements .* smaller buckets"):
        codec.begin(message, numel)
    codec.begin(message[: codec.num_bytes(numel - 1)], numel - 1)


def test_lengths_are_those_of_header_scales_and_codes():
    for block in BLOCK_SIZES:
        codec = BlockCodec(block_size=block)
        for numel in (1, block - 1, block, block + 1, 10 * block):
            blocks = (numel + block - 1) // block
            assert codec.num_bytes(numel) == HEADER + SCALE * blocks + numel
            assert 0 <= codec.slot_bytes(numel) - codec.num_bytes(numel) < 16
            assert codec.slot_bytes(numel) % 16 == 0
        assert codec.num_bytes(0) == codec.slot_bytes(0) == 0


def test_identities_differ_exactly_where_codecs_do():
    codecs = [BlockCodec(fmt, block) for fmt in WIRE_FORMATS for block in BLOCK_SIZES]
    assert len({tuple(codec.identity()) for codec in codecs}) == len(codecs)
    text = BlockCodec.describe_identity(BlockCodec.named("e5m2", 512).identity())
    assert text == "format 'e5m2', block_size 512 (message version 1)"


def test_gradients_that_autograd_follows_and_inference_tensors_can_be_written():
    values = torch.linspace(-1, 1, 64, requires_grad=True)
    codec = BlockCodec(block_size=16)
    message = torch.zeros(codec.num_bytes(64), dtype=torch.uint8)
    codec.encode(values, message)
    assert not codec.decode(message, 64).requires_grad
    with torch.inference_mode():
        assert torch.equal(codec.decode(message.clone(), 64), codec.decode(message, 64))
