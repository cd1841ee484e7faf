"""The JSON Schema of the spec format, for editors: ``python -m pytest_exportcheck.spec.schema``."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["schema", "schema_text"]


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a spec file, from the models that also validate it."""
    from .model import ModelSpec

    generated = ModelSpec.model_json_schema()
    # pydantic takes the class docstring, which is for programmers.
    generated["description"] = "A spec of pytest-exportcheck: a model, the calls to observe, what to check."
    generated["title"] = "pytest-exportcheck spec"
    # All of their keys empty: no help in an editor.
    for section, name in ((generated, "tolerance"), (generated["$defs"]["Expectation"], "when")):
        section["properties"][name].pop("default", None)
    model = generated["$defs"]["Model"]
    for name in ("type", "pretrained", "factory"):
        model["properties"][name] = {
            "type": "string",
            "minLength": 1,
            "description": model["properties"][name]["description"],
        }
    model["oneOf"] = [{"required": [name]} for name in ("type", "pretrained", "factory")]
    rule = generated["$defs"]["CompareRule"]
    for name in ("where", "ties"):
        rule["properties"][name] = {
            "type": "string",
            "minLength": 1,
            "description": rule["properties"][name]["description"],
        }
    rule["oneOf"] = [{"required": [name]} for name in ("where", "ties")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated}


def schema_text() -> str:
    """The content of ``docs/spec.schema.json``."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
