"""Ablation: which patches a case needs, can do without, suffers from; its runs share what they can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_exportcheck import ablation, spec_run
from pytest_exportcheck.ablation import ablate, one_thread
from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.cli import main
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.reports.ablation import ablation_lines, as_markdown

from .helpers import make_run

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

#: A model whose `branch` cannot be exported, and patches of every kind for it.
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def branch(self, x):
        return x * 2 if x.sum() > 0 else x

    def scale(self, x):
        return x * 3

    def shift(self, x):
        return x + 1

    def last(self, x):
        return x.sin()

    def unused(self, x):
        return x

    def forward(self, x):
        return self.last(self.shift(self.scale(self.branch(self.linear(x)))))


def build_model():
    torch.manual_seed(0)
    return Net()


def calls():
    return [((torch.rand(2, 4),), {}), ((torch.rand(3, 4),), {})]


def patch(method, replacement, name=""):
    from pytest_exportcheck import Patch
    return Patch(f"net.Net.{method}", replacement, owner=Net, name=name or method)


cured = patch("branch", lambda self, x: torch.where(x.sum() > 0, x * 2, x), "cured")
rewritten = patch("scale", lambda self, x: x + x + x, "rewritten")
wrapped = patch("shift", lambda self, x: x + 1, "wrapped")
idle = patch("unused", lambda self, x: x, "idle")


def _refuses(self, x):
    if torch.compiler.is_exporting():
        raise RuntimeError("not while exporting")
    return x.sin()


harmful = patch("last", _refuses, "harmful")
changing = patch("shift", lambda self, x: x + 1.01, "changing")
"""


def _ablated(folder: Path, patches: str, source: str = NET, exporter: str = "torch-export") -> dict[str, Any]:
    run = make_run(folder, f"{source}\nmode = [{patches}]\n")
    case = CaseId(run.spec.relative, exporter, "net.py:mode", "cpu", "float32")
    with one_thread():
        found = ablate(run, case)
    json.dumps(found)  # plain builtins
    return found


def _kinds(found: dict[str, Any]) -> dict[str, str]:
    return {name: one["kind"] for name, one in found["patches"].items()}


def test_needed_and_neutral(tmp_path: Path) -> None:
    found = _ablated(tmp_path, "cured, rewritten, wrapped, idle")
    assert _kinds(found) == {"cured": "needed", "rewritten": "neutral", "wrapped": "neutral"}
    assert found["never_called"] == ["idle"]
    assert (found["with"], found["without_any"]) == ("pass", "export")
    assert found["patches"]["cured"]["without"] == "export"
    assert "GuardOnDataDependentSymNode" in found["patches"]["cured"]["message"]
    assert {name: one["alone"] for name, one in found["patches"].items()} == {
        "cured": "pass",
        "rewritten": "export",
        "wrapped": "export",
    }
    # `wrapped` captures as the original does: that run ended at its capture.
    assert found["shared"]["graph"] >= 1


def test_harmful(tmp_path: Path) -> None:
    found = _ablated(tmp_path, "cured, rewritten, harmful")
    assert (found["with"], found["base"]) == ("export", "pass")
    assert "not while exporting" in found["message"]
    # What the others are worth shows without the harmful one.
    assert _kinds(found) == {"cured": "needed", "harmful": "harmful", "rewritten": "neutral"}


def test_changing(tmp_path: Path) -> None:
    found = _ablated(tmp_path, "cured, changing")
    assert (found["with"], found["base"]) == ("patch", "pass")
    assert _kinds(found) == {"changing": "changing", "cured": "needed"}


def test_two_that_harm_only_if_both_stay(tmp_path: Path) -> None:
    """Without one of them the case fails all the same."""
    more = (
        "\n\ndef _also(self, x):\n    return x.fails() if torch.compiler.is_exporting() else x * 3\n\n\n"
        'also = patch("scale", _also, "also")\n'
    )
    source = NET.replace("x * 2 if x.sum() > 0 else x", "x * 2") + more
    found = _ablated(tmp_path, "harmful, also", source)
    assert (found["with"], found["without_any"]) == ("export", "pass")
    assert _kinds(found) == {"also": "harmful", "harmful": "harmful"}


