"""Scales and codes of `quantize`: bit for bit against numpy, every granularity and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from fp4_plugin.core.formats import FORMATS
from fp4_plugin.core.packing import pack
from fp4_plugin.core.quantize import QuantizedTensor, fake_quantize, quantize
from fp4_plugin.core.rounding import PhiloxKey
from fp4_plugin.errors import ConfigError
from tests.oracles import (
    GRIDS,
    ML_DTYPES,
    dequantize,
    float32_of_hex,
    half_up_value,
    load_vectors,
    nearest_even_code,
    quantize_groups,
    quantize_rows,
    sqnr_db,
)
from tests.strategies import matrices, quick
from tests.tolerances import SQNR_DB

SIGNED = ["e2m1", "e1m2", "e3m0", "e4m3", "e5m2"]
# name -> (rows, columns) of a group; 0 = all of them.
GROUPS = {
    "tensor": (0, 0),
    "row": (1, 0),
    "block(32)": (1, 32),
    "block(16)": (1, 16),
    "block(7)": (1, 7),
    "tile(16,16)": (16, 16),
}


def group_of(granularity: str, shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = GROUPS[granularity]
    return rows or max(shape[0], 1), columns or max(shape[1], 1)


def expanded(scale_inv: torch.Tensor, shape: tuple[int, int], group: tuple[int, int]) -> np.ndarray:
    """scale_inv repeated over the elements that share it."""
    if scale_inv.numel() == 1:
        return scale_inv.reshape(1, 1).expand(shape).numpy()
    rows = scale_inv.repeat_interleave(group[0], 0)[: shape[0]]
    return rows.repeat_interleave(group[1], 1)[:, : shape[1]].numpy()


def assert_same_bits(value: torch.Tensor | np.ndarray, expected: np.ndarray) -> None:
    """Equal float32 bit patterns, where any NaN equals any NaN."""
    value, expected = np.asarray(value), np.asarray(expected)
    assert value.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(value), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(
        value.view(np.uint32)[finite], expected.view(np.uint32)[finite], strict=True
    )


def check_against_oracle(x: np.ndarray, name: str, granularity: str) -> QuantizedTensor:
    group = group_of(granularity, x.shape)
    expected = quantize_groups(x, GRIDS[name], group)
    quantized = quantize(torch.from_numpy(x), name, granularity)
    assert quantized.codes.dtype == torch.uint8
    assert quantized.scale_inv.dtype == torch.float32
    assert quantized.format is FORMATS[name]
    assert tuple(quantized.shape) == x.shape
    np.testing.assert_array_equal(quantized.codes.numpy(), expected.codes)
    assert_same_bits(expanded(quantized.scale_inv, x.shape, group).copy(), expected.scale_inv)
    assert_same_bits(quantized.dequantize(), expected.values)
    return quantized


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", load_vectors("e2m1_rowwise"), ids=lambda case: case["name"])
def test_every_rowwise_vector(case: dict) -> None:
    quantized = quantize(torch.from_numpy(float32_of_hex(case["x_hex"])))
    assert quantized.codes.tolist() == case["codes"]
    assert_same_bits(quantized.scale_inv[:, 0], float32_of_hex(case["scale_inv_hex"]))
    assert_same_bits(quantized.dequantize(), np.array(case["dequantized"], dtype=np.float32))


@pytest.mark.parametrize("case", load_vectors("edges")["rows"], ids=lambda case: case["name"])
def test_every_edge_row_vector(case: dict) -> None:
    if "x_hex" in case:
        x = float32_of_hex(case["x_hex"])
        scale_inv = np.float32(float.fromhex(case["scale_inv_hex"]))
    else:
        x, scale_inv = np.array(case["x"], dtype=np.float32), np.float32(case["scale_inv"])
    quantized = quantize(torch.from_numpy(x).unsqueeze(0))
    assert quantized.codes.tolist() == [case["codes"]]
    assert_same_bits(quantized.scale_inv.reshape(1), np.array([scale_inv]))
    if np.isnan(scale_inv):
        assert quantized.dequantize().isnan().all()


def test_the_codes_of_unscaled_e2m1_values_are_the_vectors() -> None:
    cases = load_vectors("e2m1_rounding")
    cases = [case for case in cases if abs(case["x"]) <= 6]
    # A 6 in every row makes the scale exactly 1.
    x = torch.tensor([[float.fromhex(case["x_hex"]), 6.0] for case in cases])
    quantized = quantize(x)
    assert quantized.codes[:, 0].tolist() == [case["code"] for case in cases]
    assert (quantized.scale_inv == 1).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_codes_of_unscaled_fp8_values_are_the_vectors(name: str) -> None:
    largest = FORMATS[name].max
    cases = [case for case in load_vectors("fp8_cast") if abs(case["x"]) <= largest]
    quantized = quantize(torch.tensor([[case["x"], largest] for case in cases]), name)
    assert quantized.codes[:, 0].tolist() == [case[name] for case in cases]


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_codes_carry_the_bits_of_ml_dtypes(name: str) -> None:
    largest = FORMATS[name].max
    x = np.clip(gaussian(64, 33) * largest / 3, -largest, largest)
    x[:, 0] = largest
    expected = x.astype(ML_DTYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(quantize(torch.from_numpy(x), name).codes.numpy(), expected)


@pytest.mark.parametrize(
    "shape", [(5, 64), (3, 50), (17, 33), (16, 16), (1, 1), (4, 1), (1, 767)], ids=str
)
@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("name", SIGNED)
def test_codes_and_scales_equal_the_oracle(
    name: str, granularity: str, shape: tuple[int, int]
) -> None:
    check_against_oracle(gaussian(*shape), name, granularity)


@quick
@given(matrices())
def test_rows_of_anything_finite_equal_the_oracle(x: np.ndarray) -> None:
    for name in SIGNED:
        check_against_oracle(x, name, "row")


@quick
@given(matrices(max_rows=20))
def test_blocks_and_tiles_of_anything_finite_equal_the_oracle(x: np.ndarray) -> None:
    for granularity in ("tensor", "block(7)", "tile(16,16)"):
        check_against_oracle(x, "e2m1", granularity)


def test_many_bf16_rows_equal_the_oracle_at_exact_ties() -> None:
    # Dividing by the scale instead of multiplying by its inverse changes 5e-4 of these codes.
    x = torch.from_numpy(gaussian(512, 512, seed=3)).bfloat16()
    expected = quantize_rows(x.float().numpy(), GRIDS["e2m1"])
    quantized = quantize(x)
    np.testing.assert_array_equal(quantized.codes.numpy(), expected.codes)
    assert_same_bits(quantized.scale_inv, expected.scale_inv)


@pytest.mark.parametrize("name", SIGNED)
def test_the_largest_element_never_leaves_the_grid(name: str) -> None:
    # f32(amax * f32(max / amax)) exceeds max in 5 to 10 % of rows.
    x = torch.from_numpy(gaussian(4096, 4, seed=4))
    quantized = quantize(x, name)
    top = quantized.codes.gather(1, x.abs().argmax(1, keepdim=True))
    assert (dequantize(top.numpy(), GRIDS[name]).__abs__() == FORMATS[name].max).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", GROUPS)
def test_narrow_inputs_are_widened_before_anything_else(
    granularity: str, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(gaussian(33, 50)).to(dtype)
    narrow, wide = quantize(x, "e2m1", granularity), quantize(x.float(), "e2m1", granularity)
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scale_inv, wide.scale_inv)


@pytest.mark.parametrize("granularity", GROUPS)
def test_a_non_contiguous_input_quantises_like_its_copy(granularity: str) -> None:
    base = torch.from_numpy(gaussian(48, 66))
    for view in (base.t(), base[::2, 1::3], base.flip(1), base[:1].expand(20, 66)):
        strided = quantize(view, "e2m1", granularity)
        copied = quantize(view.contiguous(), "e2m1", granularity)
        assert torch.equal(strided.codes, copied.codes)
        assert torch.equal(strided.scale_inv, copied.scale_inv)
        assert torch.equal(strided.dequantize(), copied.dequantize())


@pytest.mark.parametrize("shape", [(2, 3, 40), (2, 1, 3, 8), (40,)], ids=str)
def test_rows_run_along_the_last_dimension(shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(gaussian(*shape))
    quantized = quantize(x)
    flat = quantize(x.reshape(-1, shape[-1]))
    assert quantized.codes.shape == shape
    assert quantized.scale_inv.shape == (*shape[:-1], 1)
    assert torch.equal(quantized.codes.reshape(flat.codes.shape), flat.codes)
    assert torch.equal(quantized.scale_inv.reshape(-1, 1), flat.scale_inv)
    assert torch.equal(quantized.dequantize().reshape(-1, shape[-1]), flat.dequantize())


def test_blocks_run_along_the_last_dimension() -> None:
    quantized = quantize(torch.from_numpy(gaussian(2, 3, 40)), "e2m1", "block(16)")
    assert quantized.codes.shape == (2, 3, 40)
    assert quantized.scale_inv.shape == (2, 3, 3)
    assert quantized.dequantize().shape == (2, 3, 40)


@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("num_columns", [1, 8, 33])
def test_no_rows_have_no_codes(num_columns: int, granularity: str) -> None:
    quantized = quantize(torch.zeros(0, num_columns), "e2m1", granularity)
    assert quantized.codes.shape == (0, num_columns)
    assert quantized.dequantize().shape == (0, num_columns)


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("granularity", GROUPS)
def test_a_group_with_a_non_finite_element_is_nan_and_its_neighbours_are_not(
    granularity: str, bad: float, name: str
) -> None:
    x = gaussian(33, 50)
    x[20, 35] = bad
    quantized = check_against_oracle(x, name, granularity)
    assert quantized.dequantize()[20, 35].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_non_finite_values_of_narrow_dtypes_stay_visible(dtype: torch.dtype) -> None:
    x = torch.from_numpy(gaussian(3, 50)).to(dtype)
    x[0, 3], x[1, 4] = float("inf"), float("nan")
    values = quantize(x).dequantize()
    assert values[:2].isnan().all()
    assert values[2].isfinite().all()


@pytest.mark.parametrize("name", SIGNED)
def test_tiny_rows_are_zeros_with_their_sign_and_a_finite_scale(name: str) -> None:
    tiny = np.float32(2.0**-102)
    below = np.nextafter(tiny, np.float32(0))
    x = np.array([[below, -below, 0], [tiny, -tiny, 0], [1e-45, -1e-45, -0.0]], dtype=np.float32)
    quantized = check_against_oracle(x, name, "row")
    one = np.float32(1) / np.float32(FORMATS[name].max)
    assert quantized.scale_inv[0, 0] == quantized.scale_inv[2, 0] == one
    assert (quantized.dequantize()[[0, 2]] == 0).all()
    assert quantized.dequantize()[1, 0] > 0
    sign = 1 << (FORMATS[name].bits - 1)
    assert quantized.codes[2].tolist() == [0, sign, sign]


def test_the_largest_float32_survives_a_round_trip() -> None:
    largest = np.finfo(np.float32).max
    x = np.array([[largest, -largest, largest / 2, 1.0]], dtype=np.float32)
    for name in SIGNED:
        assert check_against_oracle(x, name, "row").scale_inv.isfinite().all()


@pytest.mark.parametrize("name", ["e2m1", "e1m2", "e3m0"])
@pytest.mark.parametrize("shape", [(5, 8), (5, 9), (2, 3, 7), (0, 9), (4, 1)], ids=str)
def test_packed_codes_hold_the_same_values(name: str, shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(gaussian(*shape))
    plain, packed = quantize(x, name), quantize(x, name, packed=True)
    assert packed.packed
    assert not plain.packed
    assert torch.equal(packed.codes, pack(plain.codes))
    assert torch.equal(packed.scale_inv, plain.scale_inv)
    assert tuple(packed.shape) == shape
    assert torch.equal(packed.dequantize(), plain.dequantize())
    unpacked = packed.unpacked()
    assert torch.equal(getattr(unpacked, "codes", unpacked), plain.codes)


def test_packing_an_8_bit_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="e4m3"):
        quantize(torch.zeros(2, 4), "e4m3", packed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantize_casts_the_float32_value_once(dtype: torch.dtype) -> None:
    quantized = quantize(torch.from_numpy(gaussian(8, 40)))
    values = quantized.dequantize(dtype)
    assert values.dtype == dtype
    assert torch.equal(values, quantized.dequantize().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", GROUPS)
def test_fake_quantize_is_dequantize_of_quantize_in_the_input_dtype(
    granularity: str, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(gaussian(20, 40)).to(dtype)
    result = fake_quantize(x, "e2m1", granularity)
    assert result.dtype == dtype
    assert torch.equal(result, quantize(x, "e2m1", granularity).dequantize(dtype))


def test_quantising_changes_neither_its_input_nor_needs_a_gradient() -> None:
    x = torch.from_numpy(gaussian(4, 16))
    copy = x.clone()
    quantize(x.requires_grad_())
    assert torch.equal(x.detach(), copy)


@pytest.mark.parametrize(("name", "granularity"), SQNR_DB, ids=str)
def test_signal_to_noise_reaches_its_floor(name: str, granularity: str) -> None:
    x = gaussian(512, 1024)
    value = fake_quantize(torch.from_numpy(x), name, granularity).numpy()
    assert sqnr_db(x, value) > SQNR_DB[name, granularity]


def test_outlier_channels_ruin_a_row_scale_as_published() -> None:
    x = gaussian(512, 1024)
    x[:, ::128] *= 20
    assert 7.3 < sqnr_db(x, fake_quantize(torch.from_numpy(x)).numpy()) < 9.3


# The power-of-two scale and other roundings.


def test_pow2_scales_are_powers_of_two_and_at_most_the_absmax_ones() -> None:
    x = torch.from_numpy(gaussian(256, 32))
    exact, pow2 = quantize(x), quantize(x, scale="pow2")
    mantissa, _ = np.frexp(pow2.scale_inv.numpy())
    assert (mantissa == 0.5).all()
    # max / amax is rounded down, so nothing saturates and at most half of the grid is unused.
    ratio = pow2.scale_inv / exact.scale_inv
    assert (ratio >= 1 - 1e-6).all()
    assert (ratio < 2).all()
    y = (x / pow2.scale_inv).numpy()  # exact: a power of two
    np.testing.assert_array_equal(pow2.codes.numpy(), nearest_even_code(y, GRIDS["e2m1"]))


def test_pow2_costs_signal_to_noise() -> None:
    x = gaussian(512, 1024)
    absmax = sqnr_db(x, fake_quantize(torch.from_numpy(x)).numpy())
    pow2 = sqnr_db(x, fake_quantize(torch.from_numpy(x), scale="pow2").numpy())
    assert 1 < absmax - pow2 < 4  # measured 2.3 dB


def test_half_up_rounds_the_scaled_values_upward_at_ties() -> None:
    x = torch.from_numpy(gaussian(64, 200)).bfloat16()
    x[:, 0], x[:, 1:15] = 6.0, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2)
    x[:, 8:15].neg_()
    quantized = quantize(x, rounding="half_up")
    assert (quantized.scale_inv == 1).all()
    np.testing.assert_array_equal(
        quantized.dequantize().numpy(), half_up_value(x.float().numpy(), GRIDS["e2m1"])
    )


def test_stochastic_quantisation_replays_and_is_unbiased_over_keys() -> None:
    x = torch.from_numpy(gaussian(4, 64))
    keys = [PhiloxKey(seed=0, step=step, micro_step=0, tensor_id=0) for step in range(400)]
    draws = [quantize(x, rounding="stochastic", key=key).dequantize() for key in keys]
    again = quantize(x, rounding="stochastic", key=keys[0]).dequantize()
    assert torch.equal(again, draws[0])
    mean = torch.stack(draws).double().mean(0)
    spacing = 2 * quantize(x).scale_inv  # the widest interval of E2M1
    # The standard error of a mean of 400 is at most spacing / 2 / 20; 256 means, so 5 of them.
    assert ((mean - x).abs() < 5 * spacing / 40).all()


@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_values_stay_on_the_grid(name: str) -> None:
    quantized = quantize(
        torch.from_numpy(gaussian(16, 33)),
        name,
        rounding="stochastic",
        key=PhiloxKey(seed=0, step=0, micro_step=0, tensor_id=0),
    )
    assert torch.equal(
        quantized.dequantize(),
        torch.from_numpy(dequantize(quantized.codes.numpy(), GRIDS[name])) * quantized.scale_inv,
    )


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "e2m1fn"}, "e2m1fn.*e2m1"),
        ({"granularity": "rows"}, "rows.*row"),
        ({"granularity": "block(0)"}, r"block\(0\)"),
        ({"rounding": "neerest"}, "neerest.*nearest"),
        ({"scale": "absmin"}, "absmin.*absmax"),
        ({"rounding": "stochastic"}, "key"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(torch.ones(2, 4), **arguments)
