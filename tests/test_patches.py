"""patches/: they apply where they say, are taken back without a trace, and what they add works.

Nothing of fp4_plugin is imported at the top: a rank starts as a program that knows nothing of it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from importlib import metadata, util
from pathlib import Path

import pytest

from tests.distributed import ROOT, initialize_distributed, run_ranks

PATCHES = ROOT / "patches"
MEGATRON = PATCHES / "megatron-lm-0.12-0.19.patch"
DEEPSPEED = PATCHES / "deepspeed-0.19.patch"
WHEEL = "megatron-core==0.19.0"
DOWNLOAD_S = 120
OFF = {"recipe": "paper", "gradient_communication": None, "optimizer_states": None}

pytestmark = pytest.mark.deepspeed


def _git_apply(patch, folder, *options):
    """`git apply` in a folder that is no repository of its own, nor part of one."""
    subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder,
        check=True,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )


def _files(patch):
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)


def _old_lines(patch):
    """(file, what a hunk looks for) of each hunk."""
    for part in patch.read_text().split("diff --git ")[1:]:
        file = re.search(r"^\+\+\+ b/(\S+)$", part, re.MULTILINE).group(1)
        for hunk in re.split(r"^@@.*@@\n", part, flags=re.MULTILINE)[1:]:
            yield file, "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[0] in " -")


def _applies_and_reverses(patch, source, folder):
    """On copies of the files in `source`; leaves them patched in `folder`."""
    for file in _files(patch):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, folder / file)
    # One place each: an offset cannot put a hunk where it does not belong.
    for file, old in _old_lines(patch):
        assert f"\n{(source / file).read_text()}".count(f"\n{old}") == 1, (file, old)
    before = {file: (folder / file).read_bytes() for file in _files(patch)}
    _git_apply(patch, folder, "--check")
    _git_apply(patch, folder)
    for file in _files(patch):
        compile((folder / file).read_text(), file, "exec")
        assert (folder / file).read_bytes() != before[file]
    _git_apply(patch, folder, "-R")
    assert {file: (folder / file).read_bytes() for file in _files(patch)} == before
    _git_apply(patch, folder)


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.name)
def test_a_header_says_why_and_what(patch):
    header, _, body = patch.read_text().partition("diff --git ")
    assert "\nWhy: " in header and "\nWhat it adds: " in header
    added = [line for line in body.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    removed = [line for line in body.splitlines() if re.match(r"-(?!-- )", line)]
    assert len(added) <= 16 and removed == []
    assert patch.name in (PATCHES / "README.md").read_text()


# DeepSpeed


@pytest.fixture(scope="module")
def installed_deepspeed():
    spec = util.find_spec("deepspeed")
    if spec is None or not metadata.version("deepspeed").startswith("0.19."):
        pytest.skip("deepspeed-0.19.patch is for DeepSpeed 0.19, which is not installed")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def patched_deepspeed(installed_deepspeed, tmp_path_factory):
    """The environment of a program that finds a patched copy of the installed package."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(installed_deepspeed, site / "deepspeed")
    _git_apply(DEEPSPEED, site)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def test_deepspeeds_applies_to_the_installed_package(installed_deepspeed, tmp_path):
    _applies_and_reverses(DEEPSPEED, installed_deepspeed.parent, tmp_path)


def _llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, num_hidden_layers=1, use_cache=False, **sizes)
    )


def _train(initialize, fp4=None, model=None, **sections):
    """Two steps; what DeepSpeed made of the model and its optimizer."""
    import torch

    model = model or _llama()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        **sections,
        **({} if fp4 is None else {"fp4": fp4}),
    }
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(2):
        tokens = (torch.arange(32) + torch.tensor([[step], [7]])) % 256
        losses.append(engine(input_ids=tokens, labels=tokens).loss)
        engine.backward(losses[-1])
        engine.step()
    states = engine.optimizer.optimizer.state.values()
    return engine, {
        "losses": [loss.item() for loss in losses],
        "layers": sum(hasattr(module, "fp4") for module in engine.module.modules()),
        # Shadowed once: a second conversion would verify and account twice.
        "steps": _depth(engine._take_model_step),
        "states": sorted({str(state["exp_avg"].dtype) for state in states}),
    }


