"""Two codes a byte: low nibble = even column, odd widths padded with code 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fp4_plugin.core.packing import pack, unpack
from tests.oracles import load_vectors, pack_nibbles
from tests.strategies import codes, quick


@pytest.mark.parametrize("case", load_vectors("packing"), ids=lambda case: str(len(case["codes"])))
def test_every_packing_vector(case: dict[str, list[int]]) -> None:
    packed = pack(torch.tensor(case["codes"], dtype=torch.uint8))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == case["bytes"]
    assert unpack(packed, len(case["codes"])).tolist() == case["codes"]


@quick
@given(codes())
def test_packing_equals_the_oracle_and_comes_back(values: list[int]) -> None:
    tensor = torch.tensor(values, dtype=torch.uint8)
    packed = pack(tensor)
    assert packed.tolist() == pack_nibbles(values)
    assert torch.equal(unpack(packed, len(values)), tensor)


@pytest.mark.parametrize("shape", [(3, 8), (3, 7), (2, 3, 5), (0, 6), (4, 1)], ids=str)
def test_leading_dimensions_are_kept(shape: tuple[int, ...]) -> None:
    values = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack(values)
    assert packed.shape == (*shape[:-1], (shape[-1] + 1) // 2)
    assert torch.equal(unpack(packed, shape[-1]), values)


def test_a_non_contiguous_tensor_packs_like_its_copy() -> None:
    values = torch.randint(0, 16, (6, 10), dtype=torch.uint8).t()
    assert torch.equal(pack(values), pack(values.contiguous()))
    every_second = torch.randint(0, 16, (4, 22), dtype=torch.uint8)[:, ::2]
    assert torch.equal(unpack(pack(every_second), 11), every_second)
