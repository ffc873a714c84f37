"""A shim for tools that still run setup.py; all metadata is in pyproject.toml.

It must not import torch: an isolated build does not see the user's torch, and a plain install needs
no compiler.
"""

from setuptools import setup

setup()
