"""The built-in exporters on a tiny model, and foreign ones that misbehave."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_exportcheck.exporters.base import Exported, flat_forward, split_constants
from pytest_exportcheck.exporters.onnx_dynamo import quiet_logs
from pytest_exportcheck.exporters.rnn import fresh_dispatch
from pytest_exportcheck.observe import CallSignature
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.registry import EXPORTERS, register_exporter

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

BUILT_IN = ["torch-export", "torch-export-strict", "onnx-dynamo", "onnx-torchscript"]

TWO_OUTPUTS = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x, scale: float = 1.0, flag=None, **extra):
            y = self.linear(x) * scale
            if flag == "double":
                y = y * 2
            return {"y": y + extra["bias"], "total": y.sum(1)}


    def build_model():
        torch.manual_seed(0)
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        more = {"scale": 3.0, "flag": "double", "bias": torch.ones(3)}
        return [((torch.randn(n, 4, generator=g),), more) for n in (2, 5)]
"""


@pytest.fixture(scope="module")
def two_outputs(tmp_path_factory: pytest.TempPathFactory) -> SpecRun:
    return make_run(tmp_path_factory.mktemp("two"), TWO_OUTPUTS)


@pytest.mark.parametrize("exporter", BUILT_IN)
def test_two_outputs_constants_and_extra_keywords(two_outputs: SpecRun, exporter: str) -> None:
    stage, error, record = verdict(two_outputs, exporter)
    assert stage == "pass", error
    assert [output["path"] for output in record["outputs"]] == ["y", "total"]
    assert record["calls"] == 2
    assert record["resize"]["passed"]
    assert set(record["durations"]) == {
        "load", "observe", "patch", "export", "session", "run", "compare", "resize",
        *(["convert"] if exporter.startswith("onnx") else []),
    } - ({"observe"} if "observe" not in record["durations"] else set())  # fmt: skip


def test_transformers_exporter_in_a_case(tmp_path: Path) -> None:
    run = make_run(tmp_path, LLAMA, name="llama")
    stage, error, record = verdict(run, "transformers-onnx", "own")
    assert stage == "pass", error
    assert record["observed_under"] == "hf"
    assert "forward" not in vars(run.model("cpu", "float32"))


def test_the_exporter_of_an_older_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.24 the capture has no method of its own, and an `ONNXProgram` is returned."""
    from transformers.exporters import OnnxExporter
    from transformers.exporters.exporter_dynamo import DynamoExporter

    export, capture = OnnxExporter.export, DynamoExporter.export_program

    def old_export(self: Any, *args: Any, **kwargs: Any) -> Any:
        DynamoExporter.export_program = capture
        try:
            return SimpleNamespace(model=export(self, *args, **kwargs).program)
        finally:
            del DynamoExporter.export_program

    monkeypatch.setattr(OnnxExporter, "export", old_export)
    monkeypatch.delattr(DynamoExporter, "export_program")
    stage, error, record = verdict(make_run(tmp_path, LLAMA, name="llama"), "transformers-onnx", "own")
    assert stage == "pass", error
    assert record["nodes"] > 0


def test_an_adapter_that_does_not_know_its_exporter_blames_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.exporters import OnnxExporter

    monkeypatch.setattr(OnnxExporter, "export", lambda *args, **kwargs: SimpleNamespace())
    stage, error, _ = verdict(make_run(tmp_path, LLAMA, name="llama"), "transformers-onnx", "own")
    assert stage == "export"
    assert error is not None
    assert any("adapter of the exporter" in line for line in error.details), error.details


def test_the_capture_of_the_transformers_exporter_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.exporters.exporter_dynamo import DynamoExporter

    run = make_run(tmp_path, LLAMA_WITH_CACHE, name="llama")
    stage, error, record = verdict(run, "transformers-onnx", "own")
    assert stage == "pass", error
    assert record["captured"] == {"agrees": 2, "refuses": [], "differs": []}
    capture = DynamoExporter.export_program

    def wrong(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        program, metadata = capture(self, model, *args, **kwargs)
        weight = program.state_dict["lm_head.weight"]
        program._state_dict["lm_head.weight"] = torch.nn.Parameter(weight * 1.01)
        return program, metadata

    monkeypatch.setattr(DynamoExporter, "export_program", wrong)
    stage, error, record = verdict(run, "transformers-onnx", "own")
    assert stage == "export"
    assert "the captured program already differs from eager, call 1 of 2: 1 of 3 outputs" in str(error)
    assert record["captured"]["agrees"] == 0


LLAMA_WITH_CACHE = """
    def build_model():
        from transformers import MistralConfig, MistralForCausalLM

        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=32, max_position_embeddings=64, sliding_window=8))


    def calls():
        from transformers import DynamicCache

        g = torch.Generator().manual_seed(0)
        found = []
        for batch, past, length in ((2, 3, 2), (3, 5, 4)):
            cache = DynamicCache()
            cache.update(*torch.randn(2, batch, 1, past, 8, generator=g).unbind(0), 0)
            ids = torch.randint(0, 32, (batch, length), generator=g)
            found.append(((), {"input_ids": ids, "cache": cache}))
        return found
