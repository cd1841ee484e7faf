"""docs/spec.reference.md is current, and has every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_exportcheck.errors import STAGES
from pytest_exportcheck.spec import reference
from pytest_exportcheck.spec.reference import reference_text
from pytest_exportcheck.spec.schema import schema

FILE = Path(__file__).parents[2] / "docs" / "spec.reference.md"


def test_the_file_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == reference_text(), (
        "run: python -m pytest_exportcheck.spec.reference > docs/spec.reference.md"
    )


def test_every_key_has_its_line_in_its_section() -> None:
    sections = re.split(r"^## ", reference_text(), flags=re.MULTILINE)[1:]
    known = schema()
    wanted = [list(known["properties"])]
    wanted += [list(known["$defs"][name]["properties"]) for name in reference._PLACES]
    found = [re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) for section in sections]
    assert found == [*wanted, []], "the last section is about calls"


def test_types_and_defaults_are_told() -> None:
    lines = reference_text().splitlines()
    for line in (
        "| `seed` | integer >= 0 | `0` | Seed of the weights and of the inputs. |",
        "| `fails` | " + " or ".join(f"`{stage}`" for stage in STAGES) + " | required | The stage that is "
        "expected to fail. |",
        "| `description` | text |  | Free text. |",
        "| `exportcheck` | `1` | required | Version of the format: 1. |",
    ):
        assert line in lines


def test_a_new_section_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(reference._PLACES, "When")
    with pytest.raises(ValueError, match="differ: When"):
        reference_text()
