"""JSON Schema of the section, for editors and for configs/schema/fp4.schema.json."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from fp4_plugin.config.models import UNQUANTIZED, SectionModel
from fp4_plugin.core.formats import FORMATS
from fp4_plugin.estimators import ESTIMATORS
from fp4_plugin.recipes import RECIPES

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the section, with registered formats and estimators."""
    schema: dict[str, Any] = SectionModel.model_json_schema()
    definitions = schema["$defs"]
    for operand in ("WeightConfig", "InputConfig", "GradOutputConfig"):
        definitions[operand]["properties"]["format"]["enum"] = [*_value_formats(), UNQUANTIZED]
    definitions["WeightConfig"]["properties"]["estimator"] = {
        "description": "Gradient estimator and its parameters.",
        "anyOf": [_estimator_schema(name) for name in ESTIMATORS.names()],
    }
    for owner in (schema, definitions["LayerRule"]):
        owner["properties"]["recipe"] = {
            "type": "string",
            "enum": RECIPES.names(),
            "description": owner["properties"]["recipe"]["description"],
        }
    rule = definitions["LayerRule"]
    rule["properties"]["linear"] = {"anyOf": [{"$ref": "#/$defs/LinearConfig"}, {"type": "null"}]}
    rule["oneOf"] = [{"required": ["recipe"]}, {"required": ["linear"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _value_formats() -> list[str]:
    return [name for name in FORMATS.names() if FORMATS[name].signed]


def _estimator_schema(name: str) -> dict[str, Any]:
    schema = TypeAdapter(ESTIMATORS[name]).json_schema()
    properties = {"name": {"const": name}, **schema.get("properties", {})}
    # Nothing is required: objects merge by key, so what is left out comes from the recipe.
    return {"type": "object", "properties": properties, "additionalProperties": False}