def test_two_of_which_one_is_needed(tmp_path: Path) -> None:
    """Neutral each, and whoever deletes both loses the export."""
    source = NET.replace("self.branch(self.linear(x))", "self.chosen(self.linear(x))") + (
        "\n\ndef _chosen(self, x):\n    return self.branch(x)\n\n\nNet.chosen = _chosen\n"
        'outer = patch("chosen", lambda self, x: torch.where(x.sum() > 0, x * 2, x), "outer")\n'
    )
    # Of the two only one is called as long as both are there.
    found = _ablated(tmp_path, "cured, outer, rewritten, idle", source)
    assert _kinds(found) == {"cured": "alternative", "outer": "alternative", "rewritten": "neutral"}
    assert found["never_called"] == ["idle"]


def test_two_pairs_of_which_one_each_is_needed(tmp_path: Path) -> None:
    """A neutral patch is none of an alternative, and two that are needed only together are needed."""
    source = NET.replace("self.branch(self.linear(x))", "self.first(self.second(self.both(self.linear(x))))")
    source += """

def _first(self, x): return self.first_again(x)
def _second(self, x): return self.second_again(x)
def _branch(self, x): return x * 2 if x.sum() > 0 else x
def _where(self, x): return torch.where(x.sum() > 0, x * 2, x)
def _both(self, x): return self.half(self.other_half(x))
for name, function in dict(
    first=_first, second=_second, both=_both,
    first_again=_branch, second_again=_branch, half=_branch, other_half=_branch,
).items():
    setattr(Net, name, function)
names = "first first_again second second_again half other_half".split()
pairs = [patch(name, _where) for name in names]
"""
    found = _ablated(tmp_path, "*pairs, rewritten", source)
    assert _kinds(found) == {
        **dict.fromkeys(("first", "first_again", "second", "second_again"), "alternative"),
        **dict.fromkeys(("half", "other_half"), "needed"),
        "rewritten": "neutral",
    }


def test_two_pairs_that_harm(tmp_path: Path) -> None:
    source = NET.replace("x * 2 if x.sum() > 0 else x", "x * 2").replace(
        "self.branch(self.linear(x))", "self.b(self.a(self.d(self.c(self.linear(x)))))"
    )
    source += """

def _same(self, x): return x * 1
def _sets(self, x):
    self.__dict__["seen"] = True
    return x * 1
def _fails(self, x):
    if self.__dict__.pop("seen", False) and torch.compiler.is_exporting():
        raise RuntimeError("both are there")
    return x * 1
for name in "abcd":
    setattr(Net, name, _same)
harmful_pairs = [patch("a", _sets), patch("b", _fails), patch("c", _sets), patch("d", _fails)]
"""
    found = _ablated(tmp_path, "*harmful_pairs, rewritten", source)
    assert (found["with"], found["without_any"]) == ("export", "pass")
    kinds = _kinds(found)
    assert kinds.pop("rewritten") == "neutral"
    assert {kinds[name] for name in "ab"} == {kinds[name] for name in "cd"} == {"harmful"}


def test_a_case_that_fails_anyway_at_another_stage_or_the_same(tmp_path: Path) -> None:
    source = NET.replace("return x.sin()", "return x.sin() if x.mean() > 5 else x.cos()")
    found = _ablated(tmp_path, "cured, rewritten", source)
    assert (found["with"], found["without_any"]) == ("export", "export")
    assert set(_kinds(found).values()) == {"failing"}
    assert "alone" not in found["patches"]["cured"]


def test_a_patch_that_is_not_called_costs_no_run(tmp_path: Path) -> None:
    found = _ablated(tmp_path, "cured, idle")
    assert found["runs"] == 2  # with, without
    assert found["shared"]["calls"] == 2  # none at all, only the one


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each run, whatever threads wait for the orders of this test's runner."""
    if not sys.platform.startswith("linux"):
        pytest.skip("ablation forks on Linux only")
    monkeypatch.setattr(ablation, "_may_fork", lambda device: True)


def test_a_crash_is_an_outcome(tmp_path: Path, forking: None) -> None:
    source = NET + (
        "\n\ndef _die():\n    import os\n    os._exit(3)\n\n\n"
        "def branch_or_die(self, x):\n"
        "    return _die() if torch.compiler.is_exporting() else Net._branch(self, x)\n\n\n"
        "Net._branch, Net.branch = Net.branch, branch_or_die\n"
    )
    found = _ablated(tmp_path, "cured", source)
    assert found["patches"]["cured"]["kind"] == "needed"
    assert found["patches"]["cured"]["without"] == "crash export"
    assert "status 3" in found["patches"]["cured"]["message"]


