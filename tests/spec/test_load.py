"""Files: which are specs, which cannot be read, and what importing costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_exportcheck.errors import SpecError
from pytest_exportcheck.spec import is_spec_file, load_spec, mistyped_key, parse_spec
from pytest_exportcheck.spec.nodes import MAX_BYTES

VALID = 'exportcheck: 1\nmodel: {type: llama}\nobserve: {calls: [forward: {x: "int64[2]"}]}\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.yaml", b"exportcheck: 1\n", True),
        ("a.yml", b"# text\n\ndescription: x\nexportcheck: 1\n", True),
        ("a.yaml", b"\xef\xbb\xbf'exportcheck' : 1", True),
        ("a.yaml", b"exportcheck:", True),
        ("a.yaml", b"a:\n  exportcheck: 1\n", False),
        ("a.yaml", b"exportcheck:1\n", False),
        ("a.yaml", b"# exportcheck: 1\n", False),
        ("a.yaml", b"", False),
        ("a.yaml", b"\0\xff" * 100, False),
        ("a.txt", b"exportcheck: 1\n", False),
    ],
)
def test_is_spec_file(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    assert is_spec_file(path) is expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.yaml", b"exportchek: 1\nmodel: {}\n", "exportchek"),
        ("a.yml", b"\xef\xbb\xbf# Text: more\r\n\r\n---\r\n'Export-Check' : 1", "Export-Check"),
        ("a.yaml", b"exportcheck:1\n", "exportcheck"),
        ("a.yaml", b"exportcheck: 1\n", None),
        ("a.yaml", b"export_checks: 1\nexportcheck: 1\n", None),
        ("a.yaml", b"exporter: 1\n", None),
        ("a.yaml", b"exports:\n  exportchek: 1\n", None),
        ("a.yaml", b"a: 1\nexportchek: 1\n", None),
        ("a.yaml", b"# exportchek: 1\n", None),
        ("a.yaml", b"\n" * 20_000, None),
        ("a.yaml", b"\0\xff" * 100, None),
        ("a.txt", b"exportchek: 1\n", None),
    ],
)
def test_mistyped_key(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    assert mistyped_key(path) == expected


def test_goldens_folders_and_absent_files_are_not_specs(tmp_path):
    golden = tmp_path / "__shapes__" / "a.yaml"
    golden.parent.mkdir()
    golden.write_bytes(b"exportcheck: 1\n")
    (golden.parent / "typo.yaml").write_bytes(b"exportchek: 1\n")
    assert mistyped_key(golden.parent / "typo.yaml") is None
    folder = tmp_path / "b.yaml"
    folder.mkdir()
    assert not is_spec_file(golden)
    assert not is_spec_file(folder)
    assert not is_spec_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "1:1: the file is empty: a spec starts with 'exportcheck: 1'"),
        (b"a\0b", "1:1: is a binary file (it has NUL bytes)"),
        (b"a: 1\nb: \xff\n", "2:4: is not UTF-8 text"),
        ("exportcheck: 1".encode("utf-16"), "1:1: is not UTF-8 text"),
        (b"a: 1\n", "1:1: is not a spec: the key 'exportcheck: 1' is missing"),
        (b"- a\n", "1:1: is not a spec: the key 'exportcheck: 1' is missing"),
        (b"#" * (MAX_BYTES + 1), f"1:1: {MAX_BYTES + 1} bytes: a spec is at most {MAX_BYTES}"),
    ],
)
def test_unusable_files(tmp_path, content, message):
    path = tmp_path / "sub" / "a.yaml"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SpecError) as error:
        load_spec(path, tmp_path)
    assert str(error.value) == f"sub/a.yaml:{message}"


def test_unreadable_paths(tmp_path):
    (tmp_path / "d.yaml").mkdir()
    for name, reason in (("d.yaml", os.strerror(21)), ("absent.yaml", os.strerror(2))):
        with pytest.raises(SpecError, match=f"{name}:1:1: cannot be read: {reason}"):
            load_spec(tmp_path / name, tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(VALID)
    path.chmod(0)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        load_spec(path)


def test_names_and_locations(tmp_path):
    path = tmp_path / "models" / "llama.yaml"
    path.parent.mkdir()
    path.write_text(VALID + "expect:\n  - fails: export\n    reason: because\n")
    spec = load_spec(path, tmp_path)
    assert (spec.name, spec.relative, spec.path, spec.folder) == (
        "llama",
        "models/llama.yaml",
        path,
        path.parent,
    )
    assert spec.location("expect") == (4, 1)
    assert spec.location("expect", 0) == (5, 5)
    assert spec.location("expect", 0, "reason") == (6, 5)
    assert spec.location("expect", 0, "when") == (5, 5), "a default stands where its parent does"
    assert spec.place("expect", 0, "reason") == "models/llama.yaml:6"
    assert load_spec(path, tmp_path / "other").relative == "../models/llama.yaml"


def test_parse_spec_needs_no_file(tmp_path):
    spec = parse_spec(VALID, tmp_path / "new.yaml", tmp_path)
    assert spec.relative == "new.yaml"
    assert hash(spec) == hash(parse_spec(VALID, tmp_path / "new.yaml"))


def test_loading_imports_nothing_heavy(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        VALID + 'requires: ["torch>=2"]\nexpect: [{fails: run, reason: r, when: {torch: ">=2"}}]\n'
    )
    code = (
        "import sys, pathlib; import pytest_exportcheck.spec as s\n"
        "light = [m for m in ('yaml', 'pydantic') if m in sys.modules]\n"
        f"s.is_spec_file(pathlib.Path({str(path)!r})); s.missing_requirements\n"
        f"spec = s.load_spec(pathlib.Path({str(path)!r})); s.missing_requirements(spec)\n"
        "names = ('torch', 'transformers', 'onnxruntime', 'onnx', 'numpy', 'pytest')\n"
        "heavy = [m for m in names if m in sys.modules]\n"
        "print(light, heavy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[] []"
