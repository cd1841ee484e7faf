"""Golden files: proposed by tests, written once by the controller, never without being asked."""

from __future__ import annotations

import pytest

from pytest_exportcheck.goldens import Proposals, obsolete_goldens, write_atomically

DEFAULT = "inputs:\n  x: float32[batch, 4]\n"


def shapes_folder(project):
    folder = project.pytester.path / "specs" / "__shapes__"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_missing_golden_fails_and_prints_the_proposal(any_project):
    any_project.spec("a", accepted=False)
    result = any_project.run()
    result.stdout.fnmatch_lines(
        [
            "E   stage shapes: no accepted shapes: specs/__shapes__/a.yaml is missing",
            "E       x: float32[[]batch, 4[]]",
            "E   accept:     pytest --exportcheck specs/a.yaml --update-shapes",
            "1 case: 1 pass   shapes: 1 missing",
        ]
    )
    assert result.ret == 1
    assert shapes_folder(any_project) == []


@pytest.mark.parametrize("accepted", [True, False])
def test_the_command_that_accepts_is_in_every_report(project, accepted):
    project.spec("a", accepted=accepted)
    if accepted:
        project.golden("a", "inputs:\n  x: float32[2, 4]\n")
    project.run(
        "--exportcheck-report=report.json", "--exportcheck-markdown=r.md", "--exportcheck-html=r.html"
    )
    command = "pytest --exportcheck specs/a.yaml --update-shapes"
    (shapes,) = (case for case in project.report() if case["exporter"] is None)
    assert shapes["accept"] == command
    assert [case for case in project.report() if "accept" in case] == [shapes]
    assert f"      accept: {command}" in (project.pytester.path / "r.md").read_text().splitlines()
    assert f"<code>{command}</code>" in (project.pytester.path / "r.html").read_text()
    # Pasted, it does what it says.
    assert project.run("--update-shapes", "specs/a.yaml").ret == 0
    assert project.run().ret == 0


def test_a_model_that_cannot_be_observed_has_no_missing_golden(project):
    project.spec("new", accepted=False)
    project.spec("broken", kwargs={"load": "observe"}, accepted=False)
    project.spec("other", kwargs={"load": "observe"})
    result = project.run()
    result.stdout.fnmatch_lines(["3 cases: *   shapes: 1 missing, 2 FAIL"])


def test_several_missing_goldens_come_after_what_fails_and_have_one_command(any_project):
    any_project.spec("a", accepted=False)
    any_project.spec("b", kwargs={"do": {"torch-export": "export"}})
    any_project.spec("c", accepted=False)
    result = any_project.run()
    result.stdout.fnmatch_lines(
        [
            "specs/b.yaml:*: ExportError",
            "E   stage shapes: no accepted shapes: specs/__shapes__/a.yaml is missing",
            "E   stage shapes: no accepted shapes: specs/__shapes__/c.yaml is missing",
            "FAILED specs/b.yaml*",
            "FAILED specs/a.yaml*",
            "FAILED specs/c.yaml*",
            "exportcheck: 2 specs without accepted shapes; read them above, then accept them all: "
            "pytest --exportcheck specs --update-shapes -k test_dynamic_shapes",
            "*3 failed, 3 passed*",
        ]
    )
    assert any_project.run("--update-shapes", "-k", "test_dynamic_shapes").ret == 0
    assert shapes_folder(any_project) == ["a.yaml", "b.yaml", "c.yaml"]
    any_project.run().stdout.no_fnmatch_line("*accept them all*")


def test_the_one_command_accepts_no_shapes_that_changed(project):
    for name in ("a", "c"):
        project.spec(name, accepted=False)
    project.spec("changed")
    project.golden("changed", "old\n")
    # Broken: there is nothing to accept.
    project.spec("d", kwargs={"load": "observe"}, accepted=False)
    project.run().stdout.fnmatch_lines(
        ["*accept them all: pytest --exportcheck specs/a.yaml specs/c.yaml --update-shapes -k *"]
    )
    project.run("-k", "a or c").stdout.fnmatch_lines(["*: pytest --exportcheck specs/a.yaml specs/c.yaml *"])
    project.run("-k", "a.yaml").stdout.no_fnmatch_line("*accept them all*")
    project.run("-qq").stdout.no_fnmatch_line("*accept them all*")


def test_update_writes_what_changed_and_says_so(any_project):
    any_project.spec("new", accepted=False)
    any_project.spec("same")
    any_project.spec("changed")
    before = any_project.golden_path("same").stat().st_mtime_ns
    any_project.golden("changed", "old\n")
    result = any_project.run("--update-shapes")
    result.stdout.fnmatch_lines(
        [
            "3 cases: 3 pass   shapes: 1 ok, 2 updated",
            "updated: specs/__shapes__/changed.yaml",
            "updated: specs/__shapes__/new.yaml",
            "*4 passed, 2 golden updated*",
        ]
    )
    assert result.ret == 0
    assert any_project.golden_path("new").read_text() == f"# specs/__shapes__/new.yaml\n{DEFAULT}"
    assert any_project.golden_path("same").stat().st_mtime_ns == before
    assert shapes_folder(any_project) == ["changed.yaml", "new.yaml", "same.yaml"]
    any_project.run().assert_outcomes(passed=6)


def test_cells_that_disagree_are_refused(any_project):
    any_project.spec(
        "a",
        kwargs={"shapes": {"float32": "one\n", "float64": "two\n"}},
        matrix=", dtypes: [float32, float64]",
        accepted=False,
    )
    any_project.spec("b", accepted=False)
    result = any_project.run("--update-shapes")
    result.stdout.fnmatch_lines(
        [
            "exportcheck: ERROR specs/__shapes__/a.yaml not written: specs/a.yaml[[]cpu-float32[]] and "
            "specs/a.yaml[[]cpu-float64[]] propose different shapes for it.*"
        ]
    )
    assert result.ret == 1
    assert shapes_folder(any_project) == ["b.yaml"]