def test_a_hang_is_an_outcome(tmp_path: Path, forking: None) -> None:
    source = NET + (
        "\n\ndef branch_or_hang(self, x):\n    import time\n"
        "    if torch.compiler.is_exporting():\n        time.sleep(600)\n"
        "    return Net._branch(self, x)\n\n\n"
        "Net._branch, Net.branch = Net.branch, branch_or_hang\n"
    )
    run = make_run(tmp_path, f"{source}\nmode = [cured]\n")
    with one_thread():
        found = ablate(
            run, CaseId(run.spec.relative, "torch-export", "net.py:mode", "cpu", "float32"), limit=20
        )
    assert found["patches"]["cured"]["without"] == "timeout export"


def test_without_a_process_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "_may_fork", lambda device: False)
    monkeypatch.setattr(os, "fork", None)
    found = _ablated(tmp_path, "cured, wrapped, harmful")
    assert _kinds(found) == {"cured": "needed", "harmful": "harmful", "wrapped": "neutral"}


def test_a_mode_that_is_observed_under_itself(tmp_path: Path) -> None:
    source = NET + (
        "\nfrom pytest_exportcheck.patches.modes import PatchList\n"
        "three = [lambda model, target: [cured, wrapped, idle]]\n"
        'itself = PatchList("itself", three, observed_under_itself=True)\n'
    )
    run = make_run(tmp_path, source)
    with one_thread():
        found = ablate(run, CaseId(run.spec.relative, "torch-export", "net.py:itself", "cpu", "float32"))
        assert _kinds(found) == {"cured": "needed", "wrapped": "neutral"}


def test_calls_are_observed_again_without_what_was_called_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patches of a mode that is observed under itself may change what the inputs are."""
    source = NET + (
        "\nfrom pytest_exportcheck.patches.modes import PatchList\n"
        "both = [lambda model, target: [cured, idle]]\n"
        'itself = PatchList("itself", both, observed_under_itself=True)\n'
    )
    run = make_run(tmp_path, source)
    case = CaseId(run.spec.relative, "torch-export", "net.py:itself", "cpu", "float32")
    seen: list[str] = []
    observe = spec_run.observe
    monkeypatch.setattr(spec_run, "observe", lambda *given: seen.append(given[5]) or observe(*given))
    monkeypatch.setattr(ablation, "_may_fork", lambda device: False)
    for _ in range(2):  # another graph of the same spec
        seen.clear()
        assert _kinds(ablate(run, case)) == {"cured": "needed"}
        assert seen == ["net.py:itself", "net.py:itself with 1 patch"]


def test_onnx_conversions_of_one_program_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where every run is made in this process."""
    monkeypatch.setattr(ablation, "_may_fork", lambda device: False)
    converted = []
    export = torch.onnx.export
    monkeypatch.setattr(
        torch.onnx, "export", lambda *args, **kwargs: converted.append(1) or export(*args, **kwargs)
    )
    found = _ablated(tmp_path, "cured, wrapped", exporter="onnx-dynamo")
    assert _kinds(found) == {"cured": "needed", "wrapped": "neutral"}
    # With both; without `wrapped`, and with `cured` alone, the program is the same.
    assert len(converted) == 1


def test_another_constant_is_another_program(tmp_path: Path) -> None:
    """A patch whose graph differs in a weight only, and is wrong at sizes that no call has."""
    more = (
        "\n\ndef _wrong_later(self, x):\n"
        "    return x + torch.where(torch.tensor(x.shape[0] > 5), 2.0, 1.0)\n\n\n"
        'wrong = patch("shift", _wrong_later, "wrong")\n'
    )
    found = _ablated(tmp_path, "cured, wrong", NET + more)
    assert found["with"] == "resize"
    assert _kinds(found) == {"cured": "needed", "wrong": "harmful"}


@pytest.mark.parametrize(
    ("mode", "said"),
    [("net.py:gone", "fails at patch"), ("net.py:Opaque", "does not tell its patches"), ("none", "")],
)
def test_what_cannot_be_ablated_is_said(tmp_path: Path, mode: str, said: str) -> None:
    opaque = (
        "\nimport contextlib\nfrom pytest_exportcheck.patches.none import NoPatches\n\n\n"
        "class Opaque(NoPatches):\n    name = 'opaque'\n"
    )
    run = make_run(tmp_path, NET + opaque)
    found = ablate(run, CaseId(run.spec.relative, "torch-export", mode, "cpu", "float32"))
    assert found == {} if not said else said in found["not_done"]


