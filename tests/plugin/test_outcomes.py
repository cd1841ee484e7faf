"""What a user sees when a case fails, is expected to fail, passes unexpectedly, or cannot run."""

from __future__ import annotations

import os
import re
import shlex

import pytest

#: In place of torch, which takes a second to import in each worker.
NO_GPU = """
import sys
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
"""

TWO_GPUS = """
import os, sys
from types import SimpleNamespace
def set_device(index):
    assert index == int(os.environ["PYTEST_XDIST_WORKER"][2:]) % 2
    open(f"gpu{index}", "w").close()
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, set_device=set_device, get_device_name=str
))
"""


def expect(fails: str, *, when: str = "", reason: str = "see issue 1") -> str:
    """An `expect` section with one item; its item is on line 9 of the file."""
    condition = f"when: {{{when}}}\n    " if when else ""
    return f'expect:\n  - {condition}fails: {fails}\n    reason: "{reason}"\n'


def test_a_stage_failure_has_no_traceback(any_project):
    any_project.spec("vit", kwargs={"do": {"torch-export": "compare"}})
    result = any_project.run("--exportcheck-report=report.json", "--junitxml=junit.xml")
    result.stdout.fnmatch_lines(
        [
            "specs/vit.yaml:2: CompareError",
            "E   stage compare: compare went wrong",
            "E     first detail",
            "E     second detail",
            'E   reproduce:  pytest --exportcheck "specs/vit.yaml::test_export[[]cpu-float32-torch-export-*',
            "vit   pass    FAIL compare",
            "1 case: 1 FAIL   shapes: 1 ok   report: report.json",
            "FAILED specs/vit.yaml::test_export[[]cpu-float32-torch-export-none[]] - stage c*",
        ],
        consecutive=False,
    )
    result.stdout.no_fnmatch_line("*handles.py*")
    result.assert_outcomes(passed=1, failed=1)
    record = any_project.report()[1]
    assert record["verdict"] == "fail compare"
    assert record["stage"] == "compare"
    assert record["message"] == "compare went wrong"
    assert set(record["durations"]) >= {"load", "patch", "export", "compare"}
    assert set(record["durations"]["export"]) == {"wall_s", "cpu_s"}
    junit = (any_project.pytester.path / "junit.xml").read_text()
    assert 'message="stage compare: compare went wrong"' in junit


def test_a_failure_that_a_user_test_swallows_is_no_pass_of_the_case(any_project):
    any_project.spec("vit", kwargs={"do": {"torch-export": "compare"}})
    any_project.pytester.makepyfile(
        """
        import pytest
        from pytest_exportcheck import assert_export

        @pytest.mark.exportcheck("specs/vit.yaml")
        def test_it(export_case):
            with pytest.raises(Exception, match="compare went wrong"):
                assert_export(export_case)
        """
    )
    result = any_project.run("--exportcheck-report=report.json", ".", flag=False)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("vit *pass*")


def test_failures_are_shown_without_the_terminal_plugin(project):
    project.spec("vit", kwargs={"do": {"torch-export": "compare"}})
    result = project.run("-p", "no:terminal", "--exportcheck-report=report.json")
    assert result.ret == 1
    assert [record["verdict"] for record in project.report()] == ["pass", "fail compare"]


def test_very_verbose_adds_the_traceback(project):
    project.spec("vit", kwargs={"do": {"torch-export": "compare"}})
    result = project.run("-vv")
    result.stdout.fnmatch_lines(["*raise error_class(action)*", "specs/vit.yaml:2: CompareError"])


def test_verbose_shows_the_sizes_that_eager_refuses(project):
    project.spec("vit", kwargs={"refused": ["seq=9: IndexError: too long"]})
    line = "specs/vit.yaml: eager refuses a size, not judged: seq=9: IndexError: too long"
    project.run("-v").stdout.fnmatch_lines([line])
    project.run().stdout.no_fnmatch_line(line)


@pytest.mark.parametrize("style", ["line", "native", "short"])
def test_other_traceback_styles(project, style):
    project.spec("vit", kwargs={"do": {"torch-export": "compare"}})
    result = project.run(f"--tb={style}")
    result.stdout.fnmatch_lines(["*stage compare: compare went wrong*"])
    result.stdout.no_fnmatch_line("*handles.py*")
    if style == "line":
        result.stdout.fnmatch_lines(["specs/vit.yaml:2: stage compare: compare went wrong"])
        result.stdout.no_fnmatch_line("*second detail*")


