"""What is left of a run: records that the published schema describes, Markdown, HTML, JUnit, a baseline."""

from __future__ import annotations

import fnmatch
import json
import os
import pty
import select
import subprocess
import time
from collections import Counter
from xml.etree import ElementTree

import jsonschema
import pytest

# Kept in this process, as in conftest.py: numpy below matplotlib loads once.
import pytest_exportcheck.reports.html.page  # noqa: F401
from pytest_exportcheck.reports.compare import compare
from pytest_exportcheck.reports.read import read_report
from pytest_exportcheck.reports.schema import Record, schema

from .conftest import Project
from .test_outcomes import expect


def validated(project: Project, path: str = "report.json") -> dict:
    """A report that the schema describes, and in which no key is left undocumented."""
    data = json.loads((project.pytester.path / path).read_text())
    jsonschema.Draft202012Validator(schema()).validate(data)
    for case in data["cases"]:
        assert case.keys() <= Record.model_fields.keys()
    return data


# Records.


def test_records_of_every_verdict_are_what_the_schema_says(any_project):
    do = {"torch-export": "compare", "onnx-dynamo": None, "onnx-torchscript": "export"}
    more = "expect:\n  - when: {exporter: onnx-torchscript}\n    fails: export\n    reason: a bug of theirs\n"
    any_project.spec("a", kwargs={"do": do}, exporters=tuple(do), more=more)
    any_project.spec("b", more=expect("export"))
    any_project.spec("c", more="requires: [gt-no-such-package]\n")
    any_project.spec("d", accepted=False)
    any_project.spec("e", kwargs={"load": "load"})
    any_project.run("--exportcheck-report=report.json")
    data = validated(any_project)
    verdicts = [case["verdict"] for case in data["cases"]]
    assert verdicts == [
        *("pass", "pass", "xfail export", "fail compare"),
        *("pass", "xpass"),
        *("skip", "skip"),
        *("fail shapes", "pass"),
        *("fail load", "fail load"),
    ]
    failed, expected = data["cases"][3], data["cases"][2]
    assert failed["details"] == ["first detail", "second detail"]
    assert failed["reproduce"] == 'pytest --exportcheck "' + failed["nodeid"] + '"'
    assert expected["expected"]["reason"] == "a bug of theirs"
    environment = data["environment"]
    assert environment["seeds"] == [0]
    assert environment["exit_status"] == 1
    assert environment["left_out"] is None
    assert environment["options"]["confirm"] is False


def test_records_of_crashes_and_hangs_are_what_the_schema_says(project):
    do = {"torch-export": "segfault", "onnx-dynamo": "hang", "onnx-torchscript": "run"}
    project.spec("a", kwargs={"do": do}, exporters=tuple(do))
    project.run("--stage-timeout=2", "--exportcheck-report=report.json")
    verdicts = [case["verdict"] for case in validated(project)["cases"]]
    assert verdicts == ["pass", "timeout export", "fail run", "crash export"]


def test_records_of_dead_workers_and_of_failures_that_depend_on_history(project):
    pytest.importorskip("xdist")
    project.spec("a", kwargs={"do": {"onnx-dynamo": "os._exit"}}, exporters=("onnx-dynamo", "torch-export"))
    project.spec("b", kwargs={"do": {"torch-export": "first export compare"}})
    project.ini()
    project.run("-n1", "--exportcheck-report=report.json")
    data = validated(project)
    assert [case["verdict"] for case in data["cases"]] == [
        *("pass", "crash export", "pass"),
        *("pass", "fail export"),
    ]
    assert data["cases"][-1]["confirmed"] is True


SIGTERM = """
import os, signal
def pytest_runtest_setup(item):
    if "specs/b" in item.nodeid:
        os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGTERM)
        signal.pause()
"""


