"""docs/spec.schema.json is current, complete, and says what the models say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pytest_exportcheck.spec import model
from pytest_exportcheck.spec.schema import schema, schema_text

FILE = Path(__file__).parents[2] / "docs" / "spec.schema.json"


def test_the_file_is_current():
    assert FILE.read_text(encoding="utf-8") == schema_text(), (
        "run: python -m pytest_exportcheck.spec.schema > docs/spec.schema.json"
    )


def test_keys_match_the_models():
    found = schema()
    assert list(found["properties"]) == list(model.ModelSpec.model_fields)
    assert found["required"] == ["exportcheck", "model", "observe"]
    assert found["additionalProperties"] is False
    for name in ("Model", "Observe", "Matrix", "Bounds", "Tolerance", "CompareRule", "When", "Expectation"):
        section = found["$defs"][name]
        assert list(section["properties"]) == list(getattr(model, name).model_fields)
        assert section["additionalProperties"] is False


def test_every_field_is_described():
    found = schema()
    for section in (found, *found["$defs"].values()):
        for name, field in section["properties"].items():
            assert field.get("description"), f"{section.get('title')}.{name}"


def test_patterns_are_valid_and_calls_are_spelled_out():
    text = json.dumps(schema())
    for pattern in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', text):
        re.compile(json.loads(pattern))
    calls = schema()["$defs"]["Observe"]["properties"]["calls"]["anyOf"][0]["items"]["anyOf"]
    assert [call["required"] for call in calls] == [["forward"], ["generate"], ["call"]]