def test_the_reproduction_is_relative_to_where_pytest_was_started(project, monkeypatch):
    project.spec("vit", kwargs={"do": {"torch-export": "export"}})
    monkeypatch.chdir(project.pytester.path / "specs")
    result = project.run("vit.yaml", f"--rootdir={project.pytester.path}")
    result.stdout.fnmatch_lines(['E   reproduce:  pytest --exportcheck "vit.yaml::test_export*'])


def test_all_paths_are_relative_to_where_pytest_was_started(project, monkeypatch):
    root = project.pytester.path
    project.spec("vit", kwargs={"do": {"torch-export": "export"}}, accepted=False)
    project.golden("gone", "inputs: {}\n")
    (root / "tox.ini").unlink()
    (root / "specs" / "sub").mkdir()
    (root / "other").mkdir()
    (root / "conftest.py").rename(root / "specs" / "conftest.py")
    for folder, to_specs in (("specs/sub", ".."), ("other", "../specs"), (".", "specs")):
        monkeypatch.chdir(root / folder)
        project.golden_path("vit").unlink(missing_ok=True)
        # As `exportcheck validate` does.
        given = (f"--rootdir={to_specs}", f"-c{os.devnull}", "--no-confirm", to_specs)
        report = f"--exportcheck-report={to_specs}/report.json"
        result = project.run("--update-shapes", report, *given)
        result.stdout.fnmatch_lines(
            [
                f"{to_specs}/vit.yaml:2: ExportError",
                f"*report: {to_specs}/report.json",
                f"updated: {to_specs}/__shapes__/vit.yaml",
                f"obsolete (--prune-shapes deletes them): {to_specs}/__shapes__/gone.yaml",
            ]
        )
        (case,) = (each for each in project.report("specs/report.json") if each["exporter"])
        test = "vit.yaml::test_export[cpu-float32-torch-export-none]"
        assert shlex.split(case["reproduce"])[1:] == [
            "--exportcheck",
            f"--rootdir={to_specs}",
            "-c",
            os.devnull,
            f"{to_specs}/{test}",
        ]
        assert case["nodeid"] == test, "the record does not depend on where it was made"
        project.run(*shlex.split(case["reproduce"])[2:], "--no-confirm").assert_outcomes(failed=1)
        project.golden_path("vit").unlink()
        project.run(report, *given)
        (shapes,) = (each for each in project.report("specs/report.json") if not each["exporter"])
        project.run(*shlex.split(shapes["accept"])[2:], "--no-confirm")
        assert project.golden_path("vit").exists()


def test_specs_outside_of_the_root_directory(any_project, monkeypatch):
    root = any_project.pytester.path
    conftest = (root / "conftest.py").read_text()
    for folder, do in (("a", {"torch-export": "compare"}), ("b", {})):
        spec = any_project.spec("vit", kwargs={"do": do})
        for path in (spec, any_project.golden_path("vit")):
            moved = root / "out" / folder / path.relative_to(root / "specs")
            moved.parent.mkdir(parents=True, exist_ok=True)
            moved.write_text(path.read_text().replace("specs/__shapes__", f"../out/{folder}/__shapes__"))
    (root / "out" / "conftest.py").write_text(conftest)
    (root / "work").mkdir()
    (root / "tox.ini").rename(root / "work" / "tox.ini")
    monkeypatch.chdir(root / "work")
    specs = ("../out/a/vit.yaml", "../out/b")
    given = ("-c", "tox.ini", "--exportcheck-report=report.json", *specs)
    result = any_project.run(*given)
    verdicts = {case["nodeid"]: case["verdict"] for case in any_project.report("work/report.json")}
    assert verdicts == {
        "../out/a/vit.yaml::test_dynamic_shapes[cpu-float32]": "pass",
        "../out/a/vit.yaml::test_export[cpu-float32-torch-export-none]": "fail compare",
        "../out/b/vit.yaml::test_dynamic_shapes[cpu-float32]": "pass",
        "../out/b/vit.yaml::test_export[cpu-float32-torch-export-none]": "pass",
    }
    result.stdout.fnmatch_lines(["2 cases: 1 pass, 1 FAIL   shapes: 2 ok *"])
    line = next(line for line in result.outlines if "reproduce:" in line)
    args = shlex.split(line.partition("pytest --exportcheck ")[2])
    assert args == [
        "--rootdir=.",
        "-c",
        "tox.ini",
        "../out/a/vit.yaml::test_export[cpu-float32-torch-export-none]",
    ]
    again = any_project.run(*args)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["FAILED ../out/a/vit.yaml::test_export*"])
    assert line in again.outlines
    any_project.run("-c", "tox.ini", "--lf", *specs).assert_outcomes(failed=1)