@pytest.mark.parametrize("how", ["sigterm", "ctrl-c"])
def test_an_interrupted_run_reports_what_it_knows(any_project, how):
    hook = SIGTERM
    if how == "ctrl-c":
        hook = hook.replace("SIGTERM", "SIGINT")
    any_project.in_process = False
    any_project.fake(hook)
    any_project.spec("a")
    any_project.spec("b")
    args = ("-n1",) if any_project.args == ("-n2",) else ()
    html = "--exportcheck-html=page.html"
    result = any_project.run(*args, "--exportcheck-report=report.json", "--exportcheck-markdown=m.md", html)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    data = validated(any_project)
    assert [(case["spec"], case["verdict"]) for case in data["cases"]] == [("specs/a.yaml", "pass")] * 2
    assert data["environment"]["left_out"] == "interrupted"
    assert "| a | pass | pass |" in (any_project.pytester.path / "m.md").read_text()
    assert "Not a full run: interrupted" in (any_project.pytester.path / "page.html").read_text()
    assert not list(any_project.pytester.path.glob("*.new"))
    files = "report: report.json   markdown: m.md   html: page.html"
    line = f"interrupted: 1 of 2 cases ended   1 case: 1 pass   shapes: 1 ok   {files}"
    result.stdout.fnmatch_lines([line])


@pytest.mark.parametrize("when", ["run", "collection"])
def test_a_run_that_is_interrupted_before_its_first_case_ends_names_its_files(project, when):
    """The files are written, so the terminal says where."""
    names = {"run": "runtest_setup(item)", "collection": "itemcollected(item)"}
    project.fake(f"\ndef pytest_{names[when]}: raise KeyboardInterrupt\n")
    project.in_process = False
    project.spec("a", exporters=("torch-export", "onnx-dynamo"))
    result = project.run("--exportcheck-report=report.json", "--exportcheck-html=page.html")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert validated(project)["cases"] == []
    far = {"run": "interrupted: 0 of 2 cases ended", "collection": "interrupted"}[when]
    result.stdout.fnmatch_lines([f"{far}   report: report.json   html: page.html"])


def test_a_report_without_a_case_is_named(project):
    project.spec("a")
    result = project.run("-k", "nothing", "--exportcheck-report=report.json")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["no case ran   report: report.json"])


def test_a_run_that_stops_at_the_first_failure_says_so(project):
    project.spec("a", kwargs={"load": "load"})
    project.spec("b")
    project.run("-x", "--exportcheck-report=report.json")
    data = validated(project)
    assert len(data["cases"]) == 1
    assert data["environment"]["left_out"] == "-x/--maxfail"


@pytest.mark.parametrize(
    ("selected", "why", "in_terminal"),
    [
        (
            ("specs/a.yaml::test_export[cpu-float32-torch-export-none]",),
            "a node id on the command line",
            True,
        ),
        (("-kexport",), "-k", True),
        (("specs/a.yaml",), "a file is named, and not its folder", False),
        (("specs",), "", False),
    ],
    ids=["node id", "-k", "file", "folder"],
)
def test_a_run_that_is_not_a_full_one_says_so(project, selected, why, in_terminal, capsys):
    project.spec("a")
    result = project.run(*selected, "--exportcheck-report=report.json", "--exportcheck-markdown=m.md")
    assert result.ret == 0
    text = (project.pytester.path / "m.md").read_text()
    told = [line for line in text.splitlines() if line.startswith("Not a full run")]
    assert told == ([f"Not a full run: {why}. Cases may be missing."] if why else [])
    shown = [line for line in result.stdout.lines if line.startswith("not a full run")]
    assert shown == ([f"not a full run: {why}"] if in_terminal else [])
    # Of the report alone it is the same page.
    capsys.readouterr()
    from pytest_exportcheck.cli import main

    assert main(["markdown", str(project.pytester.path / "report.json")]) == 0
    assert capsys.readouterr().out == text


# Other forms.


def test_junit_carries_the_verdict(any_project):
    do = {"torch-export": "compare", "onnx-dynamo": None}
    any_project.spec("a", kwargs={"do": do}, exporters=tuple(do))
    any_project.spec("b", kwargs={"do": {"torch-export": "export"}}, more=expect("export"))
    any_project.run("--junitxml=junit.xml")
    root = ElementTree.parse(any_project.pytester.path / "junit.xml").getroot()
    found = {
        case.get("classname") + "." + case.get("name"): [
            entry.get("value")
            for entry in case.iter("property")
            if entry.get("name") == "exportcheck_verdict"
        ]
        for case in root.iter("testcase")
    }
    assert sorted(verdict for (verdict,) in found.values()) == [
        "fail compare",
        "pass",
        "pass",
        "pass",
        "xfail export",
    ]