def _depth(function):
    return 1 + _depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


def with_and_without_the_hook():
    import deepspeed
    import torch

    initialize_distributed()
    original = deepspeed.initialize
    found = {"off": _train(original)[1], "imported": "fp4_plugin" in sys.modules}
    found["patch"] = _train(original, {"recipe": "paper"})[1]
    found["hook after a patched call"] = deepspeed.initialize is not original
    from fp4_plugin.integrations.deepspeed import arm

    arm()
    found["hook"] = _train(deepspeed.initialize, {"recipe": "paper"})[1]
    found["past the hook"] = _train(original, {"recipe": "paper"})[1]
    found["refused"] = []
    for section in ({"recipes": "paper"}, {"recipe": "paper", "optimizer_states": {"exp": 1}}):
        try:
            _train(original, section)
        except ValueError as error:
            found["refused"].append(type(error).__name__)
    try:
        _train(original, FP4={})
    except ValueError as error:
        found["misspelt"] = str(error)
    found["name left behind"] = hasattr(torch.optim, "FP16StateAdamW")
    return found


@pytest.mark.timeout(600)
def test_a_patched_deepspeed_reads_the_section_once(patched_deepspeed):
    (found,) = run_ranks(
        with_and_without_the_hook, num_ranks=1, timeout_s=500, environment=patched_deepspeed
    )
    assert not found["imported"] and found["off"]["layers"] == found["off"]["steps"] == 0
    assert found["patch"]["layers"] == 7
    assert found["patch"]["steps"] == 1 and "torch.float16" in found["patch"]["states"]
    assert not found["hook after a patched call"]
    assert found["hook"] == found["patch"] == found["past the hook"] != found["off"]
    assert found["refused"] == ["ConfigError", "ConfigError"]
    assert "looks like 'fp4'" in found["misspelt"]
    assert not found["name left behind"]


def converted_before_autotp():
    initialize_distributed()
    import deepspeed

    from fp4_plugin import assert_active, convert_to_fp4

    autotp = {"tensor_parallel": {"autotp_size": 2}}
    model = convert_to_fp4(_llama(), OFF)
    engine, kept = _train(deepspeed.initialize, model=model, **autotp)
    assert_active(engine)
    _, by_section = _train(deepspeed.initialize, OFF, **autotp)
    return kept, by_section


@pytest.mark.timeout(600)
def test_a_patched_autotp_keeps_fp4_layers(patched_deepspeed):
    for kept, by_section in run_ranks(
        converted_before_autotp, timeout_s=500, environment=patched_deepspeed
    ):
        assert kept["layers"] == by_section["layers"] == 7
        assert kept["losses"] == by_section["losses"]


# Megatron-LM


@pytest.fixture(scope="module")
def megatron_source(tmp_path_factory):
    """A folder with megatron/training: MEGATRON_LM_CHECKOUT (or a wheel), else what pip has."""
    given = os.environ.get("MEGATRON_LM_CHECKOUT")
    if given and Path(given).is_dir():
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    wheel = Path(given) if given else _downloaded(folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if "megatron/training/" in n])
    return folder


def _downloaded(folder):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-input"]
    # Its wheel is for Python 3.12; it is read here, not installed.
    command += ["--python-version", "3.12", "--only-binary", ":all:", "-d", str(folder), WHEEL]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip download {WHEEL}: nothing came in {DOWNLOAD_S} s")
    if result.returncode:
        pytest.skip(f"pip download {WHEEL}: {result.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob("*.whl"))


@pytest.fixture
def patched_megatron(megatron_source, tmp_path):
    """{name: syntax tree} of the patched files."""
    _applies_and_reverses(MEGATRON, megatron_source, tmp_path)
    return {Path(file).stem: ast.parse((tmp_path / file).read_text()) for file in _files(MEGATRON)}


def _function(tree, name):
    return next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)


