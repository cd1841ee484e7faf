"""Messages count one thing as one thing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_exportcheck
from pytest_exportcheck.plurals import counted

SOURCES = Path(pytest_exportcheck.__file__).parent

#: A number right before a plural in an f-string; `counted` writes those.
_NUMBER = re.compile(r"\{len\([^{}]*\)(?: - \w+)?\} (?:\w+ )?[a-z]+[^s\W]s\b(?! a )")


def test_counted():
    assert [counted(n, "case") for n in (0, 1, 2, 1234)] == ["0 cases", "1 case", "2 cases", "1,234 cases"]
    assert counted(1, "patch", "patches") == "1 patch"
    assert counted(3, "patch", "patches") == "3 patches"


def test_every_message_counts_with_it():
    # An empty or a single one is a case of its own there.
    known = ('f"{len(refusals)} sizes"', "{len(classes)} classes", "{len(text)} digits")
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _NUMBER.search(line) and not any(each in line for each in known)
    ]
    assert found == []