def test_markdown_and_html_by_option_and_by_ini(project):
    project.spec("a", kwargs={"do": {"torch-export": "compare"}})
    result = project.run("--exportcheck-markdown=out/m.md", "--exportcheck-html=out/page.html")
    result.stdout.fnmatch_lines(["1 case: 1 FAIL * markdown: out/m.md   html: out/page.html"])
    text = (project.pytester.path / "out" / "m.md").read_text()
    assert "      compare went wrong\n        first detail\n        second detail\n" in text
    assert '      reproduce: pytest --exportcheck "specs/a.yaml::test_export[' in text
    page = (project.pytester.path / "out" / "page.html").read_text()
    assert "compare went wrong" in page
    project.ini("exportcheck_confirm = false", "exportcheck_markdown = n.md", "exportcheck_html = p.html")
    project.run()
    assert (project.pytester.path / "n.md").exists()
    assert (project.pytester.path / "p.html").exists()


def test_html_without_its_packages_is_refused_before_the_run(project, monkeypatch):
    monkeypatch.setattr("pytest_exportcheck.reports.html.find_spec", lambda name: None)
    project.spec("a")
    result = project.run("--exportcheck-html=page.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: --exportcheck-html: jinja2 and matplotlib not installed: "
            "pip install 'pytest-exportcheck?html?'"
        ]
    )


def test_the_step_summary_can_be_turned_off(project, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.pytester.path / "summary.md"))
    project.ini("exportcheck_step_summary = false")
    project.spec("a")
    project.run()
    assert not (project.pytester.path / "summary.md").exists()


def test_the_step_summary_stays_below_what_github_takes(project, monkeypatch):
    summary = project.pytester.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    summary.write_text("x" * (1024 * 1024 - 500) + "\n")
    do = {"torch-export": "compare", "onnx-dynamo": "compare"}
    project.spec("a", kwargs={"do": do}, exporters=tuple(do))
    project.run()
    assert summary.stat().st_size <= 1024 * 1024
    text = summary.read_text()
    assert text.count("reproduce:") == 1
    assert text.endswith("and 1 more, too many for this page: the JSON report has them\n")


# A baseline.


def test_a_baseline(any_project):
    any_project.spec("a", exporters=("torch-export", "onnx-dynamo"))
    any_project.run("--exportcheck-report=base.json")
    result = any_project.run("--baseline=base.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*- compared with the baseline -*", "*0 worse, 0 better, 0 neither, 3 cases un*"]
    )
    any_project.spec("a", kwargs={"do": {"onnx-dynamo": "run"}}, exporters=("torch-export", "onnx-dynamo"))
    result = any_project.run("--baseline=base.json")
    result.stdout.fnmatch_lines(
        [
            "Got worse (1):",
            "  specs/a.yaml [[]cpu-float32-onnx-dynamo-none[]]",
            "    pass -> fail run: run went*",
        ]
    )


def fnmatch_last(result, pattern):
    assert fnmatch.fnmatch(result.outlines[-1], pattern), result.outlines[-1]


def test_worse_than_the_baseline_fails_a_run_that_would_pass(project):
    project.spec("a", exporters=("torch-export", "onnx-dynamo"))
    project.run("--exportcheck-report=base.json")
    more = "expect:\n  - when: {exporter: onnx-dynamo}\n    fails: run\n    reason: r\n"
    do = {"onnx-dynamo": "run"}
    project.spec("a", kwargs={"do": do}, exporters=("torch-export", "onnx-dynamo"), more=more)
    result = project.run("--baseline=base.json")
    result.assert_outcomes(passed=2, xfailed=1)
    assert result.ret == 1
    last = "exportcheck: no test failed; the run fails as --baseline *base.json demands: 1 case got worse"
    fnmatch_last(result, last)
    for quiet in ("-qq", "--no-summary"):
        result = project.run("--baseline=base.json", quiet)
        assert result.ret == 1
        result.stdout.fnmatch_lines(["exportcheck: 1 worse than *base.json"])
        fnmatch_last(result, last)
    # Red by a test, or not red: nothing to explain.
    project.spec("a", kwargs={"do": do}, exporters=("torch-export", "onnx-dynamo"))
    for options in (["--baseline=base.json"], []):
        project.run(*options).stdout.no_fnmatch_line("*no test failed*")


