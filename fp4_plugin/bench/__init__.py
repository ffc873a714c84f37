"""Benchmarks behind `fp4 bench`: measurements that take minutes, so no test runs them in full."""

from __future__ import annotations
