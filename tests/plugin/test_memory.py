"""What is left of a spec when its last test has ended, and the memory of each stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_exportcheck.memory as memory
from pytest_exportcheck.memory import StagePeaks, peak_rss_mb

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

_MODELS = """
import torch

class Tracked(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.fault = fault

    def forward(self, x):
        y = self.linear(x)
        if self.fault == "export" and y.sum() > 100:
            y = y + 1
        if self.fault == "numbers" and torch.compiler.is_exporting():
            y = y + 1
        if self.fault == "observe":
            raise ValueError("no")
        return y

def build(fault):
    return Tracked(fault)
"""

#: Looks at what is alive when a test begins whose spec is another one than that of the test before.
_CONFTEST = """
import gc, json

gc.unfreeze()  # As in a process of pytest's own: where somebody else sets objects aside, the plugin does not.
KINDS = {"Tracked", "CheckedObservation", "ExportedProgram", "ONNXProgram", "InferenceSession"}
previous = None

def pytest_runtest_logstart(nodeid, location):
    global previous
    before, previous = previous, nodeid.split("::")[0]
    if before is None or before == previous:
        return
    import torch

    aside = gc.get_freeze_count()
    gc.unfreeze()  # What is set aside is not among the objects of the collector.
    found = [
        type(each).__name__
        for each in gc.get_objects()
        if type(each).__name__ in KINDS
        or (type(each) in (torch.Tensor, torch.nn.Parameter) and each.numel())
    ]
    gc.freeze()
    with open("alive.jsonl", "a") as file:
        file.write(json.dumps([before, sorted(found), aside > 10_000]) + "\\n")
"""

_USERS = """
import pytest

@pytest.mark.exportcheck("specs/passes.yaml")
def test_observed(observed_inputs):
    assert len(observed_inputs.graphs) == 1

@pytest.mark.exportcheck("specs/passes.yaml")
def test_wrong(observed_inputs):
    observation = observed_inputs.observation
    assert observation is None
"""


def _spec(folder: Path, name: str, fault: str, exporters: list[str], more: str = "") -> None:
    (folder / f"{name}.yaml").write_text(
        "exportcheck: 1\n"
        f'model: {{factory: "models.py:build", kwargs: {{fault: "{fault}"}}}}\n'
        "observe:\n"
        '  calls: [{forward: {x: "float32[2, 4]"}}, {forward: {x: "float32[3, 4]"}}]\n'
        f"matrix: {{exporters: {json.dumps(exporters)}}}\n{more}"
    )


def test_nothing_of_a_spec_is_alive_when_the_next_one_begins(
    pytester: pytest.Pytester, warm_python: WarmPython
) -> None:
    specs = pytester.path / "specs"
    specs.mkdir()
    (specs / "models.py").write_text(_MODELS)
    every = ["onnx-dynamo", "onnx-torchscript", "torch-export", "torch-export-strict", "transformers-onnx"]
    _spec(specs, "passes", "", every)
    _spec(specs, "refused", "export", ["torch-export-strict", "onnx-dynamo"])
    _spec(specs, "expected", "export", ["onnx-dynamo"], "expect: [{fails: export, reason: a branch}]\n")
    _spec(specs, "wrong", "numbers", ["onnx-dynamo", "torch-export"])
    _spec(specs, "broken", "observe", ["torch-export"])
    pytester.makeconftest(_CONFTEST)
    pytester.makepyfile(test_users=_USERS, test_zlast="def test_last(): pass")
    order = ("passes", "refused", "expected", "wrong", "broken")
    paths = [f"specs/{name}.yaml" for name in order]
    args = ["--exportcheck", "--no-confirm", "-k", "not dynamic_shapes"]
    result = warm_python.pytest([*args, *paths, "test_users.py", "test_zlast.py"], timeout=600)
    # A pass for each exporter, and the last two tests but the wrong one; the legacy one sees no branch.
    result.assert_outcomes(passed=7, failed=6, xfailed=1, deselected=5)
    lines = (pytester.path / "alive.jsonl").read_text().splitlines()
    left = {path: (found, set_aside) for path, found, set_aside in map(json.loads, lines)}
    # Nothing is set aside in the last test, which is of no spec.
    assert left == {**{path: ([], True) for path in paths}, "test_users.py": ([], False)}


def test_a_test_of_no_spec_has_its_garbage_freed_and_its_objects_counted(
    pytester: pytest.Pytester, warm_python: WarmPython
) -> None:
    specs = pytester.path / "specs"
    specs.mkdir()
    (specs / "models.py").write_text(_MODELS)
    for name in ("one", "two"):
        _spec(specs, name, "", ["torch-export"])
    pytester.makeconftest("import gc\n\ngc.unfreeze()\n")
    pytester.makepyfile(
        test_users="""
        import gc, weakref

        class Node:
            def __init__(self):
                self.itself = self

        nodes = [Node(), Node()]  # Before any spec.

        def test_counted_and_freed():
            assert sum(type(each) is Node for each in gc.get_objects()) == 2
            found = weakref.ref(nodes.pop())
            gc.collect()
            assert found() is None
        """
    )
    order = ["specs/one.yaml", "test_users.py", "specs/two.yaml"]
    result = warm_python.pytest(["--exportcheck", "-k", "not dynamic_shapes", *order], timeout=120)
    result.assert_outcomes(passed=3, deselected=2)


def _held(record: dict[str, Any], megabytes: int) -> None:
    peaks = StagePeaks(record)
    peaks.enter("load")
    held = bytearray(megabytes << 20)
    del held
    peaks.enter("export")
    peaks.enter("load")
    peaks.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the mark of the system cannot be set back")
def test_a_stage_has_its_own_peak() -> None:
    record: dict[str, Any] = {}
    _held(record, 200)
    peaks = record["peak_rss_by_stage_mb"]
    assert peaks["load"] - peaks["export"] > 150
    # What the process had at most is not forgotten with the mark that is set back.
    assert record["peak_rss_mb"] >= peaks["load"]
    now = peak_rss_mb()
    assert now is not None
    assert now >= record["peak_rss_mb"]


def test_without_a_mark_to_set_back_there_is_no_peak_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "absent" / "clear_refs")
    record: dict[str, Any] = {}
    _held(record, 1)
    assert record["peak_rss_by_stage_mb"] is None
    assert record["peak_rss_mb"] is None or record["peak_rss_mb"] > 0


def test_the_failure_of_the_last_test_is_left_for_a_debugger(
    pytester: pytest.Pytester, warm_python: WarmPython
) -> None:
    specs = pytester.path / "specs"
    specs.mkdir()
    (specs / "models.py").write_text(_MODELS)
    _spec(specs, "broken", "observe", ["torch-export"])
    pytester.makepyfile(
        conftest="""
        import sys

        def pytest_sessionfinish():
            print("left for pdb.pm:", type(sys.last_value).__name__)
        """
    )
    args = ["--exportcheck", "--no-confirm", "-s", "-k", "export", "specs"]
    result = warm_python.pytest(args, timeout=120)
    result.stdout.fnmatch_lines("*left for pdb.pm: ObserveError*")
