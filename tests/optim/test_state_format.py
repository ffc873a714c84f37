"""Storage formats: what a block of codes stands for, and that reading and writing it is exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_plugin.errors import ConfigError
from fp4_plugin.optim import BLOCK_SIZE, STATE_FORMATS
from tests.optim.reference import decode_tensor, encode_tensor

FORMATS = list(STATE_FORMATS)
# Largest and smallest normal number, spacing of subnormal ones, bits of the mantissa, binade of
# the largest: typed from the definitions of the formats, not asked of torch.
LIMITS = {
    torch.float16: (65504.0, 2.0**-14, 2.0**-24, 10, 15),
    torch.float8_e4m3fn: (448.0, 2.0**-6, 2.0**-9, 3, 8),
}
TINY = 2.0**-149  # spacing of float32 itself near zero


def limits(name: str) -> tuple[float, float, float, int, int]:
    return LIMITS[STATE_FORMATS[name].dtype]


def random_block(seed: int, spread: float, size: float, numel: int) -> torch.Tensor:
    """Numbers of both signs from size down to size / 2^spread, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponent = -spread * torch.rand(numel, generator=generator, dtype=torch.float64)
    sign = torch.randint(-1, 2, (numel,), generator=generator)
    return (size * sign * 2**exponent).float()


