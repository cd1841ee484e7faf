"""The command-line options: one paragraph each."""

from __future__ import annotations

import pytest


def usage_error(result: pytest.RunResult, *lines: str) -> None:
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {line}" for line in lines])


@pytest.fixture
def matrix(project):
    """A spec with twelve cases, and one with a single case."""
    project.spec(
        "big",
        exporters=("torch-export", "onnx-dynamo"),
        matrix=", patch_modes: [none, hf], dtypes: [float32, float16, float64]",
    )
    project.spec("small", exporters=("torch-export-strict",))
    return project


@pytest.mark.parametrize(
    ("args", "exports", "shapes"),
    [
        (("--exporter=torch-export",), 6, 3),
        (("--exporter=torch-export", "--exporter=torch-export-strict"), 7, 4),
        (("--exporter=torch-export", "--export-dtype=float16"), 2, 1),
        (("--patch-mode=hf",), 6, 3),
        (("--export-device=cpu", "--export-dtype=float32"), 5, 2),
        (("--exporter=onnx-torchscript",), 0, 0),
        (("--export-device=cuda",), 0, 0),
    ],
)
def test_axis_options_restrict_the_matrix(matrix, args, exports, shapes):
    result = matrix.run("--collect-only", "-q", *args)
    lines = result.stdout.str()
    assert lines.count("::test_export[") == exports
    assert lines.count("::test_dynamic_shapes[") == shapes
    assert result.ret == (0 if exports else pytest.ExitCode.NO_TESTS_COLLECTED)


def test_unknown_names_are_usage_errors(project):
    project.spec("a")
    for arg, line in (
        ("--exporter=onnx-dinamo", "unknown exporter 'onnx-dinamo' (did you mean 'onnx-dynamo'?); known: *"),
        ("--exporter=onnx", "unknown exporter 'onnx' (did you mean 'onnx-dynamo' or 'onnx-torchscript'?)*"),
        ("--exporter=strict", "unknown exporter 'strict' (did you mean 'torch-export-strict'?)*"),
        ("--export-dtype=fp16", "unknown dtype 'fp16' (did you mean 'float16'?)*"),
        ("--patch-mode=hff", "unknown patch mode 'hff' (did you mean 'hf'?); known: none, torch, *hf*"),
        ("--export-device=gpu", "unknown device 'gpu' (did you mean 'cuda'?); known: cpu, cuda"),
        ("--export-dtype=float23", "unknown dtype 'float23' (did you mean 'float32'?)*"),
        ("--require-device=tpu", "unknown device 'tpu'*"),
    ):
        usage_error(project.run(arg), line)


def test_options_that_need_the_flag(project):
    project.spec("a")
    usage_error(project.run("--update-shapes", flag=False), "--update-shapes needs --exportcheck: *")
    usage_error(project.run("--ablate-patches", flag=False), "--ablate-patches needs --exportcheck: *")
    usage_error(
        project.run("--prune-shapes", "--exporter=x", flag=False), "--prune-shapes, --exporter needs *"
    )


@pytest.mark.parametrize("option", ["--update-shapes", "--prune-shapes"])
def test_ci_does_not_change_goldens(project, monkeypatch, option):
    project.spec("a", accepted=False)
    monkeypatch.setenv("CI", "true")
    usage_error(project.run(option), f"{option} is refused because CI is set*EXPORTCHECK_ALLOW_CI_UPDATE=1")
    monkeypatch.setenv("EXPORTCHECK_ALLOW_CI_UPDATE", "1")
    assert project.run(option).ret in (0, 1)


def test_exporters_and_patch_modes_of_a_conftest(any_project):
    any_project.fake(
        """
def pytest_exportcheck_exporters(config):
    return {"mine": "my_package:MyExporter", "own": type("Own", (), {"brings_patches": True})}
def pytest_exportcheck_patch_modes(config):
    return {"gentle": object()}
"""
    )
    any_project.spec("a", exporters=("mine", "own"), matrix=", patch_modes: [none, gentle]")
    result = any_project.run("-v", "--patch-mode=gentle", "--patch-mode=own")
    result.stdout.fnmatch_lines_random(
        [
            "*::test_export[[]cpu-float32-mine-gentle[]]*",
            "*::test_export[[]cpu-float32-own-own[]]*",
            "a * pass *",
        ]
    )
    result.assert_outcomes(passed=3)


def test_report_is_written_also_by_ini_and_when_interrupted(project):
    project.spec("a")
    project.ini("exportcheck_report = out/r.json")
    project.run().stdout.fnmatch_lines(["*report: out/r.json"])
    assert len(project.report("out/r.json")) == 2
    project.in_process = False
    project.fake("def pytest_runtest_teardown(item):\n    raise KeyboardInterrupt\n")
    project.run()
    assert len(project.report("out/r.json")) == 1