def test_a_cell_that_agrees_with_the_golden_is_not_overruled(project):
    project.spec(
        "a",
        kwargs={"shapes": {"float32": DEFAULT, "float64": "two\n"}},
        matrix=", dtypes: [float32, float64]",
    )
    result = project.run("--update-shapes")
    result.stdout.fnmatch_lines(["*a.yaml not written*propose different shapes*"])
    assert project.golden_path("a").read_text().endswith(DEFAULT)


def test_a_golden_that_cannot_be_written_does_not_stop_the_others(any_project):
    any_project.spec("a", accepted=False)
    (any_project.pytester.path / "specs" / "__shapes__" / "b.yaml").mkdir(parents=True)
    any_project.fake(
        """
import os
if "PYTEST_XDIST_WORKER" in os.environ or True:
    from pytest_exportcheck.goldens import Golden
    read = Golden.read
    Golden.read = lambda self: None if self.path.is_dir() else read(self)
"""
    )
    any_project.spec("b", accepted=False)
    any_project.spec("c", accepted=False)
    result = any_project.run("--update-shapes")
    result.stdout.fnmatch_lines(["exportcheck: ERROR specs/__shapes__/b.yaml not written: *"])
    assert result.ret == 1
    assert shapes_folder(any_project) == ["a.yaml", "b.yaml", "c.yaml"]


def test_update_of_a_selection_touches_nothing_else(project):
    project.spec("a", accepted=False)
    project.spec("b", accepted=False)
    project.golden("gone", "old\n")
    project.run("-k", "a.yaml", "--update-shapes", "specs")
    assert shapes_folder(project) == ["a.yaml", "gone.yaml"]


def test_a_crash_costs_one_golden(project):
    pytest.importorskip("xdist")
    project.spec("a", kwargs={"do": {"torch-export": "os._exit"}}, accepted=False)
    project.spec("b", kwargs={"do": {"torch-export": "os._exit"}}, accepted=False)
    result = project.run("-n2", "--update-shapes")
    result.stdout.fnmatch_lines(["2 cases: 2 CRASH   shapes: 2 updated"])
    assert shapes_folder(project) == ["a.yaml", "b.yaml"]


def test_obsolete_goldens_are_named_and_pruned(any_project):
    any_project.spec("a")
    any_project.golden("gone", "old\n")
    result = any_project.run()
    result.stdout.fnmatch_lines(
        [
            "1 case: 1 pass   shapes: 1 ok, 1 obsolete",
            "obsolete (--prune-shapes deletes them): specs/__shapes__/gone.yaml",
        ]
    )
    assert result.ret == 0
    result = any_project.run("--prune-shapes")
    result.stdout.fnmatch_lines(["deleted: specs/__shapes__/gone.yaml"])
    assert shapes_folder(any_project) == ["a.yaml"]


@pytest.mark.parametrize(
    "args",
    [
        ("-k", "a", "specs"),
        ("-m", "device_cpu", "specs"),
        ("--lf", "specs"),
        ("-x", "specs"),
        ("--exporter=torch-export",),
        ("specs/a.yaml::test_export[cpu-float32-torch-export-none]",),
        ("specs/a.yaml",),
    ],
)
def test_prune_refuses_a_partial_run(project, args):
    project.spec("a")
    project.golden("gone", "old\n")
    result = project.run("--prune-shapes", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --prune-shapes needs a full run, and this one is partial: *"])
    assert shapes_folder(project) == ["a.yaml", "gone.yaml"]


@pytest.mark.parametrize("why", ["collection errors", "1 deselected"])
def test_prune_deletes_nothing_after_what_only_shows_during_the_run(any_project, why):
    any_project.spec("a")
    any_project.golden("gone", "old\n")
    if why == "collection errors":
        any_project.spec("bad", more="nonsense: 1\n")
    else:
        any_project.fake(
            """
def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[items.pop()])
"""
        )
    result = any_project.run("--prune-shapes")
    result.stdout.fnmatch_lines([f"nothing deleted: not a full run ({why})"])
    assert "gone.yaml" in shapes_folder(any_project)


def test_the_golden_of_a_broken_spec_is_not_obsolete(tmp_path):
    shapes = tmp_path / "deep" / "__shapes__"
    shapes.mkdir(parents=True)
    for name in ("broken", "other", "gone"):
        (shapes / f"{name}.yaml").write_text("x")
    (tmp_path / "deep" / "broken.yml").write_text("exportcheck: 1\n  bad: [\n")
    (tmp_path / "deep" / "other.yaml").write_text("a: 1\n")
    assert [path.name for path in obsolete_goldens([tmp_path])] == ["gone.yaml", "other.yaml"]


def test_no_half_written_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text("old")

    def broken(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", broken)
    proposals = Proposals()
    proposals.add({"path": "a.yaml", "text": "new", "changed": True}, "cell")
    assert proposals.write(tmp_path) == ([], ["a.yaml not written: No space left on device"])
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.yaml", "old")]


@pytest.mark.parametrize("args", [[], ["--isolate"]])
def test_a_golden_that_cannot_be_read_is_a_failure_of_shapes(project, args):
    project.spec("a")
    project.golden_path("a").write_bytes(b"\xff\xfe")
    result = project.run(*args, "--exportcheck-report=report.json")
    result.stdout.fnmatch_lines(
        ["E   stage shapes: specs/__shapes__/a.yaml cannot be read: *codec can't decode*"]
    )
    assert [case["verdict"] for case in project.report()] == ["fail shapes", "pass"]
