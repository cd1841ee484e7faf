"""`--diagnose`: what is added to a failure, and that it changes no verdict, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from .conftest import Project

#: A diagnosis that does what `how` says, in the fresh process.
FAKE = """
import os, types
def diagnose_case(run, case, error, budget_s, *, begin, fresh, **more):
    begin("first step")
    {how}
    lines = ["guilty: " + error.message, f"budget {{budget_s:g}}"]
    record = {{"verdict": lines[0], "causes": [], "stage": error.stage}}
    return types.SimpleNamespace(to_record=lambda: record, lines=lambda: lines)
diagnosis = types.ModuleType("pytest_exportcheck.diagnose.diagnosis")
diagnosis.diagnose_case = diagnose_case
sys.modules["pytest_exportcheck.diagnose.diagnosis"] = diagnosis
"""


def _failing(made: Project, how: str = "pass") -> Project:
    """One case fails, one is expected to fail, two pass."""
    made.fake(FAKE.format(how=how))
    made.spec(
        "net",
        kwargs={"do": {"torch-export": "compare", "onnx-dynamo": "export"}},
        exporters=("torch-export", "onnx-dynamo", "torch-export-strict"),
        more="expect: [{when: {exporter: onnx-dynamo}, fails: export, reason: known}]\n",
    )
    return made


def diagnoses(project: Project) -> dict[str, str]:
    return {
        case["exporter"]: case["diagnosis"]["verdict"]
        for case in project.report()
        if "diagnosis" in case and case["exporter"]
    }


VERDICTS = {
    "cpu-float32": "pass",
    "cpu-float32-torch-export-none": "fail compare",
    "cpu-float32-onnx-dynamo-none": "xfail export",
    "cpu-float32-torch-export-strict-none": "pass",
}


def test_a_failure_is_explained(any_project):
    project = _failing(any_project)
    result = project.run("--diagnose", "--diagnose-budget=7", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [
            "E   stage compare: *",
            "*- diagnosis -*",
            "guilty: *",
            "budget 7",
            "cpu-float32-torch-export-none of specs/net.yaml: guilty: *",
        ]
    )
    assert project.verdicts() == VERDICTS
    assert set(diagnoses(project)) == {"torch-export"}


@pytest.mark.parametrize("isolate", [(), ("--isolate",)])
def test_expected_failures_if_asked(project, isolate):
    _failing(project)
    project.run(
        "--diagnose-all", "--exportcheck-report=report.json", "--exportcheck-artifacts=kept", *isolate
    )
    assert project.verdicts() == VERDICTS
    assert set(diagnoses(project)) == {"torch-export", "onnx-dynamo"}
    folder = project.pytester.path / "kept/specs/net/cpu-float32-onnx-dynamo-none"
    assert "guilty: " in (folder / "failure.txt").read_text()


HINT = "--diagnose names the line that asked for this guard"


def test_it_is_proposed_only_where_it_was_not_asked_for(any_project):
    any_project.fake(
        FAKE.format(how="pass")
        .replace('"causes": []', '"causes": [cause.to_record()]')
        .replace(
            "lines = [",
            "from pytest_exportcheck.diagnose.causes import known_causes, Evidence\n"
            '    (cause,) = known_causes(Evidence("dynamic axes became constant"))\n'
            "    lines = [*cause.lines(), ",
        )
    )
    any_project.spec(
        "net", kwargs={"do": {"torch-export": "export"}, "says": ["3 dynamic axes became constant", HINT]}
    )
    result = any_project.run("--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [f"E     {HINT}", "E     remedy: look for int()*(--diagnose names the line)*"]
    )
    assert HINT in str(any_project.report())
    result = any_project.run("--diagnose", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(["*- diagnosis -*", "  remedy: look for int()*", "guilty: *"])
    result.stdout.no_fnmatch_line("*--diagnose names*")
    assert "--diagnose names" not in str(any_project.report())


def test_it_is_not_proposed_where_the_failure_names_the_line(project):
    place = "axis 1 of x (seq) became a constant: x.shape[1] == 9 (net.py:15: scale = 1.0 / float(n))"
    said = ["3 dynamic axes became constant", place]
    project.spec("net", kwargs={"do": {"torch-export": "export"}, "says": said})
    result = project.run("--exportcheck-report=report.json")
    result.stdout.fnmatch_lines([f"E     {place}".replace("[", "[[]"), "E     remedy: look for int()*"])
    assert "--diagnose names" not in str(project.report())


def test_nothing_is_explained_unasked(project):
    _failing(project)
    result = project.run("--exportcheck-report=report.json")
    result.stdout.no_fnmatch_line("*guilty*")
    assert diagnoses(project) == {}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise KeyError('x')", "not diagnosed: an error of the diagnosis at 'first step': KeyError: 'x'"),
        (
            "os.abort()",
            "not diagnosed: its own process did not survive the step 'first step': killed by SIGABRT*",
        ),
        ("raise SystemExit(3)", "not diagnosed: an error of the diagnosis at 'first step': sys.exit(3) *"),
    ],
)
def test_a_diagnosis_that_fails_changes_nothing(project, how, said):
    _failing(project, how)
    result = project.run("--diagnose", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(["*- diagnosis -*", said])
    assert project.verdicts() == VERDICTS
    assert list(diagnoses(project)) == ["torch-export"]


def test_a_diagnosis_that_hangs_is_ended(project):
    _failing(project, "import time; time.sleep(60)")
    result = project.run("--diagnose", "--stage-timeout=10", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(["not diagnosed: its own process did not survive*had not ended after 10 s*"])
    assert project.verdicts() == VERDICTS


def test_no_section_in_one_line_mode(project):
    result = _failing(project).run("--diagnose", "--tb=line")
    result.stdout.no_fnmatch_line("*- diagnosis -*")
    result.stdout.fnmatch_lines(["*of specs/net.yaml: guilty: *"])


def test_ini_and_bad_values(project):
    _failing(project)
    ini = project.pytester.path / "tox.ini"
    before = ini.read_text() + "\n"
    ini.write_text(before + "exportcheck_diagnose = all\nexportcheck_diagnose_budget = 3\n")
    project.run("--exportcheck-report=report.json")
    assert set(diagnoses(project)) == {"torch-export", "onnx-dynamo"}
    ini.write_text(before + "exportcheck_diagnose = some\n")
    project.run().stderr.fnmatch_lines(["*exportcheck_diagnose: 'some' is none of off, failed, all"])
    ini.write_text(before)
    project.run("--diagnose-budget=-1").stderr.fnmatch_lines(["*--diagnose-budget -1.0: expected seconds"])


def command(project: Project, *args: str) -> pytest.RunResult:
    assert project.interpreter is not None
    python = project.interpreter.executable
    return project.pytester.run(python, "-m", "pytest_exportcheck.cli", "diagnose", *args)


def test_the_command(project):
    _failing(project)
    result = command(project, "specs/net.yaml", "--budget=9", "-o", "kept")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "cpu-float32-torch-export-none: fail compare",
            "E   stage compare: *",
            "guilty: *",
            "budget 9",
            "cpu-float32-onnx-dynamo-none: xfail export",
            "guilty: *",
            "cpu-float32-torch-export-strict-none: pass",
        ]
    )
    result.stderr.fnmatch_lines(["3 cases, 2 failed, see kept"])
    folder = project.pytester.path / "kept/specs/net/cpu-float32-torch-export-none"
    assert {file.name for file in folder.iterdir()} == {"failure.txt", "record.json"}
    # An expected failure is no bad news.
    label = "cpu-float32-onnx-dynamo-none"
    for case in (label, f"specs/net.yaml::test_export[{label}]"):
        result = command(project, "specs/net.yaml", "--case", case)
        assert result.ret == 0
        result.stderr.fnmatch_lines(["1 case, 1 failed"])


def test_the_command_with_a_wrong_argument(project):
    _failing(project)
    for args, said in (
        (["specs/no.yaml"], "exportcheck: specs/no.yaml:*No such file*"),
        (["specs/net.yaml", "--case=cpu-float32-onnx-dynamo"], "exportcheck: no case *did you mean*"),
        (["specs/net.yaml", "--budget=-1"], "exportcheck: *"),
    ):
        result = command(project, *args)
        assert result.ret == 2
        result.stderr.fnmatch_lines([said])


def test_over_the_real_engine(pytester, warm_python):
    project = Project(pytester)
    project.warm = warm_python
    path = project.spec("branch", factory="models.py:Net", accepted=False, exporters=("onnx-dynamo",))
    (pytester.path / "specs" / "models.py").write_text(
        "import torch\n\n\n"
        "class Branch(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n\n\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.deep = torch.nn.Sequential(torch.nn.ReLU(), Branch())\n\n"
        "    def forward(self, x):\n"
        "        return self.deep(x)\n"
    )
    # Without a diagnosis: what is known of the message.
    result = project.run("-k", "test_export", str(path))
    result.stdout.fnmatch_lines(
        ["E   known cause (data-dependent branch): *", "E     remedy: torch.where *", "E   reproduce: *"]
    )
    result = project.run("-k", "test_export", "--diagnose", "--exportcheck-report=report.json", str(path))
    result.stdout.fnmatch_lines(
        [
            "guilty: torch.export refuses the model: *",
            "culprit: deep[[]1[]] (Branch) cannot be exported: *",
            "  at *models.py:6 in forward: return x if x.sum() > 0 else -x",
            "known cause (data-dependent branch): *",
        ]
    )
    (case,) = project.report()
    assert case["verdict"] == "fail export"
    assert case["diagnosis"]["pieces"]["culprits"][0]["site"] == "deep[1]"
    assert [cause["name"] for cause in case["causes"]] == ["data-dependent branch"]
