"""configs/megatron: arguments of pretrain_gpt.py that fit each other, and a section for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4_plugin.config import parse_section
from fp4_plugin.integrations.megatron.launch import read_section

FOLDER = Path(__file__).resolve().parents[1] / "configs/megatron"
FILES = sorted(FOLDER.glob("*.args"))
# Of the transformer's linears, attention and MLP with a gate, and of embedding and output layer.
BILLIONS = {"tiny": 0.0021, "1.3b": 1.3, "7b": 6.7, "13b": 13.0}
PARSE = """
import argparse, json, sys
from megatron.training.arguments import add_megatron_arguments
for words in json.loads(sys.argv[1]):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    parser.parse_args(words)
"""


def arguments(path):
    """As `grep -v '^#'` and a shell give them to the script."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [word for line in lines for word in line.split()]


def value(words, flag, kind=int):
    return kind(words[words.index(flag) + 1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sizes_fit_each_other_and_the_name(path):
    words = arguments(path)
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    layers, hidden = value(words, "--num-layers"), value(words, "--hidden-size")
    heads, ffn = value(words, "--num-attention-heads"), value(words, "--ffn-hidden-size")
    ranks = value(words, "--tensor-model-parallel-size")
    assert hidden % heads == heads % ranks == ffn % ranks == 0
    assert value(words, "--global-batch-size") % value(words, "--micro-batch-size") == 0
    vocabulary = 1024 if path.stem == "tiny" else 32_000
    numel = layers * (4 * hidden**2 + 3 * hidden * ffn) + 2 * vocabulary * hidden
    assert numel / 1e9 == pytest.approx(BILLIONS[path.stem], rel=0.1)


def test_there_is_a_file_for_each_size():
    assert {path.stem for path in FILES} == set(BILLIONS)


def test_the_section_asks_for_everything():
    config = parse_section(read_section(FOLDER / "fp4.json"))
    assert config.communication_spec is not None
    assert config.optimizer_states is not None


def test_megatron_takes_them():
    checkout = os.environ.get("MEGATRON_LM_CHECKOUT")
    if not checkout:
        pytest.skip("MEGATRON_LM_CHECKOUT names no checkout of Megatron-LM to parse them with")
    words = json.dumps([arguments(path) for path in FILES])
    path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    parsed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE, words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert parsed.returncode == 0, parsed.stderr[-2000:]