def test_what_a_full_run_does_not_check_any_more_is_worse_and_of_a_partial_run_nobody_knows(project):
    project.spec("a")
    project.spec("b")
    project.run("--exportcheck-report=base.json")
    result = project.run("--baseline=base.json", "-k", "a.yaml or float32-torch")
    assert result.ret == 0
    result = project.run("--baseline=base.json", "-k", "a.yaml")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["Not run in this run, neither better nor worse: deselected by -k a.yaml (2):", "*2 not run *"]
    )
    (project.pytester.path / "specs" / "b.yaml").unlink()
    for options in ((), ("-x",), ("-k", "a.yaml")):
        result = project.run("--baseline=base.json", *options)
        assert result.ret == 1
        result.stdout.fnmatch_lines(
            ["Got worse (2):", "*2 cases: pass -> not in this run: nobody checks*", "*b.yaml*"]
        )


def test_what_a_run_was_told_to_leave_out_is_in_its_report_and_is_not_worse(any_project):
    exporters = ("torch-export", "onnx-dynamo")
    for name in ("a", "b"):
        any_project.spec(name, exporters=exporters)
    root = any_project.pytester.path

    def run(name, *options):
        any_project.run(f"--exportcheck-report={name}.json", *options)
        environment = json.loads((root / f"{name}.json").read_text())["environment"]
        return environment["selection"]

    def compared(name, expected):
        found = compare(read_report(root / "before.json"), read_report(root / f"{name}.json"))
        assert (found.worse, len(found.only_before)) == (False, sum(expected.values()))
        assert Counter(found.not_run.values()) == expected

    everything = {"paths": ["specs"], "options": [], "deselected": [], "unfinished": None}
    assert run("before") == everything
    onnx = run("onnx", "--exporter=onnx-dynamo")
    assert onnx == {
        **everything,
        "options": ["--exporter onnx-dynamo"],
        "deselected": [
            {
                "spec": f"specs/{name}.yaml",
                "exporter": "torch-export",
                "patch_mode": "none",
                "device": "cpu",
                "dtype": "float32",
                "graph": None,
            }
            for name in ("a", "b")
        ],
    }
    compared("onnx", {"deselected by --exporter onnx-dynamo": 2})
    (root / "specs" / "b.yaml").unlink()
    run("onnx", "--exporter=onnx-dynamo")
    found = compare(read_report(root / "before.json"), read_report(root / "onnx.json"))
    assert [change.case for change in found.of("worse")] == [
        "specs/b.yaml [cpu-float32-onnx-dynamo-none]",
        "specs/b.yaml [cpu-float32-shapes]",
        "specs/b.yaml [cpu-float32-torch-export-none]",
    ]


def test_a_baseline_of_another_root_directory_compares_nothing_and_says_so(project):
    project.spec("a")
    project.run("--exportcheck-report=base.json")
    (project.pytester.path / "specs" / "pytest.ini").write_text("[pytest]\nexportcheck_confirm = false\n")
    more = ("--rootdir=specs", "-c", "specs/pytest.ini")
    result = project.run("--baseline=base.json", *more, "-k", "export", "specs/a.yaml")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*base.json has specs/a.yaml *, this run has a.yaml *no case in common*see --rootdir "
            "(paths behind a space move it: write --exportcheck-report=PATH)"
        ]
    )


