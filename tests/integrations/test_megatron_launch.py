"""`python -m fp4_plugin.integrations.megatron`: what it reads, and what it refuses."""

from __future__ import annotations

import json
import types

import pytest

from fp4_plugin.config import parse_section
from fp4_plugin.config.models import SectionModel
from fp4_plugin.errors import ConfigError, UnsupportedError
from fp4_plugin.integrations.megatron.launch import install, main, read_section

SECTION = {"recipe": "paper", "tensor_parallel": {"exact": True}}


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "fp4.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize("content", [SECTION, {"train_batch_size": 8, "fp4": SECTION}])
def test_the_section_is_read_from_either_kind_of_file(written, content):
    assert read_section(written(content)) == SECTION


@pytest.mark.parametrize("key", list(SectionModel.model_fields))
def test_a_file_with_any_one_key_of_the_section_is_a_section(written, key):
    section = {key: None}
    assert read_section(written(section)) == section


def test_both_worlds_resolve_one_file_to_the_same_settings(written):
    path = written({"train_batch_size": 8, "fp4": SECTION})
    ours = parse_section(read_section(path))
    assert ours.hash() == parse_section(json.loads(path.read_text())["fp4"]).hash()
    assert ours.tensor_parallel == {"shared_scales": True, "exact": True}


def test_exact_sums_of_other_scales_are_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel\.exact: true needs shared_scales"):
        parse_section({"tensor_parallel": {"exact": True, "shared_scales": False}})


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("{", [], "not JSON"),
        ({"fp4": []}, [], "expected an object"),
        ({"fp4": {"recipes": "paper"}}, [], "recipes"),
        (SECTION, ["--fp4-format", "e2m1"], "--fp4-format is Megatron's own"),
        (SECTION, ["--fp4-recipe=nvfp4"], "--fp4-recipe is Megatron's own"),
        (SECTION, [], "there is no script"),
    ],
)
def test_a_wrong_request_is_one_line(written, tmp_path, capsys, content, arguments, said):
    script = str(tmp_path / "pretrain_gpt.py")
    command = [script, "--fp4-plugin-config", str(written(content)), *arguments]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("fp4: error: ")


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["pretrain_gpt.py", "--fp4-plugin-config", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_script_that_is_not_megatrons_is_told_so(written, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron.training", None)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    assert main([str(script), "--fp4-plugin-config", str(written(SECTION))]) == 2
    assert "megatron.training cannot be imported" in capsys.readouterr().err


# Of megatron-core, when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_installing_twice_wraps_once_and_can_be_undone(monkeypatch):
    from fp4_plugin.integrations.megatron import launch

    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    training = types.ModuleType("megatron.training.training")
    training.get_model = get_model = lambda model_provider_func: model_provider_func()
    training.get_megatron_optimizer = get_optimizer = lambda config, model: None
    training.train_step = train_step = lambda forward_step, data, model: "done"
    monkeypatch.setattr(launch, "_megatron_training", lambda: training)
    config = parse_section(SECTION)
    first = install(config)
    assert install(config) == first
    assert len(first) == 3
    for patch in first:
        patch.undo()
    assert training.get_model is get_model
    assert training.get_megatron_optimizer is get_optimizer
    assert training.train_step is train_step


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_that_get_model_did_not_build_is_converted_with_its_optimizer(monkeypatch):
    """As pretrain_gpt.py of Megatron-LM 0.19 does it."""
    from fp4_plugin.integrations.megatron import launch
    from fp4_plugin.integrations.megatron.job import MegatronJob

    training = types.ModuleType("megatron.training.training")
    training.get_model = training.train_step = lambda model_provider_func: None
    training.get_megatron_optimizer = lambda config, model_chunks: "optimizer"
    monkeypatch.setattr(launch, "_megatron_training", lambda: training)
    monkeypatch.setattr(launch, "tensor_parallel_size", lambda: 2)
    seen = []
    monkeypatch.setattr(MegatronJob, "convert", lambda job, *found: seen.append(found))
    monkeypatch.setattr(MegatronJob, "stepper", lambda job, *found: seen.append(found))
    install(parse_section(SECTION))
    assert training.get_megatron_optimizer("config", ["chunk"]) == "optimizer"
    assert seen == [(["chunk"], 2), ("optimizer",)]


def test_autotp_does_not_take_megatrons_settings():
    from fp4_plugin.integrations.deepspeed.ds_config import refuse_conflicts

    ds_config = {"tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "AdamW"}}
    refuse_conflicts(ds_config, parse_section({"recipe": "paper"}))
    with pytest.raises(ConfigError, match=r'"tensor_parallel\.autotp_size": 2: the layers of'):
        refuse_conflicts(ds_config, parse_section(SECTION))


@pytest.mark.parametrize(
    ("transformer", "section", "said"),
    [
        ({"fp8": "e4m3"}, {}, "fp8='e4m3' and the fp4_plugin section both"),
        ({"fp4": "e2m1"}, {}, "fp4='e2m1' and the fp4_plugin section both"),
        ({"context_parallel_size": 2}, {"scope": "tensor"}, "context_parallel_size is 2"),
        ({"enable_cuda_graph": True}, {"scope": "tensor"}, "CUDA graph"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_settings_of_megatron_that_exclude_fp4_layers_are_named(transformer, section, said):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from fp4_plugin.integrations.megatron.model import refuse_conflicts

    config = parse_section(
        {
            "linear": {"input": {"outliers": section}},
        }
    )
    with pytest.raises(UnsupportedError, match=said):
        refuse_conflicts(types.SimpleNamespace(**transformer), config)
