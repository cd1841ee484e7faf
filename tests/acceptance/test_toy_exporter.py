"""Exporters and patch modes of other packages: by entry point, and by hook."""

from __future__ import annotations

import os

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
        ["E   stage compare: 1 of 1 outputs outside *(the exported callable against eager)*"]
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


def test_a_name_nobody_registered_is_a_problem_of_the_spec(project):
    project.simple("right", exporters="[onnx-dinamo]")
    result = project.run()
    result.stdout.fnmatch_lines(
        ["*specs/right.yaml:5:22: unknown exporter 'onnx-dinamo' (did you mean 'onnx-dynamo'?)*"]
    )
