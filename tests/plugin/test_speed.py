"""`benchmarks/speed.py`: one command for the benchmarks; what fails is told, and what does not run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from pytest_exportcheck.reports.measurements import differences, read_measurements

FOLDER = Path(__file__).parents[2] / "benchmarks"

SPEC = """\
exportcheck: 1
model: {factory: "models.py:build"}
observe:
  calls: [{forward: {input: "float32[2, 4]"}}, {forward: {input: "float32[3, 4]"}}]
"""
MODELS = "import torch\n\ndef build():\n    return torch.nn.Linear(4, 4)\n"


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("main_job", "memory", "startup"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("speed", FOLDER / "speed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("main_job", "memory", "startup"):
        sys.modules.pop(name, None)


def test_one_tiny_spec(speed, tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.yaml").write_text(SPEC, encoding="utf-8")
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.setattr(speed.main_job, "EXPORTERS", ("torch-export",))
    monkeypatch.setattr(speed.main_job, "MODES", ("none",))
    file = tmp_path / "speed.json"
    wanted = ["--rows", "limit", "idle", "--repeats", "1", "--json", str(file)]
    assert speed.main([str(tmp_path / "tiny.yaml"), *wanted]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert list(rows) == ["limit", "idle"]
    for figures in rows.values():
        assert figures["ratio"] == pytest.approx(figures["ours_cpu_s"] / figures["base_cpu_s"], rel=0.1)
    assert rows["limit"]["said"].startswith("2 passed")
    assert "; 1 agree, 0 do not" in rows["limit"]["said"]
    assert "| limit | " in capsys.readouterr().out
    # What `exportcheck compare` reads.
    before = read_measurements(file)
    rows["limit"]["ratio"] *= 2
    file.write_text(json.dumps({"benchmark": "speed", "rows": rows}), encoding="utf-8")
    (found,) = differences(before, read_measurements(file))
    assert (found.row, found.figure, found.worse) == ("limit", "ratio", True)


def test_a_part_that_fails_is_told_and_the_others_go_on(speed, tmp_path, monkeypatch, capsys):
    def broken(names, repeats):
        raise SystemExit("python -m pytest: exit status 4\nusage\nerror: no such option")

    monkeypatch.setattr(speed.startup, "measure", broken)
    monkeypatch.setattr(speed.memory, "measure", lambda *_: [{"specs": 5, "ratio": 1.0, "peak_mb": 1.0}] * 2)
    assert speed.main(["--rows", "idle", "memory"]) == 1
    shown = capsys.readouterr().out
    assert "| idle | - | - | - | FAILED: python -m pytest: exit status 4 ... error: no such option |" in shown
    assert "| memory: 5 specs | 1.0 |" in shown


def test_more_memory_than_allowed_is_a_failure(speed, monkeypatch):
    runs = [{"specs": 1, "ratio": 1.0, "peak_mb": 1.0}, {"specs": 5, "ratio": 1.5, "peak_mb": 1.5}]
    monkeypatch.setattr(speed.memory, "measure", lambda *_: runs)
    assert speed.measure(["memory"], [], 1)["memory: 5 specs"]["failed"] == "above the limit of 1.2"
    assert speed.main(["--rows", "memory"]) == 1


@pytest.mark.parametrize("there", [False, True])
def test_the_other_checker_is_never_silently_absent(speed, tmp_path, monkeypatch, there):
    if there:
        package = tmp_path / "onnx_diagnostic"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text("import transformers_of_last_year\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (row,) = speed.measure(["diagnostic"], [], 1).values()
    problem = "ModuleNotFoundError: No module named 'transformers_of_last_year'"
    assert row == {"said": f"does not run: {problem}" if there else "not installed"}


def test_a_spec_that_is_not_there_is_a_failure(speed):
    (row,) = speed.measure(["limit"], ["no_such_model"], 1).values()
    assert row["failed"] == "no spec is left of no_such_model"


def test_every_row_is_explained(speed):
    for name in speed.ROWS:
        assert f"\n{name} " in speed.__doc__, name
