"""Fresh processes: failures are confirmed, and with ``--isolate`` a crash or a hang costs one case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .test_outcomes import expect

EXPORTERS = ("torch-export", "onnx-dynamo", "onnx-torchscript", "torch-export-strict")


@pytest.fixture
def project(project):
    """With confirmation, as users have it."""
    project.ini()
    return project


@pytest.fixture
def any_project(any_project):
    """The same."""
    any_project.ini()
    return any_project


#: Counts the processes that read this conftest file.
COUNTED = """
import os
with open("loaded", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def loaded(project) -> int:
    """In how many processes the conftest file was read."""
    return len((project.pytester.path / "loaded").read_text().splitlines())


def gone(pid: int) -> bool:
    """Whether the process has ended, waiting for it for a while; a zombie has."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def hanging(project) -> list[int]:
    """The processes of a hanging case, once there are any."""
    for _ in range(300):
        file = project.pytester.path / "hanging"
        if file.exists() and file.read_text().endswith("\n"):
            return [int(pid) for pid in file.read_text().split()]
        time.sleep(0.1)
    raise AssertionError("no case hangs")


# A crash, a hang.


def test_a_crash_or_a_hang_costs_one_case(any_project):
    do = {
        "a": {"torch-export": "segfault", "onnx-dynamo": "abort", "onnx-torchscript": "os._exit"},
        "b": {"torch-export": "killed", "onnx-dynamo": "hang", "onnx-torchscript": "closes"},
        "c": {"torch-export": "print", "onnx-dynamo": "sys.exit", "onnx-torchscript": "bug", "huge": 20_000},
    }
    for name, actions in do.items():
        any_project.spec(name, kwargs={"do": actions}, exporters=EXPORTERS)
    any_project.spec("d", kwargs={"load": "segfault"})
    result = any_project.run("--stage-timeout=3", "--exportcheck-report=report.json")
    assert result.ret == 1
    verdicts = {(case["spec"][6:7], case["exporter"]): case["verdict"] for case in any_project.report()}
    strict = {(name, "torch-export-strict"): "pass" for name in "abc"}
    assert verdicts == strict | {(name, None): "pass" for name in "abc"} | {
        ("a", "torch-export"): "crash export",
        ("a", "onnx-dynamo"): "crash export",
        ("a", "onnx-torchscript"): "crash export",
        ("b", "torch-export"): "crash export",
        ("b", "onnx-dynamo"): "timeout export",
        ("b", "onnx-torchscript"): "crash export",
        ("c", "torch-export"): "pass",
        ("c", "onnx-dynamo"): "fail export",
        ("c", "onnx-torchscript"): "fail export",
        ("d", None): "crash observe",
        ("d", "torch-export"): "crash observe",
    }
    shown = result.stdout.str()
    for line in (
        "E   stage export: killed by SIGSEGV (segmentation fault)",
        "E     Fatal Python error: Segmentation fault",
        "E   stage export: killed by SIGABRT (aborted)",
        "E   stage export: the process ended with status 3 and without a verdict",
        "E   stage export: killed by SIGKILL (the kernel does that when memory is out)",
        "E   stage export: had not ended after 3 s and was killed",
        "E   reproduce:  pytest --exportcheck --stage-timeout=3 ",
        "E     Timeout (0:00:03)!",
        " in _hang",
        "E   stage export: sys.exit(3) was called",
        "KeyError: 'a bug'",
    ):
        assert line in shown
    result.stdout.fnmatch_lines(
        [
            "a * CRASH export *",
            "13 cases: 4 pass, 2 FAIL, 6 CRASH, 1 TIMEOUT   shapes: *",
            "FAILED specs/a.yaml::test_export[[]cpu-float32-torch-export-none[]] - stage e*",
        ]
    )
    records = {(case["spec"][6:7], case["exporter"]): case for case in any_project.report()}
    assert records["c", "torch-export-strict"]["huge"] == ["x" * 1000] * 20_000
    assert records["c", "torch-export-strict"]["isolated"] is True
    assert all(gone(pid) for pid in hanging(any_project))


def test_a_process_without_a_verdict_says_why(project):
    """Its status is 70: it could not send its result."""
    project.spec("a", kwargs={"do": {"torch-export": "closes", "onnx-dynamo": "breaks"}}, exporters=EXPORTERS)
    result = project.run("--isolate", "-k", "torch-export-none or onnx-dynamo")
    ended = "E   stage *: the process ended with status 70 and without a verdict: "
    result.stdout.fnmatch_lines_random(
        [
            f"{ended}the channel to the pytest process is closed: [[]Errno 9[]] Bad file descriptor",
            f"{ended}KeyError: 'a record of nobody'",
            "E     Traceback (most recent call last):",
            'E         raise KeyError("a record of nobody")',
        ]
    )


def test_what_an_isolated_case_prints_is_captured(project):
    project.spec("a", kwargs={"do": {"torch-export": "print"}})
    project.pytester.makepyfile(
        """
        import pytest
        from pytest_exportcheck import assert_export

        @pytest.mark.exportcheck("specs/a.yaml")
        def test_it(export_case, capsys):
            assert_export(export_case)
            out, err = capsys.readouterr()
            assert out.endswith("line 19999 of many\\n")
            assert out.startswith("[")  # The first part is left out, and that is said.
            assert err == "straight to the descriptor\\n"
        """
    )
    project.run("--isolate", ".", flag=False).assert_outcomes(passed=1)


def test_a_crash_is_never_an_expected_failure(project):
    project.spec("a", kwargs={"do": {"torch-export": "segfault"}}, more=expect("export"))
    result = project.run("--isolate", "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        ["E   line 9 of specs/a.yaml expects a failure at export: a crash or a hang is never an expected *"]
    )
    assert project.report()[1]["verdict"] == "crash export"


def test_shapes_are_checked_and_accepted_in_fresh_processes(any_project):
    any_project.spec("a", accepted=False)
    any_project.spec("b", kwargs={"shapes": "inputs:\n  x: float32[2, 4]\n"})
    result = any_project.run("--isolate", "-k", "dynamic")
    result.stdout.fnmatch_lines(["E   stage shapes: *specs/__shapes__/a.yaml is missing"])
    result.assert_outcomes(failed=2)
    any_project.run("--isolate", "--update-shapes", "-k", "dynamic")
    assert "float32[2, 4]" in any_project.golden_path("b").read_text()
    any_project.run("--isolate").assert_outcomes(passed=4)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_run(project, number):
    if number == signal.SIGKILL and not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process that its parent was killed")
    project.spec("a", kwargs={"do": {"torch-export": "hang"}})
    command = [sys.executable, "-m", "pytest", "--exportcheck", "--isolate", "specs"]
    run = subprocess.Popen(
        command, cwd=project.pytester.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        pids = hanging(project)
        os.kill(run.pid, number)
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert all(gone(pid) for pid in pids)
    if number == signal.SIGINT:
        assert b"KeyboardInterrupt" in output
        assert run.returncode == pytest.ExitCode.INTERRUPTED


# Confirmation.


def test_a_failure_is_confirmed_before_it_is_reported(any_project):
    any_project.fake(COUNTED)
    do = {"torch-export": "run", "onnx-dynamo": "export"}
    any_project.spec("a", kwargs={"do": do}, exporters=("torch-export", "onnx-dynamo"), more=expect("export"))
    any_project.run("--exportcheck-report=report.json").assert_outcomes(passed=1, failed=1, xfailed=1)
    shapes, dynamo, torch_export = any_project.report()
    assert "confirmed" not in shapes
    assert (dynamo["verdict"], dynamo["confirmed"]) == ("xfail export", True)
    # Its message has an address in it, which differs.
    assert (torch_export["verdict"], torch_export["confirmed"]) == ("fail run", True)
    assert "message_in_fresh_process" not in torch_export
    # One process that forks serves both.
    workers = 0 if any_project.args == ("-n0",) else 2
    assert loaded(any_project) == 1 + workers + 1


def test_a_run_without_failures_starts_no_process(any_project):
    any_project.fake(COUNTED)
    any_project.spec("a")
    any_project.run().assert_outcomes(passed=2)
    assert loaded(any_project) == (1 if any_project.args == ("-n0",) else 3)


@pytest.mark.parametrize("how", ["option", "ini"])
def test_confirmation_can_be_turned_off(project, how):
    project.fake(COUNTED)
    project.spec("a", kwargs={"do": {"torch-export": "export"}})
    if how == "ini":
        project.ini("exportcheck_confirm = false")
    project.run("--exportcheck-report=report.json", *(["--no-confirm"] if how == "option" else []))
    assert project.report()[1]["verdict"] == "fail export"
    assert "confirmed" not in project.report()[1]
    assert loaded(project) == 1


def test_a_failure_that_depends_on_history(any_project):
    exporters = ("torch-export", "onnx-dynamo")
    do = dict.fromkeys(exporters, "second export")
    any_project.spec(
        "a", kwargs={"do": do}, exporters=exporters, more=expect("export", when="exporter: onnx-dynamo")
    )
    result = any_project.run("--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [
            "specs/a.yaml:2: HistoryError",
            "E   stage export: fails at export in this process, passes in a fresh one: *depends on history",
            "E     in this process:",
            "E       export went wrong",
            "E         first detail",
            "E     in a fresh process:",
            "E       it passes",
            "E     judged before it in this process:",
            "E       specs/a.yaml::test_export[[]cpu-float32-torch-export-none[]]",
            "E   line 9 of specs/a.yaml expects a failure at export: one that depends on history is *",
            'E   reproduce:  pytest --exportcheck *torch-export-none[]]" *onnx-dynamo-none[]]"',
        ]
    )
    result.assert_outcomes(passed=2, failed=1)
    record = next(case for case in any_project.report() if case["exporter"] == "onnx-dynamo")
    assert record["verdict"] == "fail export"
    assert record["confirmed"] is False
    assert record["history"]["fresh"] is None
    assert record["history"]["here"]["message"] == "export went wrong"
    assert record["history"]["before"][-1].endswith("torch-export-none]")
    # Each in a process of its own, both pass.
    any_project.run("--isolate", "-k", "torch-export").assert_outcomes(passed=1)
    project_without = any_project.run("--no-confirm", "-k", "export")
    project_without.assert_outcomes(passed=1, xfailed=1)


def test_a_failure_at_another_stage_in_a_fresh_process(project):
    exporters = ("torch-export", "onnx-dynamo")
    do = dict.fromkeys(exporters, "first convert compare")
    project.spec("a", kwargs={"do": do}, exporters=exporters)
    result = project.run("--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [
            "E   stage compare: fails at compare in this process, fails at convert in a fresh one: *",
            "E     in a fresh process:",
            "E       convert went wrong",
        ]
    )
    records = {case["exporter"]: case for case in project.report()}
    assert records["torch-export"]["confirmed"] is True
    assert records["onnx-dynamo"]["confirmed"] is False
    assert records["onnx-dynamo"]["history"]["fresh"]["stage"] == "convert"


def test_a_crash_or_hang_where_a_failure_is_to_be_confirmed(project, monkeypatch):
    monkeypatch.setenv("RUNS_THE_TESTS", str(os.getpid()))
    exporters = ("torch-export", "onnx-dynamo")
    project.fake(
        """
import os
def patched(action, stage, *more, act=module._act):
    # Only the process that runs the tests fails in an orderly way.
    here = os.environ["RUNS_THE_TESTS"] == str(os.getpid())
    act("export" if action == "abort" and here else action, stage, *more)
module._act = patched
"""
    )
    project.spec("a", kwargs={"do": {"torch-export": "abort"}}, exporters=exporters)
    result = project.run()
    result.stdout.fnmatch_lines(
        [
            "E   stage export: fails at export in this process, crashes at export in a fresh one: *",
            "E       killed by SIGABRT (aborted)",
        ]
    )
    result.assert_outcomes(passed=2, failed=1)


def test_what_a_test_leaves_in_the_environment_is_history(project):
    project.spec("a", kwargs={"do": {"torch-export": "env LEFT_BEHIND"}})
    project.pytester.makepyfile(
        """
        import os
        import pytest
        from pytest_exportcheck import assert_export

        def test_leaves_something(monkeypatch):
            os.environ["LEFT_BEHIND"] = "1"
            os.chdir("specs")

        @pytest.mark.exportcheck("specs/a.yaml")
        def test_it(export_case):
            assert_export(export_case)
        """
    )
    project.in_process = False
    result = project.run(".", flag=False)
    result.stdout.fnmatch_lines(
        [
            "E   stage export: fails at export in this process, passes in a fresh one: *",
            "E     no case was judged before it in this process: look at fixtures and other tests",
        ]
    )
    result.assert_outcomes(passed=1, failed=1)


def test_warnings_are_errors_in_a_fresh_process_too(project):
    project.spec("a", kwargs={"do": {"torch-export": "warn"}})
    project.run("-W", "error::UserWarning", "--exportcheck-report=report.json").assert_outcomes(
        passed=1, failed=1
    )
    assert project.report()[1]["confirmed"] is True
    project.run("--isolate", "-W", "error:odd things:UserWarning").assert_outcomes(passed=1, failed=1)
    project.run("--isolate").assert_outcomes(passed=2)


def test_exporters_and_configuration_of_a_conftest_are_there(any_project):
    any_project.fake(
        """
def pytest_exportcheck_exporters(config):
    return {"mine": object()}
def pytest_configure(config):
    module._HOSTILE["configured"] = lambda: None
"""
    )
    any_project.spec("a", kwargs={"do": {"mine": "configured"}}, exporters=("mine",))
    any_project.run("--isolate").assert_outcomes(passed=2)


def test_a_fresh_process_that_cannot_be_set_up(project):
    project.fake(
        """
import os
if os.path.exists("started"):
    raise RuntimeError("only once")
open("started", "w").close()
"""
    )
    project.spec("a", kwargs={"do": {"torch-export": "export"}})
    result = project.run("--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [
            "E   stage export: export went wrong",
            "E     not confirmed:",
            "E     a fresh process could not be set up: ConftestImportFailure: RuntimeError: only once *",
        ]
    )
    assert project.report()[1]["confirmed"] is None
    (project.pytester.path / "started").unlink()
    result = project.run("--isolate")
    result.stdout.fnmatch_lines(["E   stage load: a fresh process could not be set up: *only once*"])
    result.stdout.fnmatch_lines(["a     CRASH load  CRASH load"])


def test_threads_of_a_conftest_rule_out_a_fork(project):
    project.fake(
        COUNTED + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    exporters = ("torch-export", "onnx-dynamo", "onnx-torchscript")
    do = {"torch-export": "segfault", "onnx-dynamo": "hang"}
    project.spec("a", kwargs={"do": do}, exporters=exporters)
    project.in_process = False
    project.run("--isolate", "--stage-timeout=3", "--exportcheck-report=report.json")
    assert [case["verdict"] for case in project.report()] == [
        "pass",
        "timeout export",
        "pass",
        "crash export",
    ]
    assert loaded(project) == 1 + 4
    assert project.report()[1]["why_no_fork"].startswith("threads run after the conftest files were read")
    assert all(gone(pid) for pid in hanging(project))


def test_a_case_on_a_gpu_gets_an_interpreter_of_its_own(project):
    project.fake(
        COUNTED
        + """
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, set_device=id, get_device_name=str
))
"""
    )
    exporters = ("torch-export", "onnx-dynamo")
    project.spec("a", exporters=exporters, matrix=", devices: [cpu, cuda]")
    project.run("--isolate", "-k", "export").assert_outcomes(passed=4)
    # One that forks for the CPU, and one for each case on the GPU.
    assert loaded(project) == 1 + 1 + 2


@pytest.mark.parametrize(
    ("ini", "args", "message"),
    [
        ("", ["--stage-timeout=-1"], "--stage-timeout -1.0: expected seconds, 0 for no limit"),
        ("", ["--stage-timeout=inf"], "--stage-timeout inf: expected seconds*"),
        (
            "exportcheck_stage_timeout = soon",
            [],
            "exportcheck_stage_timeout: 'soon' is not a number of seconds",
        ),
    ],
)
def test_time_limits_that_are_none(project, ini, args, message):
    project.spec("a")
    project.ini(ini)
    result = project.run(*args)
    result.stderr.fnmatch_lines([f"*{message}"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_ini_twins(project):
    project.spec("a", kwargs={"do": {"torch-export": "hang"}})
    project.ini("exportcheck_stage_timeout = 2")
    project.run("--exportcheck-report=report.json")
    assert project.report()[1]["verdict"] == "timeout export"
    project.ini("exportcheck_isolate = true")
    project.spec("a", kwargs={"do": {"torch-export": "abort"}})
    project.run("--exportcheck-report=report.json")
    assert project.report()[1]["verdict"] == "crash export"
