"""`exportcheck show`, `doctor` and `validate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from pytest_exportcheck import cli_show
from pytest_exportcheck.cli import main
from pytest_exportcheck.cli_validate import Wishes, _with_wishes
from pytest_exportcheck.errors import LoadError

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

SPEC = """exportcheck: 1
model: {factory: "nets.py:build"}
observe:
  calls:
    - forward: {x: "float32[2, 4]"}
    - forward: {x: "float32[3, 4]"}
matrix: {exporters: [onnx-dynamo], patch_modes: [none, torch]}
"""
NETS = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x + 1

def build():
    return Net()

def broken():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("no")
    return Broken()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython) -> Path:
    """One spec. pytest, which `validate` starts, is a fork of a process that has imported the engine."""
    monkeypatch.setattr(sys, "executable", warm_python.executable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(SPEC)
    return tmp_path


def test_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "net.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "net.yaml: built by nets.py:build"
    assert "3 tests" in lines
    assert "  test_export[cpu-float32-onnx-dynamo-torch]" in lines
    assert "2 observed calls" in lines
    assert "  x_dim_0: seen 2, 3" in lines
    assert "inferred shapes (net.yaml, not accepted yet):" in lines
    assert "    x: float32[x_dim_0, 4]" in lines


def test_show_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {
        "spec": "specs/net.yaml",
        "patch_mode": "none",
        "device": "cpu",
        "dtype": "float32",
        "graph": None,
    }
    cases = [
        {**same, "exporter": "onnx-dynamo", "verdict": "fail compare", "message": "1 of 2 outputs\nmore"},
        {**same, "exporter": "torch-export", "verdict": "pass"},
        {**same, "exporter": None, "patch_mode": None, "verdict": "pass"},
    ]
    environment = {"packages": {}, "started": "2026-01-02T03:04:05+00:00", "left_out": "-k"}
    report = {"schema": 1, "environment": environment, "cases": cases}
    (folder / "report.json").write_text(json.dumps(report))
    assert main(["show", "./gone/../report.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "report.json: 3 records of 2026-01-02T03:04:05+00:00; not a full run: -k"
    assert ["net", "pass", "FAIL", "compare", "pass"] in [line.split() for line in lines]
    assert lines[-3:] == [
        "2 cases: 1 pass, 1 FAIL   shapes: 1 ok",
        "specs/net.yaml [cpu-float32-onnx-dynamo-none]: fail compare: 1 of 2 outputs",
        "every case in detail: exportcheck html report.json -o report.html",
    ]
    assert main(["show", "report.json", "--cases"]) == 2
    assert "report.json is a report: --device" in capsys.readouterr().err
    (folder / "report.json").write_text("{}")
    assert main(["show", "report.json"]) == 2
    assert "it has no list of cases (show takes a spec, or a report)" in capsys.readouterr().err


def test_paths_are_named_without_detours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other").mkdir()
    assert main(["show", "./other/../net.yaml", "--cases"]) == 0
    assert capsys.readouterr().out.startswith("net.yaml: ")
    assert main(["lint", "./other/../gone.yaml"]) == 1
    assert capsys.readouterr().out.startswith("gone.yaml:1:1: ")
    assert main(["merge", "other/../gone.json", "-o", "all.json"]) == 2
    assert capsys.readouterr().err == "exportcheck: gone.json: No such file or directory\n"
    # Behind a link .. is another folder.
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "spec.yaml").write_text(SPEC)
    (folder / "link").symlink_to("deep/er")
    assert main(["lint", "link/../spec.yaml"]) == 1
    assert "deep/spec.yaml:" in capsys.readouterr().out


def test_show_the_cases_only(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def never(*args: Any) -> None:
        raise LoadError("a model was built")

    monkeypatch.setattr("pytest_exportcheck.spec.build.build_model", never)
    assert main(["show", "net.yaml", "--cases"]) == 0
    assert "observed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SPEC.replace("build", "broken"),
            "stage observe: net.yaml:5:7: the forward call 0 raised: RuntimeError: no",
        ),
        (SPEC.replace("build", "absent"), "stage load: net.yaml:2"),
        (SPEC.replace("onnx-dynamo", "[1"), "net.yaml:7:"),
        (SPEC.replace("matrix", "matrx"), "net.yaml:7:1: unknown key 'matrx'"),
    ],
)
def test_show_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (folder / "net.yaml").write_text(text)
    assert main(["show", "net.yaml"]) == 1
    assert message in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("torch  ", "CPUExecutionProvider", "onnx-dynamo", "rewrite", "no known problem"):
        assert part in text


def test_known_bad_versions() -> None:
    assert cli_show.known_bad({"torch": "2.13.0+cpu", "transformers": "5.24.0"}) == []
    assert cli_show.known_bad({"torch": "2.12.1", "onnxruntime": "1.32", "onnxruntime-gpu": "1.32"}) == [
        "torch 2.12.1 is older than 2.13, the oldest that was tried",
        "onnxruntime and onnxruntime-gpu are both installed and write over each other: remove both",
    ]


def test_doctor_finds_a_foreign_layout(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from torch.utils import _pytree
    from transformers import DynamicCache

    def flatten(cache: DynamicCache) -> tuple[list[Any], None]:
        return [[layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]], None

    node = _pytree.NodeDef(DynamicCache, flatten, lambda children, context: DynamicCache(), None)
    monkeypatch.setitem(_pytree.SUPPORTED_NODES, DynamicCache, node)
    assert main(["doctor"]) == 1
    assert "problem: transformers.cache_utils.DynamicCache by" in capsys.readouterr().out


def wishes(**changed: Any) -> Wishes:
    values: dict[str, Any] = {
        "model": "gpt2", "trained": False, "exporters": ("onnx-dynamo", "torch-export"),
        "patch_modes": ("none",), "device": "cpu", "dtype": "float32", "opset": None, "optimize": None,
        "shapes": "inferred", "other_sizes": True,
    }  # fmt: skip
    return Wishes(**{**values, **changed})


GENERATE = """exportcheck: 1
model: {type: gpt2}
observe:
  calls:
    - generate: {input_ids: "int64[2, 9] < 96", max_new_tokens: 3, min_new_tokens: 3}
    - generate: {input_ids: "int64[3, 6] < 96", max_new_tokens: 3, min_new_tokens: 3}
