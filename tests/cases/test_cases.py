"""Small models from real bug reports, each with the verdict that an honest checker gives.

`EXPECT` in a model file says what plain `torch.onnx.export` and ONNX Runtime do. `HONEST` says at which stage
our pipeline fails, where it does; `why` tells where that differs from the raw facts, by design.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.spec import load_spec

MODELS = sorted((Path(__file__).parent / "models").glob("[0-9]*.py"))
EXPORTERS = ("torch-export", "onnx-dynamo")


@dataclass(frozen=True)
class Honest:
    """Verdicts of one model: ``pass`` or the stage that fails, and what the message must say."""

    torch_export: str
    onnx_dynamo: str
    says: str = ""
    why: str = ""


HONEST = {
    "01": Honest("observe", "observe", "a constant that differs between calls (2 in call 0; 4 in call 1)",
                 "one graph cannot serve the calls: known before any export"),
    "03": Honest("export", "export", "Constraints violated", "Dim.DYNAMIC on every axis: both refuse"),
    "05": Honest("pass", "pass", why="arguments are cloned leaf by leaf"),
    "07": Honest("pass", "compare", "nan instead of 0"),
    "09": Honest("resize", "compare", "", "torch.export guards `height // 2 != 1`: it refuses a height of 2"),
    "11": Honest("pass", "compare", "instead of"),
    "13": Honest("pass", "compare", "instead of nan"),
    "15": Honest("pass", "compare", "0 instead of nan"),
    "17": Honest("observe", "observe", "eager disagrees with itself on call 0", "state in a buffer"),
    "19": Honest("observe", "observe", "call 0 has no mask", "no program can be fed with that call"),
    "21": Honest("pass", "convert", "ConversionError"),
    "23": Honest("pass", "session", "NOT_IMPLEMENTED"),
    "25": Honest("pass", "convert", "layers (int 3), cached (bool True)"),
    "27": Honest("pass", "pass"),
    "29": Honest("pass", "pass"),
    "31": Honest("pass", "pass"),
    "33": Honest("pass", "pass", why="the example is the call with a batch of 3"),
    "35": Honest("pass", "pass"),
    "37": Honest("pass", "pass"),
    "39": Honest("pass", "pass"),
    "41": Honest("pass", "pass"),
    "43": Honest("export", "pass", "Constraints violated", "only torch.onnx.export has loops for it"),
    "45": Honest("pass", "pass"),
    "47": Honest("pass", "pass"),
}  # fmt: skip


def expect_of(path: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(f"case_{path.stem[:2]}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.EXPECT
    return found


pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

Verdict = tuple[str, str]


class Runner:
    """Runs the cases, each once, unless it is asked for a second time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verdicts: dict[tuple[str, str], Verdict] = {}

    def verdict(self, model: Path, exporter: str) -> Verdict:
        key = (model.stem, exporter)
        if key not in self.verdicts:
            found = self.run(model, EXPORTERS)
            self.verdicts.update({(model.stem, each): verdict for each, verdict in found.items()})
        return self.verdicts[key]

    def run(self, model: Path, exporters: Any) -> dict[str, Verdict]:
        shutil.copy(model, self.folder)
        spec = self.folder / f"{model.stem}.yaml"
        spec.write_text(
            "exportcheck: 1\n"
            f'model: {{factory: "{model.name}:build_model"}}\n'
            f'observe: {{calls: "{model.name}:calls"}}\n',
            encoding="utf-8",
        )
        run = SpecRun(load_spec(spec, self.folder))
        verdicts = {}
        for exporter in exporters:
            case = CaseId(run.spec.relative, exporter, "none", "cpu", "float32")
            try:
                run_case(run, case, lambda stage: None, {})
                verdicts[exporter] = ("pass", "")
            except ExportCheckError as error:
                verdicts[exporter] = (error.stage, str(error))
        run.close()
        return verdicts


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_the_verdict_is_honest(runner: Runner, model: Path, exporter: str) -> None:
    honest = HONEST[model.stem[:2]]
    stage, message = runner.verdict(model, exporter)
    wanted = honest.torch_export if exporter == "torch-export" else honest.onnx_dynamo
    assert stage == wanted, message
    if stage != "pass":
        assert honest.says in message


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_the_table_above_agrees_with_the_raw_facts(model: Path) -> None:
    expect = expect_of(model)
    honest = HONEST[model.stem[:2]]
    raw = expect.get("cloned_leaves", expect)
    assert (honest.onnx_dynamo == "pass") == (raw["verdict"] == "pass")
    if (honest.torch_export == "pass") != (set(raw["torch_export"]) == {"ok"}):
        assert honest.why, "a verdict other than the raw one has its reason"


def test_every_model_has_its_verdict() -> None:
    assert sorted(HONEST) == [path.stem[:2] for path in MODELS]


def test_verdicts_do_not_depend_on_what_ran_before(runner: Runner) -> None:
    """All of them once more in the opposite order, in the same process."""
    first = {
        (model.stem, exporter): runner.verdict(model, exporter)[0]
        for model in MODELS
        for exporter in EXPORTERS
    }
    second = {}
    for model in reversed(MODELS):
        for exporter, (stage, _) in runner.run(model, reversed(EXPORTERS)).items():
            second[model.stem, exporter] = stage
    assert second == first


def test_a_recurrent_layer_passes_after_any_other_export_of_one(runner: Runner) -> None:
    """`aten.gru` keeps the kernel of the last export unless the exporters clean up after themselves."""
    import torch

    model = next(path for path in MODELS if path.stem.startswith("43"))
    gru = torch.nn.GRU(4, 5, batch_first=True).eval()
    torch.export.export(gru, (torch.zeros(2, 7, 4),))
    assert runner.run(model, ["onnx-dynamo"])["onnx-dynamo"][0] == "pass"
    assert runner.run(model, ["torch-export", "onnx-dynamo"])["onnx-dynamo"][0] == "pass"
