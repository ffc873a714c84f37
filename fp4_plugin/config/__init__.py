"""The `fp4` section: strict models at the edge, merged and turned into typed specs once.

`models` are the keys, `validation` the error texts, `merging` the precedence, `resolved` the
result, `schema` its JSON Schema.
"""

from __future__ import annotations

from fp4_plugin.config.resolved import Fp4Config, parse_section
from fp4_plugin.config.schema import json_schema
from fp4_plugin.config.validation import find_section

__all__ = ["Fp4Config", "find_section", "json_schema", "parse_section"]
