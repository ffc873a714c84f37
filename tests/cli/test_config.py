"""`fp4 config`: right files pass, wrong ones are one error and exit code 2, the schema is fresh."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from fp4_plugin.cli.config import parsed_file
from fp4_plugin.cli.main import main
from fp4_plugin.config import json_schema

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted([*(ROOT / "configs/deepspeed").glob("*.json"), ROOT / "configs/quickstart.json"])
SCHEMA = ROOT / "configs/schema/fp4.schema.json"


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_configs_are_valid(path, capsys):
    assert main(["config", "validate", str(path)]) == 0
    assert "is valid" in capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_configs_satisfy_the_committed_schema(path):
    jsonschema.validate(json.loads(path.read_text())["fp4"], json.loads(SCHEMA.read_text()))


def test_zero_stages_and_the_twin_are_complete():
    by_name = {path.stem: json.loads(path.read_text()) for path in CONFIGS}
    for stage in range(4):
        config = by_name[f"zero{stage}"]
        assert config["zero_optimization"]["stage"] == stage
        assert config["fp4"] == {"recipe": "paper"}
    twin = by_name["zero2_bf16"]
    assert twin == {**by_name["zero2"], "fp4": {"recipe": "bf16"}}


def test_committed_schema_is_up_to_date(tmp_path):
    assert main(["config", "schema", "--output", str(tmp_path / "new/schema.json")]) == 0
    fresh = (tmp_path / "new/schema.json").read_text()
    assert SCHEMA.read_text() == fresh, "run `make schema`"


def test_schema_is_itself_valid_and_printed(capsys):
    assert main(["config", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json_schema()
    jsonschema.Draft202012Validator.check_schema(printed)


@pytest.mark.parametrize(
    "section",
    [
        {"recpie": "paper"},
        {"recipe": "papre"},
        {"linear": {"weight": {"format": "e2m2"}}},
        {"linear": {"fprop": "fp16"}},
        {"linear": {"input": {"outliers": {"alpha": 1.5}}}},
        {"linear": {"weight": {"estimator": {"name": "dge", "kk": 5}}}},
        {"layers": [{"match": "*"}]},
        {"enabled": "yes"},
        {"on_mismatch": "ignore"},
    ],
    ids=json.dumps,
)
def test_schema_and_parser_refuse_the_same(section, write, capsys):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(section, json_schema())
    assert main(["config", "validate", write({"train_batch_size": 8, "fp4": section})]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fp4: error: ")
    assert "fp4." in captured.err


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"recipe": "w4a8"},
        {"enabled": False},
        {"linear": None},
        {"linear": {"input": {"outliers": {"alpha": 0.97, "scope": "tensor"}}}},
        {"linear": {"weight": {"estimator": {"name": "dge", "k": 3}}}},
        {"layers": [{"match": "*.31.*", "recipe": "bf16"}], "on_mismatch": "warn"},
    ],
    ids=json.dumps,
)
def test_schema_and_parser_accept_the_same(section, write):
    jsonschema.validate(section, json_schema())
    assert main(["config", "validate", write({"train_batch_size": 8, "fp4": section})]) == 0
    assert main(["config", "validate", write(section)]) == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"fp4": {}, "fp4": {"recipe": "bf16"}}', "given twice"),
        ({"fp4": "paper"}, "expected an object"),
        ({"fp4": None}, "expected an object"),
        ({"FP4": {"recipe": "paper"}, "train_batch_size": 8}, "'fp4'"),
        ({"fp_4": {"recipe": "paper"}}, "'fp4'"),
        ({"train_batch_size": 8, "bf16": {"enabled": True}}, 'without an "fp4" section'),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, "without an"),
        ({"fp4": {"recipe": "auto"}}, "auto"),
        ({"fp4": {}, "compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"unknown": 1}, "unknown key"),
    ],
    ids=[
        "broken", "list", "repeated", "string", "null", "upper-case", "near-miss", "no-section",
        "shared-key", "auto", "conflict", "neither",
    ],
)  # fmt: skip
def test_wrong_files_are_one_error(content, said, write, capsys):
    assert main(["config", "validate", write(content)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "missing.json"], ids=["folder", "missing"])
def test_files_that_cannot_be_read_are_named(name, tmp_path, capsys):
    assert main(["config", "explain", str(tmp_path / name)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_schema_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["config", "schema", "--output", str(tmp_path / "file/schema.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_conflict_counts_only_while_fp4_is_on(write):
    content = {"fp4": {"enabled": False}, "compile": {"deepcompile": True}}
    assert main(["config", "validate", write(content)]) == 0


def test_comments_are_read_as_deepspeed_reads_them(write):
    path = write('{\n  # the recipe\n  "fp4": {"recipe": "fp8"}, /* end */\n}')
    assert parsed_file(Path(path)).recipe == "fp8"


def _explained(capsys):
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(maxsplit=2) for line in lines]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}


def test_explain_says_where_each_value_comes_from(write, capsys):
    section = {"linear": {"input": {"outliers": {"alpha": 0.97}}}}
    assert main(["config", "explain", write({"fp4": section})]) == 0
    rows = _explained(capsys)
    assert rows["linear.input.outliers.alpha"] == ("0.97", "section")
    assert rows["linear.input.outliers.scope"] == ('"row"', "recipe paper")
    assert rows["linear.weight.format"] == ('"e2m1"', "recipe paper")
    assert rows["enabled"] == ("true", "default")


def test_explain_of_a_layer_applies_the_rules_that_match_it(write, capsys):
    rules = [
        {"match": "*.mlp.*", "linear": {"weight": {"estimator": {"name": "dge", "k": 3}}}},
        {"match": "*.31.*", "recipe": "bf16"},
    ]
    path = write({"fp4": {"layers": rules}})
    assert main(["config", "explain", path, "--layer", "layers.0.mlp.up_proj"]) == 0
    rows = _explained(capsys)
    assert rows["linear.weight.estimator.k"] == ("3.0", "layers[0]")
    assert rows["linear.fprop"] == ('"fp4"', "recipe paper")

    assert main(["config", "explain", path, "--layer", "layers.31.mlp.up_proj"]) == 0
    output = capsys.readouterr().out
    assert "layers[0] (*.mlp.*), layers[1] (*.31.*)" in output
    assert "layers[1] recipe bf16" in output
    assert "high precision" in output


def test_explain_of_a_layer_without_rule_says_so(capsys):
    path = str(ROOT / "configs/deepspeed/zero2.json")
    assert main(["config", "explain", path, "--layer", "lm"]) == 0
    assert "no rule of layers matches" in capsys.readouterr().out


def test_explain_tells_equal_rules_apart_and_rules_from_the_recipe(write, capsys):
    rules = [{"match": "a*", "recipe": "w4a8"}, {"match": "*", "recipe": "fp8"}]
    path = write({"fp4": {"layers": [*rules, rules[0]]}})
    assert main(["config", "explain", path, "--layer", "ab"]) == 0
    output = capsys.readouterr().out
    assert "matched by layers[0] (a*), layers[1] (*), layers[2] (a*)" in output
    origins = {line.split()[0]: line.split(maxsplit=2)[2] for line in output.splitlines()[2:]}
    assert origins["recipe"] == "default"
    assert origins["linear.input.format"] == "layers[2] recipe w4a8"


def test_an_empty_file_is_no_section(write, capsys):
    assert main(["config", "validate", write("\n")]) == 2
    assert "an empty file" in capsys.readouterr().err
