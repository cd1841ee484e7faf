"""What is not made again, as a user sees it: over the fake engine, and over the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_exportcheck.reports.markdown import markdown
from pytest_exportcheck.reports.reuse import cache_lines, reuse_lines, reuse_text

from .conftest import Project
from .test_options import usage_error
from .test_reports import validated


def opened(log: Any) -> set[str]:
    return {line.partition(" open ")[2] for line in log.read_text().splitlines() if " open " in line}


def test_the_cache_reaches_the_engine(any_project, monkeypatch, tmp_path):
    project, log = any_project, tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    project.spec("a")
    for args, text in (
        ((), "a"),
        (("--exportcheck-cache=kept",), "a, cache kept 2000000000"),
        (("--exportcheck-cache=kept", "--exportcheck-cache-size=1.5"), "a, cache kept 1500000"),
        (("--exportcheck-cache=kept", "--no-share"), "a, nothing shared, cache kept 2000000000"),
    ):
        log.write_text("")
        assert project.run(*args).ret == 0
        assert opened(log) == {text}
    project.ini("exportcheck_cache = from_ini", "exportcheck_cache_size = 3")
    log.write_text("")
    project.run()
    assert opened(log) == {"a, cache from_ini 3000000"}


def test_what_the_cache_options_refuse(project):
    project.spec("a")
    (project.pytester.path / "file").write_text("")
    usage_error(project.run("--exportcheck-cache=file"), "--exportcheck-cache: *file is no directory")
    usage_error(
        project.run("--exportcheck-cache-size=-1"), "--exportcheck-cache-size -1.0: expected megabytes"
    )
    project.ini("exportcheck_cache_size = much")
    usage_error(project.run(), "exportcheck_cache_size: 'much' is not a number of megabytes")


VERDICT = {"verdict": "pass", "nodeid": "specs/a.yaml::test_export"}


def record(mode: str, **more: Any) -> dict[str, Any]:
    case = {"spec": "specs/a.yaml", "exporter": "onnx-dynamo", "patch_mode": mode, "device": "cpu"}
    return {**case, "dtype": "float32", "graph": None, **more}


def test_the_lines_of_the_summary():
    shared = [record(mode, same_graph_as="none", conversion="shared") for mode in ("torch", "hf")]
    records = [record("none", conversion="new"), *shared, record("all", conversion="cached")]
    assert list(map(reuse_text, records)) == ["", *["same graph as none"] * 2, "conversion: cached"]
    assert (
        reuse_text(record("hf", same_graph_as="none", capture="cached"))
        == "same graph as none, capture: cached"
    )
    assert reuse_text(record("hf", capture="new")) == ""
    assert list(reuse_lines(records, every_case=False)) == [
        "same graph as none: 2 cases",
        "conversion: cached: 1 case",
    ]
    assert "same graph as none: 2 cases" in markdown([each | VERDICT for each in records])
    named = list(reuse_lines(records, every_case=True))
    assert len(named) == 3
    assert named[0].startswith("same graph as none: ")
    assert "torch" in named[0]
    noted = [record("none", cache_notes=["x is ignored", "y"]), record("hf", cache_notes=["x is ignored"])]
    assert list(cache_lines(noted)) == ["exportcheck cache: x is ignored", "exportcheck cache: y"]


MODELS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, input):
        return torch.relu(self.linear(input))


class Branches(Net):
    def forward(self, input):
        return super().forward(input) * (2 if input.shape[0] > 40 else 1)
"""


@pytest.fixture
def real(pytester: pytest.Pytester) -> Project:
    """Two specs over the real engine: one passes, one fails at other sizes."""
    project = Project(pytester)
    for name, factory, exporters, matrix in (
        ("net", "Net", ("torch-export", "onnx-dynamo"), ", patch_modes: [none, transformers]"),
        ("branches", "Branches", ("onnx-dynamo",), ""),
    ):
        path = project.spec(
            name, factory=f"models.py:{factory}", exporters=exporters, matrix=matrix, accepted=False
        )
        path.write_text(path.read_text().replace("{x:", "{input:"))
    (pytester.path / "specs" / "models.py").write_text(MODELS)
    return project


def conversions(project: Project, stem: str) -> dict[str, str]:
    return {
        case["patch_mode"]: case.get("conversion", "")
        for case in project.report()
        if case["exporter"] == "onnx-dynamo" and case["spec"].endswith(f"{stem}.yaml")
    }


def captures(project: Project) -> dict[str, set[str]]:
    """Stem of a spec -> how its captures came about."""
    found: dict[str, set[str]] = {}
    for case in project.report():
        if case["exporter"] is not None:
            found.setdefault(Path(case["spec"]).stem, set()).add(case["capture"])
    return found


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_runs_with_a_cache(real, warm_python, workers):
    """Twice, the second time with confirmed failures, then with damaged entries: always the same verdicts."""
    args = ["--exportcheck", workers, "-k", "test_export", "--exportcheck-report=report.json"]
    args += ["--exportcheck-cache=kept", "specs"]

    def run(*more: str) -> tuple[list[str], dict[str, str]]:
        result = warm_python.pytest([*args, *more], timeout=600)
        validated(real)
        reused = [
            line
            for line in result.outlines
            if line.startswith(("same graph", "capture", "conversion", "exportch"))
        ]
        return reused, {case["nodeid"]: case["verdict"] for case in real.report()}

    lines, verdicts = run()
    assert sorted(verdicts.values()) == ["fail resize", *["pass"] * 4]
    assert conversions(real, "net") == {"none": "new", "transformers": "shared"}
    assert "same graph as none: 2 cases" in lines
    assert not any("cache" in line for line in lines)

    lines, again = run("-o", "exportcheck_confirm=true")
    assert again == verdicts
    assert conversions(real, "net") == {"none": "cached", "transformers": "shared"}
    assert conversions(real, "branches") == {"none": "new"}, "a failure is that of a new conversion"
    assert {
        "capture: cached: 1 case",
        "same graph as none, capture: cached: 2 cases",
        "capture: cached, conversion: cached: 1 case",
    } <= set(lines)
    assert captures(real) == {"net": {"cached"}, "branches": {"new"}}
    assert [case["confirmed"] for case in real.report() if case["verdict"] != "pass"] == [True]

    entries = sorted((real.pytester.path / "kept").glob("*/*"))
    # A failure is never kept, its conversion is: other sizes are no part of that.
    assert [entry.suffix for entry in entries].count(".conversion") == 2
    assert [entry.suffix for entry in entries].count(".capture") == 4
    for entry in entries:
        entry.write_bytes(b"damaged")
    lines, again = run()
    assert again == verdicts
    assert conversions(real, "net") == {"none": "new", "transformers": "shared"}
    assert sum("is ignored: it is damaged" in line for line in lines) == 6


def test_fresh_processes_and_no_share_know_of_no_cache(real, warm_python):
    args = ["--exportcheck", "-k", "test_export and onnx", "--exportcheck-report=report.json"]
    args += ["--exportcheck-cache=kept", "specs/net.yaml"]
    for more, conversion in (("--isolate", "new"), ("--no-share", "")):
        result = warm_python.pytest([*args, more], timeout=600)
        assert set(real.verdicts().values()) == {"pass"}
        assert set(conversions(real, "net").values()) == {conversion}
        result.stdout.no_fnmatch_line("same graph*")
        assert not (real.pytester.path / "kept").exists()
    environment = json.loads((real.pytester.path / "report.json").read_text())["environment"]
    assert environment["options"]["share"] is False
    assert environment["options"]["cache"] is True
