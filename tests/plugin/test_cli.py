"""The `exportcheck` command."""

from __future__ import annotations

import json

import pytest

from pytest_exportcheck import __version__
from pytest_exportcheck.cli import main


def test_lint(project, monkeypatch, capsys):
    monkeypatch.chdir(project.pytester.path)
    project.spec("good")
    (project.pytester.path / "specs" / "models.py").write_text("def build(): ...\n")
    assert main(["lint", "specs"]) == 0
    assert capsys.readouterr().err == "1 spec, 0 with problems\n"
    project.spec("bad", exporters=("onnx-dinamo",), more="nonsense: 1\n")
    assert main(["lint", "specs", "missing.yaml"]) == 1
    out, err = capsys.readouterr()
    assert "specs/bad.yaml:7:" in out
    assert "onnx-dynamo" in out
    assert "missing.yaml" in out
    assert err == "3 specs, 2 with problems\n"


def test_lint_reports_a_file_of_a_folder_that_mistypes_the_key(project, monkeypatch, capsys):
    monkeypatch.chdir(project.pytester.path)
    path = project.spec("typo")
    path.write_text(path.read_text().replace("exportcheck", "exportchek", 1))
    (path.parent / "other.yaml").write_text("exports: 1\n")
    assert main(["lint", "specs"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("specs/typo.yaml:1:1: is not a spec: the key 'exportcheck: 1' is missing")
    assert err == "1 spec, 1 with problems\n"


def test_lint_takes_a_name_that_a_conftest_may_register(project, monkeypatch, capsys):
    monkeypatch.chdir(project.pytester.path)
    project.spec("own", exporters=("my-very-own",))
    (project.pytester.path / "specs" / "models.py").write_text("def build(): ...\n")
    assert main(["lint", "specs"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "specs/own.yaml:" in err
    assert "unknown exporter 'my-very-own'" in err
    assert "unless a conftest.py registers it" in err
    # A name that begins like one of ours is none of its typos.
    project.spec("own", exporters=("torch-deferred",), matrix=", patch_modes: [torch-mine]")
    assert main(["lint", "specs"]) == 0
    assert "unknown patch mode 'torch-mine'" in capsys.readouterr().err
    project.spec("own", more="compare: {y: {by: my-iou}}\n")
    assert main(["lint", "specs"]) == 0
    assert "unknown comparison 'my-iou'" in capsys.readouterr().err
    project.spec("own", matrix=", patch_modes: [transformer]")
    assert main(["lint", "specs"]) == 1
    project.spec("own", exporters=("my-very-own", "torch-exprt"))
    assert main(["lint", "specs"]) == 1
    project.spec("own", exporters=("my-very-own",), more="nonsense: 1\n")
    assert main(["lint", "specs"]) == 1


def test_lint_looks_up_what_a_spec_refers_to(project, monkeypatch, capsys):
    monkeypatch.chdir(project.pytester.path)
    project.spec("a")
    (project.pytester.path / "specs" / "models.py").write_text("def build(): ...\n")
    assert main(["lint", "specs"]) == 0
    project.spec("a", factory="models.py:biuld")
    assert main(["lint", "specs"]) == 1
    assert "specs/a.yaml:3:12: models.py has no 'biuld' (did you mean 'build'?)" in capsys.readouterr().out
    project.spec("a", factory="model.py:build")
    assert main(["lint", "specs"]) == 1
    out = capsys.readouterr().out
    assert "specs/a.yaml:3:12: there is no file model.py next to the spec (did you mean 'models.py'?)" in out


def test_lint_tells_what_is_missing_with_everything_else(project, monkeypatch, capsys):
    monkeypatch.chdir(project.pytester.path)
    (project.pytester.path / "specs").mkdir(exist_ok=True)
    (project.pytester.path / "specs" / "a.yaml").write_text(
        """exportcheck: 1
model: {factory: "gone.py:build", seeds: 3}
observe:
  calls:
    - forward: {x: "float32[2, 4", y: "float32[2] from gone.npz:y"}
    - forward: {x: "float32[2, 4] by made.py:image"}
matrix: {exporters: [torch-export], patch_modes: ["mine.py:mode"]}
expect: 7
model: {}
"""
    )
    assert main(["lint", "specs"]) == 1
    out = capsys.readouterr().out
    places = [line.split(": ")[0].split(":")[1:] for line in out.splitlines()]
    assert [int(line) for line, _ in places] == sorted(int(line) for line, _ in places)
    for expected in (
        "a.yaml:2:18: there is no file gone.py next to the spec",
        "a.yaml:2:35: unknown key 'seeds'",
        "a.yaml:5:",
        "there is no gone.npz next to the spec",
        ": there is no file made.py next to the spec",
        ": there is no file mine.py next to the spec",
        "a.yaml:8:9: expected a list",
        "a.yaml:9:1: duplicate key 'model'",
    ):
        assert expected in out
    # A file that is no YAML has nothing else to be told.
    (project.pytester.path / "specs" / "a.yaml").write_text("exportcheck: 1\nmodel: {factory: 'gone.py:x'\n")
    assert main(["lint", "specs"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_lint_of_a_folder_without_specs(project, monkeypatch, capsys):
    monkeypatch.chdir(project.pytester.path)
    (project.pytester.path / "empty").mkdir()
    assert main(["lint", "empty"]) == 2
    assert capsys.readouterr().err.startswith("exportcheck: no spec file in empty: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "a.yaml", "--dtype", "fp16"], "'fp16' is not one of *(did you mean 'float16'?)"),
        (["show", "a.yaml", "--device", "gpu"], "'gpu' is not one of *(did you mean 'cuda'?)"),
        (
            ["validate", "-m", "x", "--run", "--dtype", "half"],
            "'half' is not one of *(did you mean 'float16'?)",
        ),
    ],
)
def test_a_mistyped_choice_has_a_suggestion(arguments, message, capsys):
    import fnmatch

    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert fnmatch.fnmatchcase(err, f"exportcheck: *{message}\n")
    assert err.count("\n") == 1


def test_schema(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lnt"], "exportcheck: No such command 'lnt'."),
        (["lint"], "exportcheck: Missing argument 'SPECS...'."),
        (
            ["compare", "a.json", "b.json", "--format", "pdf"],
            "exportcheck: Invalid value for '--format': 'pdf' is",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