def stored_form(name: str, x: torch.Tensor) -> torch.Tensor:
    """What the format stores of `x`: the root, for a root."""
    return x.abs().sqrt() if STATE_FORMATS[name].is_root else x


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 60),
    size=st.floats(1e-30, 1e18),
    numel=st.sampled_from([1, 5, 1023, 1024, 1025, 2500]),
)
def test_scales_leave_headroom_and_values_keep_their_precision(name, seed, spread, size, numel):
    _, _, spacing, mantissa, top = limits(name)
    fmt = STATE_FORMATS[name]
    x = random_block(seed, spread, size, numel)
    x = x * x if fmt.is_root and size < 1e15 else x.abs() if fmt.is_root else x
    codes, scale = encode_tensor(x, fmt)
    assert codes.dtype == fmt.dtype
    assert (codes.shape, scale.shape) == (x.shape, (math.ceil(numel / BLOCK_SIZE),))
    value = decode_tensor(codes, scale, fmt)
    for index, (block, got) in enumerate(zip(x.split(1024), value.split(1024), strict=True)):
        exact, read = stored_form(name, block).double(), stored_form(name, got).double()
        unit = float(scale[index])
        assert math.frexp(unit)[0] == 0.5  # a power of two
        amax = float(exact.max() if fmt.is_root else exact.abs().max())
        if unit > fmt.min_scale:
            # Within the second-largest binade, or rounded up to the border of the largest.
            assert 2.0 ** (top - 1) * (1 - 2.0**-mantissa) <= amax / unit < 2.0**top
        allowed = torch.maximum(
            exact.abs() * 2.0 ** -(mantissa + 1), torch.tensor(unit * spacing / 2)
        )
        error = (read - exact).abs()
        assert bool((error <= allowed * (1 + 1e-6) + TINY).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale_exponent", [-100, -60, -14, 0, 3, 40, 90])
def test_every_code_is_read_as_the_number_it_is(name, scale_exponent):
    fmt = STATE_FORMATS[name]
    bits = fmt.dtype.itemsize * 8
    all_codes = torch.arange(2**bits, dtype=torch.int32)
    codes = all_codes.to({8: torch.uint8, 16: torch.int32}[bits])
    codes = codes.view(fmt.dtype) if bits == 8 else codes.to(torch.int16).view(fmt.dtype)
    numbers = _by_definition(all_codes.numpy(), fmt.dtype)
    is_number = torch.from_numpy(np.isfinite(numbers) & ((numbers >= 0) | (not fmt.is_root)))
    exponent = scale_exponent // 2 if fmt.is_root else scale_exponent
    scale = torch.full((-(-len(codes) // BLOCK_SIZE),), 2.0**exponent)
    value = decode_tensor(codes, scale, fmt).double()
    exact = torch.from_numpy(numbers) * 2.0**exponent
    exact = exact * exact if fmt.is_root else exact
    expected = exact.float().double()
    assert torch.equal(value[is_number], expected[is_number])


def _by_definition(codes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Sign, exponent and mantissa put together in float64."""
    mantissa_bits = LIMITS[dtype][3]
    exponent_bits = dtype.itemsize * 8 - 1 - mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (codes & (2**mantissa_bits - 1)) / 2.0**mantissa_bits
    normal = (1 + fraction) * 2.0 ** (exponent.astype(float) - bias)
    value = sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    if dtype == torch.float16:
        return np.where(exponent == 2**exponent_bits - 1, np.nan, value)
    return np.where((codes & 0x7F) == 0x7F, np.nan, value)  # E4M3FN has one NaN and no infinity


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_writing_what_was_read_changes_no_bit(name, data):
    """For blocks of any codes, at any scale that an encoder may choose."""
    fmt = STATE_FORMATS[name]
    bits, (_, _, _, mantissa, top) = fmt.dtype.itemsize * 8, limits(name)
    # Headroom leaves the largest binade unused.
    bias = 2 ** (bits - 2 - mantissa) - 1
    largest = ((top + bias) << mantissa) - 1
    magnitudes = data.draw(
        st.lists(st.integers(0, largest), min_size=1, max_size=40), label="codes"
    )
    signs = data.draw(st.integers(0, 2**40), label="signs") if not fmt.is_root else 0
    raw = [m | ((signs >> i & 1) << (bits - 1)) for i, m in enumerate(magnitudes)]
    lowest = round(math.log2(fmt.min_scale))
    exponent = data.draw(st.integers(lowest, 40 if fmt.is_root else 110), label="scale")
    numpy_type = {8: np.uint8, 16: np.uint16}[bits]
    codes = torch.from_numpy(np.array(raw, numpy_type).view(f"i{bits // 8}")).view(fmt.dtype)
    value = decode_tensor(codes, torch.tensor([2.0**exponent]), fmt)
    assert bool(value.isfinite().all())
    again, scale = encode_tensor(value, fmt)
    reread = decode_tensor(again, scale, fmt)
    assert torch.equal(_bits(reread), _bits(value))
    if scale.item() == 2.0**exponent:
        assert torch.equal(_bits(again), _bits(codes))
    # What an encoder chose once, it chooses again.
    third, third_scale = encode_tensor(reread, fmt)
    assert torch.equal(_bits(third), _bits(again))
    assert torch.equal(third_scale, scale)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@pytest.mark.parametrize("name", FORMATS)
def test_zero_and_the_smallest_and_largest_float32_numbers(name):
    fmt = STATE_FORMATS[name]
    for x in (torch.zeros(1500), torch.full((1500,), TINY), torch.full((1500,), 1e-38)):
        value = decode_tensor(*encode_tensor(x, fmt), fmt)
        assert bool(value.isfinite().all())
        assert bool((value >= 0).all())
        assert bool((value <= 2 * x).all())
    for size in (1e30, 3e38):
        value = decode_tensor(*encode_tensor(torch.full((1500,), size), fmt), fmt)
        assert torch.allclose(value, torch.full((1500,), size), rtol=2.0 ** -limits(name)[3])
    assert torch.equal(decode_tensor(*encode_tensor(torch.zeros(0), fmt), fmt), torch.zeros(0))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "all bits"])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_the_others_are_not(name, bad):
    fmt = STATE_FORMATS[name]
    x = torch.linspace(1, 2, 3072)
    if bad == "all bits":  # CUDA's NaN
        x.view(torch.int32)[1100] = 0x7FFFFFFF
    else:
        x[1100] = bad
    value = decode_tensor(*encode_tensor(x, fmt), fmt)
    assert bool(value[1024:2048].isnan().all())
    assert bool(value[:1024].isfinite().all())
    assert bool(value[2048:].isfinite().all())
    again = decode_tensor(*encode_tensor(value, fmt), fmt)  # and it stays so
    assert bool(again[1024:2048].isnan().all())


def test_an_unknown_format_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown optimiser state format 'fp16sqrt'.*fp16_sqrt"):
        STATE_FORMATS["fp16sqrt"]