def test_obsolete_goldens_beside_the_root_directory_count_once(project, monkeypatch):
    root = project.pytester.path
    project.spec("a")
    project.golden("gone", "inputs: {}\n")
    (root / "work").mkdir()
    (root / "tox.ini").rename(root / "work" / "tox.ini")
    (root / "conftest.py").rename(root / "specs" / "conftest.py")
    monkeypatch.chdir(root / "work")
    result = project.run("-c", "tox.ini", "../specs")
    result.stdout.fnmatch_lines(["* 1 obsolete*", "obsolete (--prune-*): ../specs/__shapes__/gone.yaml"])


def test_foreign_code_can_neither_stop_the_run_nor_hide_its_failure(any_project):
    do = {"torch-export": "sys.exit", "onnx-dynamo": "skip", "onnx-torchscript": "bug"}
    any_project.spec("a", kwargs={"do": do}, exporters=tuple(do))
    any_project.spec("b")
    result = any_project.run("--exportcheck-report=report.json")
    result.stdout.fnmatch_lines_random(
        [
            "E   stage export: sys.exit(3) was called",
            "E   stage export: Skipped was raised: the exporter skips",
            "E * KeyError: 'a bug'",
        ]
    )
    result.assert_outcomes(passed=3, failed=3)
    assert [case["verdict"] for case in any_project.report() if case["spec"] == "specs/a.yaml"] == [
        "pass",
        "fail export",
        "fail export",
        "fail export",
    ]


def test_a_model_that_does_not_load_fails_everywhere_and_loads_once(project, monkeypatch):
    log = project.pytester.path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    project.spec("a", kwargs={"load": "load"}, exporters=("torch-export", "onnx-dynamo"))
    result = project.run()
    result.stdout.fnmatch_lines(["a     FAIL load  FAIL load    FAIL load"])
    result.assert_outcomes(failed=3)
    assert log.read_text().count("observe") == 1


