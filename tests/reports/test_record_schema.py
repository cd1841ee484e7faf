"""docs/record.schema.json is current, complete, and says what the stages and the version are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import jsonschema
import pytest

from pytest_exportcheck.errors import STAGES, TEST
from pytest_exportcheck.reports.json_report import SCHEMA
from pytest_exportcheck.reports.schema import Stage, schema, schema_text

FILE = Path(__file__).parents[2] / "docs" / "record.schema.json"


def test_the_file_is_current():
    assert FILE.read_text(encoding="utf-8") == schema_text(), (
        "run: python -m pytest_exportcheck.reports.schema > docs/record.schema.json"
    )


def test_it_is_a_schema_whose_every_field_is_described():
    found = schema()
    jsonschema.Draft202012Validator.check_schema(found)
    assert found["properties"]["schema"]["const"] == SCHEMA
    assert get_args(Stage) == (*STAGES, TEST)
    for section in (found, *found["$defs"].values()):
        for name, field in section["properties"].items():
            assert field.get("description"), f"{section.get('title')}.{name}"


@pytest.mark.parametrize("verdict", ["pass", "xpass", "skip", "fail load", "crash convert", "timeout resize"])
def test_verdicts(verdict):
    assert re.search(schema()["$defs"]["Record"]["properties"]["verdict"]["pattern"], verdict)


@pytest.mark.parametrize("verdict", ["", "fail", "fail nowhere", "passes", "skip export", "xfail load "])
def test_what_is_no_verdict(verdict):
    pattern = schema()["$defs"]["Record"]["properties"]["verdict"]["pattern"]
    assert not re.search(pattern, verdict)


def test_a_report_with_an_unknown_stage_is_invalid():
    data = json.loads('{"schema": 1, "environment": {}, "cases": []}')
    errors = {error.json_path for error in jsonschema.Draft202012Validator(schema()).iter_errors(data)}
    assert errors == {"$.environment"}
