"""YAML as such: scalars, positions, and what is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from pytest_exportcheck.errors import SpecError
from pytest_exportcheck.filepaths import relative_text
from pytest_exportcheck.spec import nodes
from pytest_exportcheck.spec.load import load_spec


def parse(text: str) -> tuple[object, list[str], nodes.Document]:
    report = nodes.Report("a.yaml")
    nodes.parse_document(text, report)
    return report.document.data, [str(p) for p in report.sorted()], report.document


@pytest.fixture(params=["libyaml", "python"], autouse=True)
def loader(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(nodes, "_Loader", nodes._make_python_loader())
    elif not nodes.yaml.__with_libyaml__:
        pytest.skip("PyYAML without libyaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("+3", 3),
        ("0x1F", 31),
        ("0o17", 15),
        ("007", 7),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("1e", "1e"),
        ("=", "="),
        ("!!str 5", "5"),
    ],
)
def test_scalars(text, value):
    data, problems, _ = parse(f"k: {text}\n")
    assert problems == []
    assert data["k"] == value
    assert type(data["k"]) is type(value)


def test_nan():
    assert math.isnan(parse("[.nan]")[0][0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1: the file is empty: a spec starts with 'exportcheck: 1'"),
        ("# only a comment\n", "1:1: the file is empty: a spec starts with 'exportcheck: 1'"),
        ("a: 1\nb: 2\na: 3\n", "3:1: duplicate key 'a', first on line 1"),
        ("k: {1: a, 1.0: b}", "1:11: duplicate key '1.0', first on line 1"),
        ("a: &x 1\n", "1:4: anchors and aliases are not supported (&x)"),
        ("<<: {a: 1}\n", "1:1: merge keys ('<<') are not supported"),
        ("a: !!python/object:os.system x\n", "1:4: YAML tags are not supported (!!python/object:os.system)"),
        ("a: !mine {b: 1}\n", "1:4: YAML tags are not supported (!mine)"),
        ("a: !!int '5'\n", "1:4: YAML tags are not supported (!!int)"),
        ("? [a, b]\n: 1\n", "1:3: a key must be plain text, not a list or a mapping"),
        ("a: 1\n---\nb: 1\n", "2:1: several YAML documents in one file: a spec is one document"),
        ("a: \x01\n", "1:4: character '\\x01' is not allowed in YAML"),
        ("a: " + "9" * 200, "1:4: integer of 200 digits"),
        ("a: " + "[" * 60 + "]" * 60, "1:43: nested deeper than 40 levels"),
    ],
)
def test_refused(text, message):
    assert parse(text)[1] == [f"a.yaml:{message}"]


@pytest.mark.parametrize(
    ("text", "where"), [("a: [1\n", "2:1"), ("a: 1\n b: 2\n", "2:3"), ("a: 'x\n", "2:1"), ("\ta: 1\n", "1:1")]
)
def test_syntax_errors_have_a_place(text, where):
    (problem,) = parse(text)[1]
    assert problem.startswith(f"a.yaml:{where}: YAML syntax: ")


def test_laughs_are_refused_before_they_are_expanded():
    bomb = "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(3))
    assert parse(bomb)[1][:2] == [
        "a.yaml:1:4: anchors and aliases are not supported (&a)",
        "a.yaml:2:5: anchors and aliases are not supported (&b0)",
    ]
    assert parse("text: a & b * c\nmore: '*'\n")[1] == []


def test_a_nesting_bomb_is_refused():
    (problem,) = parse("a: " + "[" * 100_000)[1]
    assert problem.endswith(": nested deeper than 40 levels")


def test_forty_levels_are_fine():
    assert parse("[" * 40 + "]" * 40)[1] == []


def test_positions():
    _, _, document = parse("a:\n  - x: 'it''s'\n    y: \"ab\"\n  - 2\n")
    assert document.position(("a", 0, "y")) == nodes.Position(3, 8, 3, 5, 9)
    assert document.position(("a", 0, "x")).text_column == 0, "an escaped quote shifts the columns"
    assert document.position(("a", 1)) == nodes.Position(4, 5, 4, 5, 5)
    assert document.position(("a",))[:4] == (2, 3, 1, 1)
    assert document.position(("a", 0, "z", "deeper"))[:2] == (2, 5), "nearest ancestor"


@pytest.mark.parametrize(
    "text",
    [
        "exportcheck: 1\nmodel: {}\n",
        "# model: no\r\nexportcheck: 1\r\n\r\nmodel:\r\n  type: x\r\n",
        "exportcheck: 1\r# model:\rmodel: {}\r",
        "{exportcheck: 1,\n model: {}}\n",
        "exportcheck: 1\n'model': {}\n",
        'description: "two\nmodel: lines"\nexportcheck: 1\nmodel: {}\n',
        "exportcheck: 1\n",
    ],
)
def test_the_line_of_a_key_is_its_position(text):
    _, problems, document = parse(text)
    assert not problems
    assert document.line("model") == document.position(("model",)).key_line


def test_the_line_of_a_key_is_found_without_parsing():
    _, _, document = parse("exportcheck: 1\nmodel:\n  type: x\n")
    assert document.line("model") == 2
    assert "positions" not in vars(document)


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/a/b/c.yaml", "/a"),
        ("/a/b/c.yaml", "/a/"),
        ("/a/b/c.yaml", "/"),
        ("/ab/c.yaml", "/a"),
        ("/a/../c.yaml", "/a"),
        ("/a", "/a"),
        ("c.yaml", "."),
    ],
)
def test_the_name_of_a_file_is_its_path_from_the_root(path, root):
    wanted = Path(os.path.relpath(path, root)).as_posix()
    assert relative_text(Path(path), Path(root)) == wanted


def test_byte_order_mark_does_not_shift_columns(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfexportchec: 1\n")
    with pytest.raises(SpecError) as error:
        load_spec(path, tmp_path)
    assert str(error.value) == "a.yaml:1:1: is not a spec: the key 'exportcheck: 1' is missing (mistyped?)"
