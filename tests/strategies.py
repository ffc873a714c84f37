"""Hypothesis strategies: float32 data that looks like what breaks quantisers."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

__all__ = ["alphas", "bf16_matrices", "bf16_rows", "codes", "finite_float32", "matrices", "quick"]

# Reproducible examples, no timing: the machines that run this are shared.
quick = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def finite_float32() -> st.SearchStrategy[float]:
    """Any finite float32: zeros of both signs, subnormals, the largest, and the everyday ones."""
    everyday = st.floats(-8, 8, width=32)
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    quarters = st.integers(-28, 28).map(lambda n: n / 4)  # every tie of E2M1 among them
    return st.one_of(everyday, quarters, anything)


def matrices(
    max_rows: int = 5, max_columns: int = 40, min_side: int = 1
) -> st.SearchStrategy[np.ndarray]:
    """Float32 matrices of finite values."""
    shapes = st.tuples(st.integers(min_side, max_rows), st.integers(min_side, max_columns))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=finite_float32()))


def _to_bf16(values: np.ndarray) -> np.ndarray:
    # Truncation keeps finite values finite; which bf16 value comes out does not matter.
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_matrices(max_rows: int = 4, max_columns: int = 300) -> st.SearchStrategy[np.ndarray]:
    """Float32 matrices whose entries are bf16 numbers."""
    return matrices(max_rows, max_columns).map(_to_bf16)


@st.composite
def bf16_rows(draw: st.DrawFn, max_columns: int = 600) -> np.ndarray:
    """One (1, K) row: Gaussian with a few large channels, many ties after rounding to bf16."""
    size = draw(st.integers(1, max_columns))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = rng.standard_normal((1, size)).astype(np.float32)
    row[:, rng.integers(0, size, size=1 + size // 100)] *= draw(st.sampled_from([1, 20, 1000]))
    return _to_bf16(row)


def alphas() -> st.SearchStrategy[float]:
    """Quantiles in use and any other that is allowed (one half and one excluded)."""
    return st.one_of(
        st.sampled_from([0.97, 0.99, 0.999, 0.75]), st.floats(0.51, 0.9999, allow_nan=False)
    )


def codes(max_length: int = 41) -> st.SearchStrategy[list[int]]:
    """Lists of 4-bit codes, empty and odd lengths included."""
    return st.lists(st.integers(0, 15), max_size=max_length)