@pytest.mark.parametrize(
    ("action", "verdict", "line"),
    [
        ("export", "xfail export", "XFAIL * - see issue 1"),
        ("compare", "fail compare", "E   moved from export to compare: change line 9 of specs/a.yaml"),
        ("observe", "fail observe", "E   moved from export to observe: change line 9 of specs/a.yaml"),
        (None, "xpass", "E   [[]XPASS(strict)[]] stage export * remove line 9 of specs/a.yaml"),
    ],
)
def test_the_truth_table_of_expectations(any_project, action, verdict, line):
    any_project.spec("a", kwargs={"do": {"torch-export": action}}, more=expect("export"))
    result = any_project.run("-rxX", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines([line])
    assert [case["verdict"] for case in any_project.report()] == ["pass", verdict]
    assert result.ret == (0 if verdict.startswith("xfail") else 1)


def test_runxfail_shows_the_failure(project):
    project.spec("a", kwargs={"do": {"torch-export": "export"}}, more=expect("export"))
    result = project.run("--runxfail")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.no_fnmatch_line("*moved*")


def test_an_expected_load_failure_covers_the_shapes_check(project):
    project.spec("a", kwargs={"load": "observe"}, more=expect("observe"))
    project.run().assert_outcomes(xfailed=2)


def test_an_expected_shapes_failure_is_about_the_shapes_check_only(project):
    project.spec("a", more=expect("shapes"), accepted=False)
    project.run().assert_outcomes(passed=1, xfailed=1)


def test_expectations_by_axis_and_version(project):
    do = {"torch-export/hf": "export", "onnx-dynamo": "compare"}
    more = """expect:
  - when: {torch: "<1", exporter: onnx-dynamo}
    fails: run
    reason: not with this torch
  - when: {exporter: [onnx-dynamo, torch-export-strict], python: ">=3"}
    fails: compare
    reason: a
  - when: {exporter: torch-export, patch_mode: hf}
    fails: export
    reason: b
"""
    exporters = ("torch-export", "onnx-dynamo")
    project.spec("a", kwargs={"do": do}, exporters=exporters, matrix=", patch_modes: [none, hf]", more=more)
    project.run().assert_outcomes(passed=2, xfailed=3)


def test_expectations_that_cannot_apply_are_problems_of_the_spec(project):
    more = """expect:
  - when: {exporter: onnx-dynamo}
    fails: export
    reason: no such case
  - fails: export
    reason: all
  - when: {exporter: torch-export}
    fails: run
    reason: shadowed
"""
    project.spec("a", more=more)
    result = project.run()
    result.stdout.fnmatch_lines(
        [
            "specs/a.yaml:9:5: when {exporter: onnx-dynamo} matches no case of this spec "
            "(exporter: torch-export; *",
            "specs/a.yaml:14:5: when {exporter: torch-export} never applies: earlier items match all *",
        ]
    )
    result.assert_outcomes(errors=1)


def test_an_absent_device_is_a_visible_skip_or_an_error(project):
    project.fake(NO_GPU)
    project.spec("a", matrix=", devices: [cpu, cuda]")
    result = project.run("-rs", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [
            "a     pass    pass          skip    skip",
            "2 cases: 1 pass, 1 skip (no cuda) *",
            "SKIPPED [[]2[]] specs/a.yaml:2: no CUDA device on this machine; --require-device cuda makes *",
        ]
    )
    result.assert_outcomes(passed=2, skipped=2)
    assert [case["verdict"] for case in project.report()] == ["pass", "pass", "skip", "skip"]
    result = project.run("--require-device=cuda", "specs")
    result.stdout.fnmatch_lines(["*no CUDA device on this machine, and --require-device cuda was given*"])
    result.assert_outcomes(passed=2, errors=2)
    assert result.ret == 1


def test_a_missing_requirement_is_a_visible_skip(project):
    project.spec("a", more="requires: [gt-no-such-package]\n")
    result = project.run("-rs")
    result.stdout.fnmatch_lines(
        ["SKIPPED *specs/a.yaml:2: requires gt-no-such-package: pip install gt-no-such-package"]
    )
    result.assert_outcomes(skipped=2)


def test_a_demand_of_the_test_is_no_failure_of_a_stage(any_project):
    project = any_project
    project.spec("a")
    project.pytester.makepyfile(
        """
        import pytest
        from pytest_exportcheck import assert_export

        @pytest.mark.exportcheck("specs/a.yaml")
        def test_budget(export_case):
            assert_export(export_case)
            assert export_case.case.exporter == "another"
        """
    )
    result = project.run(
        "test_a_demand_of_the_test_is_no_failure_of_a_stage.py", "--exportcheck-report=r.json"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["a *FAIL test*"])
    (case,) = project.report("r.json")
    assert (case["verdict"], case["stage"]) == ("fail test", "test")


def test_workers_share_the_gpus(project, monkeypatch):
    # The controller imports no torch to ask.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    project.fake(TWO_GPUS)
    for name in ("a", "b", "c", "d", "e", "f"):
        project.spec(name, matrix=", devices: [cuda]")
    project.run("-n3").assert_outcomes(passed=12)
    assert (project.pytester.path / "gpu0").exists()
    assert (project.pytester.path / "gpu1").exists()


@pytest.mark.parametrize("workers", [(), ("-n2",), ("-n2", "--dist=load")])
def test_what_is_wrong_with_a_spec_is_shown_in_full_once(project, workers):
    """No exporter has to do with it; records and reports have all of it in each case."""
    if workers:
        pytest.importorskip("xdist")
    project.spec("a", exporters=("torch-export", "onnx-dynamo"), kwargs={"load": "observe"})
    project.spec("b", exporters=("torch-export",), kwargs={"load": "observe"})
    project.spec("c", exporters=("torch-export", "onnx-dynamo"), kwargs={"do": {
        "torch-export": "compare", "onnx-dynamo": "compare"}})  # fmt: skip
    result = project.run("--exportcheck-report=report.json", *workers)
    shown = result.stdout.str()
    # Once for each of two specs, and for each case of the third, whose exporters failed one by one.
    assert shown.count("E     first detail") == 2 + 2
    assert shown.count("E     as above: specs/a.yaml::") == 2
    assert shown.count("E     as above: specs/b.yaml::") == 1
    # What it says is above, and is there.
    for name in ("a", "b"):
        told = next(line for line in result.outlines if f"as above: specs/{name}.yaml" in line)
        first = told.partition("as above: ")[2].partition("::")[2]
        # Tests of two specs have one name.
        place = re.search(rf"_ {re.escape(first)} _+\n(?:\[gw.*\n)?specs/{name}\.yaml", shown)
        assert place is not None
        assert place.start() < shown.index(told)
        block = shown[place.start() :]
        assert block.index("first detail") < block.index("as above")
    assert shown.count("E   stage observe: observe went wrong") == 3 + 2
    assert shown.count("reproduce:") == 7
    failed = [case for case in project.report() if case["verdict"] == "fail observe"]
    assert len(failed) == 5
    assert all(case["details"] == ["first detail", "second detail"] for case in failed)
    for case in project.report():
        if case["verdict"].startswith("fail"):
            assert f"E   reproduce:  {case['reproduce']}" in result.outlines


def test_on_demand_it_is_shown_in_full_each_time(project):
    project.spec("a", exporters=("torch-export", "onnx-dynamo"), kwargs={"load": "observe"})
    shown = project.run("-vv").stdout.str()
    assert shown.count("E     first detail") == 3
    assert "as above" not in shown