def _lines(function, name):
    """Where `function` calls something of that name."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    called = [(getattr(c.func, "id", None) or getattr(c.func, "attr", None), c) for c in calls]
    return [call.lineno for found, call in called if found == name]


def test_megatrons_calls_stand_where_they_must(patched_megatron):
    setup = _function(patched_megatron["training"], "setup_model_and_optimizer")
    (attach,) = _lines(setup, "attach")
    assert max(_lines(setup, "get_megatron_optimizer")) < attach
    assert attach < min(_lines(setup, "load_checkpoint"))
    train = _function(patched_megatron["training"], "train")
    (stepped,) = _lines(train, "stepped")
    assert max(_lines(train, "train_step")) < stepped


def test_megatrons_calls_are_made_when_asked_for(patched_megatron, monkeypatch):
    from fp4_plugin.integrations.megatron import patched

    made = []
    monkeypatch.setattr(patched, "attach", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(patched, "stepped", lambda: made.append("stepped"))
    added = [
        node
        for node in ast.walk(patched_megatron["training"])
        if isinstance(node, ast.If) and "fp4_plugin_config" in ast.unparse(node.test)
    ]
    code = compile(ast.Module(body=added, type_ignores=[]), "training.py", "exec")
    for value in (None, "fp4.json"):
        args = types.SimpleNamespace(fp4_plugin_config=value)
        exec(code, {"args": args, "model": ["chunk"], "optimizer": "optimizer"})
    exec(code, {"args": types.SimpleNamespace()})  # arguments from --yaml-cfg have no such name
    assert sorted(map(str, made)) == ["('fp4.json', ['chunk'], 'optimizer')", "stepped"]


class _Parser(Exception):
    pass


def test_megatrons_parser_knows_the_argument(patched_megatron):
    import argparse

    def stop(parser):
        raise _Parser(parser)

    parse_args = _function(patched_megatron["arguments"], "parse_args")
    # Megatron's own arguments need Python 3.12 and packages that are not here.
    names = {"argparse": argparse, "add_megatron_arguments": lambda parser: parser}
    exec(compile(ast.Module(body=[parse_args], type_ignores=[]), "arguments.py", "exec"), names)
    with pytest.raises(_Parser) as stopped:
        names["parse_args"](extra_args_provider=stop)
    (parser,) = stopped.value.args
    assert parser.parse_args(["--fp4-plugin-config", "f"]).fp4_plugin_config == "f"
    assert parser.parse_args([]).fp4_plugin_config is None


def patched_job(path):
    """Losses of a job that is converted when all is built, and of one converted as it is built."""
    from tests.megatron_on_cpu import Job, lay_out, on_cpu

    initialize_distributed()
    with on_cpu():
        from fp4_plugin.integrations.megatron import patched

        lay_out(1)
        manifest = Path(path).parent / "fp4_manifest.json"
        patched.job_folder = lambda: manifest.parent  # of Megatron-LM's arguments
        job = Job(None, distributed_optimizer=True, overlap=True)
        patched.attach(path, [job.ddp], job.optimizer)
        losses = []
        for number in range(3):
            losses.append(job.step(number))
            patched.stepped()
        expected = Job({"recipe": "paper"}, distributed_optimizer=True, overlap=True)
        return losses, expected.steps(range(3)), Job(None).steps(range(3)), manifest.exists()


def test_a_patched_megatron_trains_as_the_launcher_does(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    path = tmp_path / "fp4.json"
    path.write_text(json.dumps({"recipe": "paper"}))
    for patched, expected, plain, has_manifest in run_ranks(patched_job, str(path)):
        assert patched == expected != plain
        assert has_manifest


def test_a_step_without_a_model_stops_the_job():
    from fp4_plugin.config import parse_section
    from fp4_plugin.errors import ConfigError
    from fp4_plugin.integrations.megatron.job import MegatronJob

    with pytest.raises(ConfigError, match="no model was seen"):
        MegatronJob(parse_section({"recipe": "paper"})).stepped(None)
    MegatronJob(parse_section({"enabled": False})).stepped(None)