@pytest.mark.parametrize("quiet", [(), ("-qq",)])
def test_a_baseline_that_has_none_of_the_cases_that_ran_is_an_error(project, quiet):
    """That nothing got worse would be true of any two reports."""
    project.spec("a")
    project.run("--exportcheck-report=base.json")
    project.spec("b")
    result = project.run("--baseline=base.json", "-k", "b.yaml", *quiet)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["exportcheck: ERROR --baseline *base.json has no case in common with this run: nothing was compared"]
    )
    if not quiet:
        result.stdout.fnmatch_lines(["No case in common: nothing was compared", "Not run in this run, *"])
    result.stdout.no_fnmatch_line("*Nothing got worse*")


def test_a_run_that_checks_nothing_is_worse_than_the_baseline(project):
    project.spec("a")
    project.run("--exportcheck-report=base.json")
    project.pytester.makepyfile("def test_it(): pass")
    result = project.run("--baseline=base.json", ".", flag=False)
    result.stdout.fnmatch_lines(["Got worse (2):"])
    assert result.ret == 1


def test_a_baseline_that_cannot_be_read_ends_the_run_before_it_starts(project):
    project.spec("a")
    result = project.run("--baseline=gone.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --baseline: *gone.json: No such file or directory"])


# The terminal.


SLOW = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if hasattr(report, "exportcheck"):
        seconds = report.nodeid.count("t") * (0.5 if "d.yaml" in report.nodeid else 1.0)
        report.exportcheck["durations"] = {"load": {"wall_s": 0.1, "cpu_s": 0}, "export": {"wall_s": seconds}}
"""


def test_the_three_slowest_are_named(project):
    project.spec("a")
    project.run().stdout.no_fnmatch_line("slowest:*")
    project.fake(
        SLOW.replace('report.nodeid.count("t")', '{"a": 2, "b": 30, "c": 7, "d": 90}[report.nodeid[6]]')
    )
    for name in ("b", "c", "d"):
        project.spec(name)
    result = project.run("-k", "test_export")
    result.stdout.fnmatch_lines(
        [
            "slowest:   45.1 s  specs/d.yaml [[]cpu-float32-torch-export-none[]] (export 45.0 s)",
            "           30.1 s  specs/b.yaml [[]cpu-float32-torch-export-none[]] (export 30.0 s)",
            "            7.1 s  specs/c.yaml [[]cpu-float32-torch-export-none[]] (export 7.0 s)",
        ],
        consecutive=True,
    )
    project.run("-q").stdout.no_fnmatch_line("slowest:*")


PROGRESS = """
import pytest_exportcheck.progress
pytest_exportcheck.progress.AFTER_S = 0.05
pytest_exportcheck.progress.EVERY_S = 0.02
"""


def on_a_terminal(project: Project, *args: str) -> str:
    """What pytest writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    assert project.interpreter is not None
    command = [project.interpreter.executable, "-m", "pytest", "--exportcheck", *project.args, *args, "specs"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=project.pytester.path, env=environment
    )
    os.close(theirs)
    written, until = b"", time.monotonic() + 120
    while time.monotonic() < until:
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            block = os.read(ours, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not block:
            break
        written += block
    os.close(ours)
    process.wait(timeout=60)
    return written.decode("utf-8", "replace")


def test_a_long_stage_is_shown_on_a_terminal(any_project):
    any_project.fake(PROGRESS)
    any_project.spec("a", kwargs={"do": {"torch-export": "sleep"}})
    text = on_a_terminal(any_project)
    shown = "\x1b7 export 0 s specs/a.yaml[cpu-float32-torch-export-none]\x1b[K\x1b8"
    assert shown in text
    # It is gone before pytest goes on.
    assert "\x1b[K" in text[text.rindex(shown) + len(shown) :]
    assert " 2 passed" in text


@pytest.mark.parametrize("option", ["-q", "-s"])
def test_progress_is_not_shown_where_it_disturbs(project, option):
    project.fake(PROGRESS)
    project.spec("a", kwargs={"do": {"torch-export": "sleep"}})
    assert "\x1b7" not in on_a_terminal(project, option)


def test_progress_is_not_shown_off_a_terminal(project):
    project.fake(PROGRESS)
    project.spec("a", kwargs={"do": {"torch-export": "sleep"}})
    project.in_process = False
    result = project.run("--color=yes")
    assert "\x1b7" not in result.stdout.str()