"""


LLAMA = """
    def build_model():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=32, max_position_embeddings=64))


    def calls():
        g = torch.Generator().manual_seed(0)
        ids = lambda *shape: torch.randint(0, 32, shape, generator=g)
        return [((), {"input_ids": ids(*s), "use_cache": False}) for s in ((2, 5), (3, 7))]
"""


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_keys_that_read_alike_are_two_outputs(tmp_path: Path, exporter: str) -> None:
    source = """
    def build_model():
        class Net(nn.Module):
            def forward(self, x):
                return {1: x + 1, "1": x * 2}

        return Net()


    def calls():
        return [((torch.rand(n, 4),), {}) for n in (2, 5)]
    """
    stage, error, record = verdict(make_run(tmp_path, source), exporter)
    assert stage == "pass", error
    assert [output["path"] for output in record["outputs"]] == ["1", "\\1"]


@pytest.mark.parametrize("value", ["3", "2.5", "True", "'a'"])
def test_an_output_that_is_no_tensor_is_named(tmp_path: Path, value: str) -> None:
    source = f"""
    def build_model():
        class Net(nn.Module):
            def forward(self, x):
                return {{"y": x + 1, "none": None, "more": [x * 2, {value}]}}

        return Net()


    def calls():
        return [((torch.rand(n, 4),), {{}}) for n in (2, 5)]
    """
    run = make_run(tmp_path, source)
    assert verdict(run, "torch-export")[0] == "pass"
    stage, error, _ = verdict(run, "onnx-dynamo")
    kind = type(ast.literal_eval(value)).__name__
    assert stage == "convert"
    assert error is not None
    assert error.message == (
        f"torch.onnx.export converts no outputs that are no tensors: more.1 ({kind} {value}): "
        f"AttributeError: {kind!r} object has no attribute 'name'"
    )


def test_options_are_passed(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        TWO_OUTPUTS,
        "exporter_options: {onnx-dynamo: {opset_version: 20}, onnx-torchscript: {opset_version: 14}}",
    )
    assert verdict(run, "onnx-dynamo")[2]["opset"] == 20
    assert verdict(run, "onnx-torchscript")[2]["opset"] == 14
    run = make_run(tmp_path, TWO_OUTPUTS, "exporter_options: {torch-export: {nonsense: 1}}")
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "export"
    assert "nonsense" in str(error)


def test_an_axis_that_becomes_constant_fails_at_export(tmp_path: Path) -> None:
    source = """
    def build_model():
        class Net(nn.Module):
            def forward(self, x):
                return x + torch.ones(5, 2)
        return Net()


    def calls():
        return [((torch.ones(1, 2),), {}), ((torch.ones(5, 2),), {})]
    """
    run = make_run(tmp_path, source)
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, _ = verdict(run, exporter)
        assert stage == "export"
        assert error is not None
        assert f"{exporter} refuses the model" in error.message
    # The tracer of TorchScript keeps the operator, which broadcasts 1 and 5 alike: right, and a pass.
    assert verdict(run, "onnx-torchscript")[0] == "pass"


class Foreign:
    """An exporter of a user; `behave` is what it does."""

    name = "foreign"

    def __init__(self, behave: Any) -> None:
        self.behave = behave

    def export(self, request: Any) -> Any:
        return self.behave(request)


@pytest.fixture
def foreign() -> Iterator[Any]:
    def add(behave: Any) -> None:
        register_exporter("foreign", Foreign(behave))

    yield add
    EXPORTERS.unregister("foreign")


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("behave", "stage", "message"),
    [
        (
            lambda request: _raise(ValueError("no way")),
            "export",
            "foreign refuses the model: ValueError: no way",
        ),
        (lambda request: _raise(ValueError()), "export", "ValueError: no message"),
        (lambda request: sys.exit(3), "export", "sys.exit(3) was called"),
        (lambda request: None, "export", "foreign returned a NoneType, not an Exported"),
        (lambda request: {"program": 1}, "export", "foreign returned a dict, not an Exported"),
        (lambda request: Exported(42), "session", "returned a int: expected an ExportedProgram"),
        (lambda request: Exported(b"junk"), "session", "onnxruntime cannot load the model"),
        (
            lambda request: Exported(lambda **kwargs: _raise(RuntimeError("late"))),
            "run",
            "RuntimeError: late",
        ),
        (lambda request: Exported(lambda **kwargs: torch.zeros(1)), "compare", "outputs differ"),
        (lambda request: Exported(lambda **kwargs: None), "compare", "outputs differ"),
    ],
)
def test_a_foreign_exporter(
    two_outputs: SpecRun, foreign: Any, behave: Any, stage: str, message: str
) -> None:
    foreign(behave)
    found, error, _ = verdict(two_outputs, "foreign")
    assert found == stage, error
    assert message in str(error)
    assert "forward" not in vars(two_outputs.model("cpu", "float32"))


def test_an_exporter_that_writes_into_its_arguments_harms_nobody(two_outputs: SpecRun, foreign: Any) -> None:
    def behave(request: Any) -> Exported:
        request.kwargs["x"].fill_(float("nan"))
        request.kwargs.clear()
        raise RuntimeError("done")

    foreign(behave)
    assert verdict(two_outputs, "foreign")[0] == "export"
    assert verdict(two_outputs, "torch-export")[0] == "pass"


def test_a_failure_in_conversion_is_one_of_convert(two_outputs: SpecRun, foreign: Any) -> None:
    def behave(request: Any) -> Any:
        with request.stage("convert"):
            raise RuntimeError("cannot convert")

    foreign(behave)
    stage, error, _ = verdict(two_outputs, "foreign")
    assert stage == "convert"
    assert "cannot convert" in str(error)


def test_an_unknown_exporter(two_outputs: SpecRun) -> None:
    stage, error, _ = verdict(two_outputs, "torch-exprt")
    assert stage == "export"
    assert "did you mean 'torch-export'?" in str(error)


# flat_forward


class Net(torch.nn.Module):
    def forward(self, x: Any, /, n: int, *rest: Any, scale: float = 1.0, **extra: Any) -> Any:
        return x * n * scale + sum(rest) + extra["bias"]

    def other(self, x: Any) -> Any:
        return x - 1


ARGUMENTS = {
    "x": torch.ones(2),
    "n": 2,
    "rest_0": torch.ones(2),
    "rest_1": 5,
    "scale": 3.0,
    "bias": torch.ones(2),
}


def test_flat_forward_takes_the_tensors_by_name_and_bakes_the_rest() -> None:
    net = Net()
    signature = CallSignature.of(net.forward)
    with flat_forward(net, "forward", signature, ARGUMENTS) as kwargs:
        assert list(kwargs) == ["x", "rest_0", "bias"]
        assert kwargs["x"] is not ARGUMENTS["x"]
        assert net(**kwargs).tolist() == [13, 13]
        assert net(*kwargs.values()).tolist() == [13, 13]
        program = torch.export.export(net, (), kwargs=kwargs)
    assert vars(net).keys() == vars(Net()).keys()
    assert program.module()(**kwargs).tolist() == [13, 13]


def test_flat_forward_of_another_method() -> None:
    net = Net()
    with flat_forward(net, "other", CallSignature.of(net.other), {"x": torch.ones(2)}) as kwargs:
        assert net(**kwargs).tolist() == [0, 0]
    assert "forward" not in vars(net)


@pytest.mark.parametrize("mine", [False, True])
def test_flat_forward_leaves_nothing_even_after_an_error(mine: bool) -> None:
    net = Net()
    if mine:
        net.forward = lambda x: x
    before = dict(vars(net))

    def export() -> None:
        with flat_forward(net, "forward", CallSignature.of(net.forward), {"x": torch.ones(1)}):
            # An exporter may leave a `forward` of its own.
            net.forward = lambda x: x + 100
            raise RuntimeError

    with pytest.raises(RuntimeError):
        export()
    assert vars(net) == before


def test_constants_are_arguments_without_a_tensor() -> None:
    tensors, constants = split_constants(
        {"a": torch.ones(1), "b": [1, {"c": torch.ones(1)}], "d": [1, None], "e": None}
    )
    assert list(tensors) == ["a", "b"]
    assert list(constants) == ["d", "e"]


# what recurrent layers leave behind


def test_recurrent_operators_dispatch_as_in_a_fresh_process() -> None:
    """Fails when torch moves the cache that `exporters.rnn` clears."""
    operator = torch.ops.aten.gru.input
    assert isinstance(operator._dispatch_cache, dict)
    with fresh_dispatch():
        operator._dispatch_cache["stale"] = None
    assert not operator._dispatch_cache
    from torch.export import _patches

    assert callable(_patches.register_gru_while_loop_decomposition)
    assert callable(_patches.register_lstm_while_loop_decomposition)


@pytest.mark.parametrize(
    ("exporter", "option", "meant"),
    [
        ("torch-export", "prefer_deferred", "known: preserve_module_call_signature, prefer_deferred"),
        ("torch-export-strict", "strict", "known: preserve_module_call_signature, prefer_deferred"),
        ("onnx-dynamo", "opset", "did you mean 'opset_version'?"),
        ("onnx-dynamo", "optimise", "did you mean 'optimize'?"),
        ("onnx-torchscript", "opset-version", "did you mean 'opset_version'?"),
        ("transformers-onnx", "ort_fusion", "did you mean 'ort_fusions'?"),
    ],
)
def test_an_option_that_an_exporter_has_not_is_told_at_once(
    tmp_path: Path, exporter: str, option: str, meant: str
) -> None:
    run = make_run(tmp_path, TWO_OUTPUTS, f"exporter_options: {{{exporter}: {{{option}: 20}}}}\n")
    stage, error, _ = verdict(run, exporter)
    assert stage == "export"
    assert f": {exporter} has no option {option!r} (" in str(error)
    assert meant in str(error)
    assert not run._models  # before the model is built


@pytest.mark.parametrize(("opset", "expected"), [(999, "convert"), (20, "pass")])
def test_a_pass_is_about_the_opset_that_was_asked_for(tmp_path: Path, opset: int, expected: str) -> None:
    options = f"exporter_options: {{onnx-dynamo: {{opset_version: {opset}}}}}\n"
    stage, error, record = verdict(make_run(tmp_path, TWO_OUTPUTS, options), "onnx-dynamo")
    assert stage == expected
    if error is None:
        assert record["opset"] == opset
    else:
        assert error.message.startswith(
            "opset_version: 999 was asked for, and torch.onnx made a model of opset "
        )


def test_what_torch_logs_of_every_conversion_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A filter of the message: other warnings of the same loggers, and those of later exports, stay."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    core = logging.getLogger("torch.onnx._internal.exporter._core")
    with caplog.at_level(logging.WARNING):
        with quiet_logs():
            registration.warning("Failed to infer the signature for function '%s' because '%s'", "f", "no")
            core.warning("Skipping constant argument %s", "x")
            core.warning("a dtype is not known")
        core.warning("Skipping constant argument %s", "y")
    assert caplog.messages == ["a dtype is not known", "Skipping constant argument y"]
