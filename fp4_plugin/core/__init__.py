"""The numerics, in pure torch: no modules, no ranks, no JSON.

Read `formats`, `codes`, `rounding`, `scaling`, `quantize`, `outliers`, `gemm` in this order;
`ops` defines what device kernels may replace.
"""