"""


def made_of(**changed: Any) -> Any:
    """The spec that the options make of `GENERATE`."""
    return yaml.safe_load(_with_wishes(yaml.safe_load(GENERATE), wishes(**changed)))


def test_what_the_options_become() -> None:
    plain = made_of()
    assert plain["matrix"]["exporters"] == ["onnx-dynamo", "torch-export"]
    assert "resize" not in plain
    assert "exporter_options" not in plain
    made = yaml.safe_load(
        _with_wishes(yaml.safe_load(GENERATE), wishes(opset=20, optimize=False, other_sizes=False))
    )
    # The options of the ONNX exporters are no options of the other one.
    assert made["exporter_options"] == {"onnx-dynamo": {"opset_version": 20, "optimize": False}}
    assert made["resize"] == "off"
    assert made_of(shapes="named")["observe"]["batch_dims"] is True
    fixed = made_of(shapes="none")
    assert fixed["resize"] == "off"
    (call,) = fixed["observe"]["calls"]
    assert call["generate"]["max_new_tokens"] == 1


def test_validate(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    status = main(
        [
            "validate",
            "-m",
            "gpt2",
            "--export",
            "onnx-dynamo",
            "--opset",
            "20",
            "--dynamic-shapes",
            "none",
            "-o",
            "out",
        ]
    )
    text = capfd.readouterr().out
    assert status == 0, text
    assert "onnx-dynamo none: pass (" in text
    assert "export " in text
    report = json.loads((folder / "out" / "report.json").read_text())
    (case,) = [case for case in report["cases"] if case["exporter"]]
    assert (case["verdict"], case["opset"]) == ("pass", 20)
    assert case["spec"].endswith("gpt2.yaml"), "cases of two models are never taken for one"
    golden = (folder / "out" / "__shapes__" / "gpt2.yaml").read_text()
    assert "input_ids: int64[2, 9]" in golden


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_absent_is_no_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known = NETS.replace("(self, x)", "(self, input_ids)").replace("x + 1", "input_ids + 1")
    (folder / "nets.py").write_text(known)
    status = main(["validate", "-m", "nets.py:build", "--export", "torch-export", "--device", "cuda"])
    assert status == 1, capfd.readouterr()
    assert "no CUDA device" in capfd.readouterr().out


def test_validate_a_failure_and_only_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-m", "nets.py:build", "--run"]) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "nets.py:build: nothing is known of the arguments of forward: x"
    assert said[1:] == [
        "nets.py:build: no calls could be made up that the model takes; name a callable that returns its "
        "calls (--calls nets.py:CALLABLE), or write a spec (exportcheck new nets.py:build)"
    ]
    assert main(["validate", "-m", "vit", "--run"]) == 0
    assert "batch: seen 2, 3" in capfd.readouterr().out


CALLS = """
def calls():
    return [((torch.rand(2, 4),), {}), ((torch.rand(3, 4),), {})]