def test_the_run_is_left_as_it_was(tmp_path: Path) -> None:
    """Later cases of the same run are observed and judged as if nothing had been ablated."""
    from .helpers import verdict

    run: SpecRun = make_run(tmp_path, f"{NET}\nmode = [cured, harmful]\n")
    case = CaseId(run.spec.relative, "torch-export", "net.py:mode", "cpu", "float32")
    model = run.model("cpu", "float32")
    with one_thread():
        ablate(run, case)
    assert run.modes == {}
    assert run.model("cpu", "float32") is model
    stage, error, record = verdict(run, "torch-export", "net.py:mode")
    assert stage == "export"
    assert "not while exporting" in str(error)
    assert record["patches"]["active"] == 2


_RECORDS = [
    {
        "spec": f"specs/{spec}.yaml", "exporter": exporter, "patch_mode": "mine", "graph": None,
        "ablation": {
            "patches": {name: {"kind": kind} for name, kind in kinds.items()}, "never_called": ["idle"],
        },
    }
    for spec, exporter, kinds in (
        ("llama", "onnx-dynamo", {"a": "needed", "b": "neutral"}),
        ("llama", "torch-export", {"a": "neutral", "b": "neutral"}),
        ("vit", "onnx-dynamo", {"b": "harmful"}),
    )
]  # fmt: skip


def test_the_report() -> None:
    refused = {
        "spec": "specs/t5.yaml", "exporter": "onnx-dynamo", "patch_mode": "mine", "graph": "decode",
        "ablation": {"not_done": "fails at load: no such file"},
    }  # fmt: skip
    assert list(ablation_lines([*_RECORDS, refused, {"spec": "specs/x.yaml", "patch_mode": "none"}])) == [
        "mine  a",
        "    needed for: llama (onnx-dynamo)",
        "    neutral for: llama (torch-export)",
        "mine  b",
        "    harms: vit",
        "    neutral for: llama",
        "patch mode mine: 3 cases, 2 of 3 patches called; no case needs b",
        "not ablated: specs/t5.yaml[onnx-dynamo-mine-decode]: fails at load: no such file",
    ]
    assert as_markdown(_RECORDS).splitlines()[:4] == [
        "| mode | patch | needed for | harms | neutral for |",
        "| --- | --- | --- | --- | --- |",
        "| mine | a | llama (onnx-dynamo) | - | llama (torch-export) |",
        "| mine | b | - | vit | llama |",
    ]
    assert list(ablation_lines([{"spec": "specs/x.yaml", "patch_mode": "none"}])) == []


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, f"{NET}\nmode = [cured, wrapped]\n", "matrix: {exporters: [onnx-dynamo]}\n")
    monkeypatch.chdir(tmp_path)
    command = ["patches", "--ablate", "net.yaml", "--exporter", "torch-export", "--report", "report.json"]
    assert main([*command, "--mode", "net.py:mode"]) == 0
    out, err = capsys.readouterr()
    assert "| net.py:mode | cured | net | - | - |" in out
    assert "| net.py:mode | wrapped | - | - | net |" in out
    assert "net.yaml[cpu-float32-torch-export-net.py:mode]: pass with, export without; " in err
    (record,) = json.loads(Path("report.json").read_text())["cases"]
    assert record["verdict"] == "pass"
    assert record["ablation"]["patches"]["cured"]["kind"] == "needed"
    assert main(command) == 2  # the matrix has only `none`
    assert "no case has a patch mode with patches" in capsys.readouterr().err
    assert main([*command, "--mode", "net.py:gone"]) == 1
    assert main(["patches", "--ablate", "gone.yaml"]) == 2
    assert main(["patches", "--exporter", "onnx-dynamo"]) == 2


def test_the_command_does_not_repeat_what_torch_says(tmp_path: Path, warm_python: WarmPython) -> None:
    """In a process of its own: log handlers hold the stream that was there first."""
    source = """
    import logging, warnings

    class Net(nn.Module):
        def forward(self, x):
            logging.getLogger("torch").warning("noise")
            warnings.warn("noise")
            print("noise")
            if x.sum() > 0:
                return x + 1
            return x - 1

    def build_model():
        return Net()

    def calls():
        return [((torch.ones(2, 3) * sign,), {}) for sign in (1, -1)]
    """
    make_run(tmp_path, source, "matrix: {exporters: [torch-export]}\n")
    code = "import sys; from pytest_exportcheck.cli import main; sys.exit(main())"
    command = [warm_python.executable, "-c", code]
    done = subprocess.run(
        [*command, "patches", "--ablate", "net.yaml", "--mode", "rewrite"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("net.yaml[cpu-float32-torch-export-rewrite]: pass with, export without; needed: ")
    assert done.stdout.startswith("| mode | patch |")
