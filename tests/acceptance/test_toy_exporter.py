"""Exporters, patch modes and comparisons of other packages: by entry point, and by hook."""

from __future__ import annotations

import json
import os

import pytest

from .conftest import TOY


def test_entry_points_of_another_package(project, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TOY) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    project.simple("right", exporters="[toy-deferred, toy-callable], patch_modes: [none, toy-math]")
    project.simple(
        "wrong", exporters="[toy-callable]", more="exporter_options: {toy-callable: {error: 0.5}}\n"
    )
    project.run("--update-shapes", "-k", "dynamic_shapes")
    result = project.run("--exportcheck-report=report.json")
    assert project.verdicts() == {
        "right[shapes-None]": "pass",
        "right[toy-deferred-none]": "pass",
        "right[toy-deferred-toy-math]": "pass",
        "right[toy-callable-none]": "pass",
        "right[toy-callable-toy-math]": "pass",
        "wrong[shapes-None]": "pass",
        "wrong[toy-callable-none]": "fail compare",
    }
    result.stdout.fnmatch_lines(
        ["E   stage compare: 1 of 1 output outside *(the exported callable against eager)*"]
    )


def test_hooks_of_a_conftest(project):
    project.pytester.makeconftest(
        "import sys\n"
        f"sys.path.insert(0, {str(TOY)!r})\n"
        "def pytest_exportcheck_exporters(config):\n"
        "    return {'mine': 'toy_exporter:Deferred'}\n"
        "def pytest_exportcheck_patch_modes(config):\n"
        "    return {'calm': 'toy_exporter:MathSdpa'}\n"
    )
    project.simple("right", exporters="[mine], patch_modes: [calm]")
    project.run("--update-shapes", "-k", "dynamic_shapes", "--exportcheck-report=report.json")
    result = project.run("--exportcheck-report=report.json")
    assert project.verdicts() == {"right[shapes-None]": "pass", "right[mine-calm]": "pass"}
    assert result.ret == 0


def test_a_hook_that_returns_no_mapping_is_named(pytester):
    pytester.makeconftest("def pytest_exportcheck_exporters(config): return ['mine']")
    result = pytester.runpytest_subprocess("--exportcheck", "-p", "no:hypothesispytest")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: pytest_exportcheck_exporters returned list *'mine'*, not {name: * (*conftest.py)"]
    )


def test_a_name_nobody_registered_is_a_problem_of_the_spec(project):
    project.simple("right", exporters="[onnx-dinamo]")
    result = project.run()
    result.stdout.fnmatch_lines(
        ["*specs/right.yaml:5:22: unknown exporter 'onnx-dinamo' (did you mean 'onnx-dynamo'?)*"]
    )


OFF = "exporter_options: {toy-callable: {error: %s}}\n"


def _comparisons(project, monkeypatch, *more):
    monkeypatch.setenv("PYTHONPATH", str(TOY) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    near = "compare: {output: {by: toy-near}}\n"
    project.simple("right", exporters="[toy-callable]", more=OFF % 0.5 + near)
    project.simple("wrong", exporters="[toy-callable]", more=OFF % 2.0 + near)
    project.simple(
        "broken",
        exporters="[toy-callable]",
        more="compare: {output: {by: toy-broken}}\n"
        "expect: [{when: {exporter: toy-callable}, fails: compare, reason: other numbers}]\n",
    )
    project.run("--update-shapes", "-k", "dynamic_shapes")
    result = project.run("-k", "test_export", "--exportcheck-report=report.json", "--diagnose", *more)
    assert project.verdicts() == {
        "right[toy-callable-none]": "pass",
        "wrong[toy-callable-none]": "fail compare",
        "broken[toy-callable-none]": "fail comparison",
    }
    result.stdout.fnmatch_lines_random(
        [
            "specs/broken.yaml:*: ComparisonError",
            "E   comparison (at stage compare): specs/broken.yaml:6: comparison toy-broken on output: "
            "it raised RuntimeError: judges nothing",
            "E     at *toy_exporter.py:* in *",
            "E   line 7 of specs/broken.yaml expects a failure at compare: a comparison that breaks is never "
            "expected",
            "E   *2x3*float32*FAIL off by 2.00 (by toy-near)",
            "  the program of toy-callable * differs  output: off by 2.00",
            "*not diagnosed: the comparison is to blame, and no step of the export*",
        ]
    )


def test_comparisons_of_another_package(project, monkeypatch):
    _comparisons(project, monkeypatch)
    report = json.loads((project.pytester.path / "report.json").read_text())
    rows = {case["spec"]: case.get("outputs", ()) for case in report["cases"]}
    assert {(row["by"], row["ok"]) for row in rows["specs/right.yaml"]} == {("toy-near", True)}
    assert {(row["by"], row["ok"]) for row in rows["specs/wrong.yaml"]} == {("toy-near", False)}
    assert not rows["specs/broken.yaml"], "it judged nothing"


def test_a_broken_comparison_in_a_process_of_its_own(project, monkeypatch):
    _comparisons(project, monkeypatch, "--isolate")


def test_comparisons_of_a_conftest(project):
    project.pytester.makeconftest(
        "def never(expected, got, tolerance):\n"
        "    return ['never the same']\n"
        "def pytest_exportcheck_comparisons(config):\n"
        "    return {'never': never}\n"
    )
    project.simple("right", more="compare: {output: {by: never}}\n")
    project.simple("typo", more="compare: {output: {by: nevr}}\n")
    result = project.run("-k", "test_export", "--exportcheck-report=report.json")
    assert project.verdicts() == {"right[torch-export-none]": "fail compare"}
    result.stdout.fnmatch_lines(
        ["*specs/typo.yaml:6:24: unknown comparison 'nevr' (did you mean 'never'?)*", "*FAIL never the same*"]
    )