"""


@pytest.mark.parametrize("kept", [False, True])
def test_a_factory_with_calls_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str], kept: bool) -> None:
    (folder / "nets.py").write_text(NETS + CALLS)
    wanted = ["validate", "-m", "nets.py:build", "--calls", "nets.py:calls"]
    assert main([*wanted, "--run"]) == 0
    assert "x_dim_0: seen 2, 3" in capfd.readouterr().out
    assert main([*wanted, "--export", "torch-export", *(["-o", "out"] if kept else [])]) == 0
    assert "torch-export none: pass (" in capfd.readouterr().out
    if kept:
        # What is kept can be moved with the code: no absolute path.
        spec = yaml.safe_load((folder / "out" / "nets_build.yaml").read_text())
        assert (spec["model"]["factory"], spec["observe"]["calls"]) == (
            "../nets.py:build",
            "../nets.py:calls",
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "gpt2"], "give --export NAME, or --run"),
        (["-m", "gpt2", "--trained", "--run"], "--trained needs a folder with weights"),
        (["-m", "gtp2", "--run"], "did you mean 'gpt2'?"),
        (["-m", ".", "--run"], "exportcheck: .:"),
        (["-m", "", "--run"], "'' is no model type"),
        (["-m", "gpt2", "--export", "onnx"], "unknown exporter 'onnx' (did you mean 'onnx-dynamo' or"),
        (["-m", "gpt2", "--run", "--patch", "hff"], "unknown patch mode 'hff' (did you mean 'hf'?)"),
        (["-m", "nets.py", "--run"], "name the factory in it too, nets.py:CALLABLE"),
        (["-m", "net.yaml", "--run"], "for a spec there is pytest --exportcheck net.yaml"),
        (["-m", "nest.py:build", "--run"], "there is no file nest.py (did you mean 'nets.py'?)"),
        (["-m", "nets.py:biuld", "--run"], "nets.py has no 'biuld' (did you mean 'build'?)"),
        (["-m", "nets.py:build", "--calls", "nets.py:cals", "--run"], "nets.py has no 'cals'"),
        (["-m", "gpt2", "--calls", "nets.py:build", "--run"], "--calls is for a factory (file.py:callable)"),
        (
            ["-m", "nets.py:build", "--calls", "nets.py:build", "--dynamic-shapes", "none", "--run"],
            "--dynamic-shapes none takes one of the calls",
        ),
    ],
)
def test_validate_wrong_usage(folder: Path, capsys: Any, arguments: list[str], message: str) -> None:
    assert main(["validate", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_folder_gives_its_own_configuration_made_small(folder: Path, capfd: Any) -> None:
    from transformers import GPT2Config

    GPT2Config(n_inner=999, activation_function="relu", vocab_size=500).save_pretrained(folder / "mine")
    assert main(["validate", "-m", "mine", "--run", "-o", "out"]) == 0, capfd.readouterr()
    config = yaml.safe_load((folder / "out" / "mine.yaml").read_text())["model"]["config"]
    assert (config["activation_function"], config["n_inner"], config["n_embd"]) == ("relu", 64, 32)