def test_a_report_that_cannot_be_written(project):
    project.spec("a")
    (project.pytester.path / "file").write_text("")
    usage_error(project.run("--exportcheck-report=specs"), "--exportcheck-report: * is a directory")
    usage_error(project.run("--exportcheck-report=file/r.json"), "--exportcheck-report: cannot create *")
    project.fake(
        """
import os
def pytest_sessionstart(session):
    os.rmdir("gone")
    open("gone", "w").close()
"""
    )
    result = project.run("--exportcheck-report=gone/r.json")
    result.stdout.fnmatch_lines(["exportcheck: ERROR report *gone/r.json not written: *", "*2 passed*"])
    assert result.ret == 1


def test_artifacts_are_kept_on_failure(any_project):
    any_project.spec("a", kwargs={"do": {"torch-export": "compare"}}, accepted=False)
    any_project.spec("b")
    any_project.run("--exportcheck-artifacts=out")
    out = any_project.pytester.path / "out"
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files == [
        "specs/a/cpu-float32-torch-export-none/failure.txt",
        "specs/a/cpu-float32-torch-export-none/record.json",
        "specs/a/cpu-float32/failure.txt",
        "specs/a/cpu-float32/record.json",
        "specs/a/cpu-float32/shapes.yaml",
    ]
    assert "stage compare: compare went wrong" in (out / files[0]).read_text()
    assert "x: float32[batch, 4]" in (out / files[4]).read_text()


def test_github_summary(project, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.pytester.path / "summary.md"))
    (project.pytester.path / "summary.md").write_text("before\n")
    project.spec("a", kwargs={"do": {"torch-export": "compare"}})
    project.run()
    text = (project.pytester.path / "summary.md").read_text()
    assert text.startswith("before\n## exportcheck\n")
    assert "| a | pass | **FAIL compare** |" in text
    assert "- `specs/a.yaml::test_export[cpu-float32-torch-export-none]` **FAIL compare**" in text


def test_no_share_reaches_the_engine_and_the_reproduce_line(any_project, monkeypatch, tmp_path):
    project = any_project
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    project.spec("a", kwargs={"do": {"torch-export": "compare"}})
    result = project.run("--no-share")
    opened = [line for line in (tmp_path / "log").read_text().splitlines() if " open " in line]
    assert opened
    assert all(line.endswith(" open a, nothing shared") for line in opened)
    result.stdout.fnmatch_lines(["*reproduce:  pytest --exportcheck --no-share *"])


def test_quiet_and_no_summary(project):
    project.spec("a")
    result = project.run("-q")
    result.stdout.fnmatch_lines(["1 case: 1 pass   shapes: 1 ok"])
    result.stdout.no_fnmatch_line("*= exportcheck =*")
    project.run("--no-summary").stdout.no_fnmatch_line("1 case:*")
    project.run("-qq").stdout.no_fnmatch_line("1 case:*")


def test_a_narrow_terminal_wraps_the_columns(project, monkeypatch):
    monkeypatch.setenv("COLUMNS", "45")
    project.spec("a", exporters=("torch-export", "onnx-dynamo", "onnx-torchscript"))
    result = project.run("--color=no")
    lines = [line for line in result.outlines if line]
    at = lines.index("spec  shapes  onnx-dynamo  onnx-torchscript")
    assert lines[at - 1 : at + 5] == [
        "      cpu",
        "spec  shapes  onnx-dynamo  onnx-torchscript",
        "a     pass    pass         pass",
        "      cpu",
        "spec  torch-export",
        "a     pass",
    ]


def test_an_axis_that_no_spec_names_is_said(any_project):
    any_project.spec("a")
    result = any_project.run("--exporter", "onnx-dynamo")
    text = result.stdout.str()
    assert "--exporter onnx-dynamo: no collected spec names it, they name torch-export" in text


@pytest.mark.parametrize("node", ["", "::test_export[cpu-float32-torch-export-none]"])
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_spec_that_is_named_without_the_flag(project, node, workers):
    project.spec("a")
    result = project.pytester.runpytest_subprocess(f"specs/a.yaml{node}", workers)
    result.stdout.fnmatch_lines(
        ["specs/a.yaml is a spec, and specs need a flag: pytest --exportcheck specs/a.yaml"]
    )
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.mark.parametrize(
    "arguments",
    [["other.yaml"], ["missing.yaml"], ["specs"], ["--exportcheck", "specs/a.yaml::test_nothing"]],
)
def test_nothing_is_said_of_the_flag_elsewhere(project, arguments):
    project.spec("a")
    project.pytester.path.joinpath("other.yaml").write_text("exports: 1\n")
    result = project.run(*arguments, flag=False)
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "need a flag" not in result.stdout.str() + result.stderr.str()
