"""pytest-xdist: one worker per spec, a death costs one case, the user's choices win."""

from __future__ import annotations

import pytest

pytest.importorskip("xdist")


def test_loadscope_is_chosen_and_said(project):
    project.spec("a")
    result = project.run("-n1", "-v")
    result.stdout.fnmatch_lines(["exportcheck: *; --dist loadscope (*", "exportcheck: 1 spec, 1 case*"])
    result.stdout.fnmatch_lines(["*scheduling tests via SpecScheduling"])
    result.assert_outcomes(passed=2)


def test_a_dist_of_the_user_wins(project):
    project.spec("a")
    result = project.run("-n1", "-v", "--dist=worksteal")
    result.stdout.no_fnmatch_line("*loadscope*")
    result.stdout.fnmatch_lines(["*scheduling tests via WorkStealingScheduling"])
    project.pytester.makeini("[pytest]\naddopts = --dist=loadfile -n1 -v\n")
    project.run().stdout.fnmatch_lines(["*scheduling tests via LoadFileScheduling"])


def test_without_the_flag_xdist_is_left_alone(project):
    project.pytester.makepyfile("def test_it(): pass")
    result = project.run("-n1", "-v", ".", flag=False)
    result.stdout.fnmatch_lines(["*scheduling tests via LoadScheduling"])


def test_a_scheduler_of_the_user_wins(project):
    project.fake(
        """
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling
    return LoadFileScheduling(config, log)
"""
    )
    project.spec("a")
    project.run("-n1", "-v").stdout.fnmatch_lines(["*scheduling tests via LoadFileScheduling"])


@pytest.mark.parametrize("workers", ["-n1", "-n2"])
def test_a_dead_worker_costs_its_own_case(project, workers):
    exporters = ("torch-export", "onnx-dynamo", "onnx-torchscript", "torch-export-strict")
    for name in ("a", "b"):
        project.spec(name, kwargs={"do": {"onnx-dynamo": "os._exit"}}, exporters=exporters)
    project.spec("c", exporters=exporters)
    result = project.run(workers, "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        [
            "specs/a.yaml:2: crash",
            "E   worker gw* died in stage export of specs/a.yaml[[]cpu-float32-onnx-dynamo-none[]]",
            'E   reproduce:  pytest --exportcheck "specs/a.yaml::test_export[[]cpu-float32-onnx-dynamo-none*',
            "a * pass * CRASH export * pass * pass *",
            "12 cases: 10 pass, 2 CRASH *",
            "FAILED specs/a.yaml::test_export[[]cpu-float32-onnx-dynamo-none[]]*",
        ]
    )
    assert result.ret == 1
    verdicts = [(case["spec"], case["exporter"], case["verdict"]) for case in project.report()]
    assert len(verdicts) == 3 * 5
    assert [verdict for verdict in verdicts if verdict[2] != "pass"] == [
        ("specs/a.yaml", "onnx-dynamo", "crash export"),
        ("specs/b.yaml", "onnx-dynamo", "crash export"),
    ]


def test_a_death_in_the_last_case(project):
    project.spec("a", kwargs={"do": {"onnx-dynamo": "os._exit"}}, exporters=("torch-export", "onnx-dynamo"))
    project.spec("b")
    project.run("-n2", "--exportcheck-report=report.json")
    assert [case["verdict"] for case in project.report()] == ["pass", "crash export", "pass", "pass", "pass"]


@pytest.mark.parametrize("others", [(), ("b",), ("b", "c", "d")])
def test_a_death_that_leaves_one_case_of_its_spec(project, others):
    project.spec("a", kwargs={"do": {"onnx-dynamo": "os._exit"}}, exporters=("onnx-dynamo", "torch-export"))
    for name in others:
        project.spec(name)
    project.run("-n1", "--exportcheck-report=report.json")
    verdicts = [case["verdict"] for case in project.report()]
    assert verdicts == ["pass", "crash export", "pass", *["pass"] * 2 * len(others)]


def test_every_case_dies(project):
    exporters = ("torch-export", "onnx-dynamo", "onnx-torchscript")
    do = dict.fromkeys(exporters, "os._exit")
    project.spec("a", kwargs={"do": do}, exporters=exporters)
    project.run("-n1", "--exportcheck-report=report.json")
    assert [case["verdict"] for case in project.report()] == ["pass", *["crash export"] * 3]


def test_a_spec_is_observed_once(project, monkeypatch):
    from pytest_exportcheck import distribution

    log = project.pytester.path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    # However slow the machine: nothing here is worth dividing. The controller may be this process.
    monkeypatch.setattr(distribution, "LEAST_SECONDS", distribution.LEAST_SECONDS)
    project.fake("from pytest_exportcheck import distribution\ndistribution.LEAST_SECONDS = 1e9\n")
    for name in ("a", "b", "c"):
        project.spec(name, exporters=("torch-export", "onnx-dynamo"), matrix=", dtypes: [float32, float64]")
    project.run("-n2").assert_outcomes(passed=18)
    lines = [line.partition(" ")[2] for line in log.read_text().splitlines()]
    assert sorted(lines) == sorted(
        f"{what} {name}{more}"
        for name in ("a", "b", "c")
        for what, more in (
            ("open", ""),
            ("observe", " cpu float32"),
            ("observe", " cpu float64"),
            ("close", ""),
        )
    )


def test_the_longest_spec_starts_first(project, monkeypatch):
    for name in ("a", "b", "c"):
        project.spec(name)
    project.spec("z", kwargs={"do": {"torch-export": "sleep"}})
    project.run().assert_outcomes(passed=8)
    log = project.pytester.path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    project.run("-n2").assert_outcomes(passed=8)
    # The first spec that its worker opens; how far the other worker is by then is a matter of load.
    opened: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        worker, _, what = line.partition(" ")
        if what.startswith("open "):
            opened.setdefault(worker, []).append(what)
    assert [names[0] for names in opened.values() if "open z" in names] == ["open z"]
    log.unlink()
    project.run().assert_outcomes(passed=8)
    assert log.read_text().startswith("main open a\n")  # In one process the order of the files stays.


def test_marked_tests_are_reported_without_the_flag(project):
    project.spec("a")
    project.pytester.makepyfile(
        """
        import pytest
        from pytest_exportcheck import assert_export

        @pytest.mark.exportcheck("specs/a.yaml")
        def test_it(export_case):
            assert_export(export_case)
        """
    )
    result = project.run("-n2", ".", "--exportcheck-report=report.json", flag=False)
    result.stdout.fnmatch_lines(["a     pass*", "1 case: 1 pass   report: report.json"])
    assert len(project.report()) == 1


def test_cuda_cases_are_in_one_worker(project):
    for name in ("a", "b", "c", "d"):
        project.spec(name, exporters=("torch-export", "onnx-dynamo"), matrix=", devices: [cpu, cuda]")
    result = project.run("-n2", "-v")
    ran = [line.split() for line in result.outlines if "::test_" in line and line.startswith("[gw")]
    cuda = {words[0] for words in ran if "[cuda-" in words[-1]}
    assert len(ran) == 4 * 2 * 3
    assert len(cuda) == 1


def test_workers_per_gpu(any_project):
    any_project.spec("a", matrix=", devices: [cpu, cuda]")
    result = any_project.run("--workers-per-gpu=2")
    result.assert_outcomes(passed=2, skipped=2)
    result = any_project.run("--workers-per-gpu=0")
    result.stderr.fnmatch_lines(["ERROR: --workers-per-gpu 0: expected at least 1"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
