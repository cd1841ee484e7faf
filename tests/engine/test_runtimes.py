"""Programs fed by name, outputs by path, and refusals that say so."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from pytest_exportcheck.errors import RunError, SessionError
from pytest_exportcheck.exporters.base import Exported
from pytest_exportcheck.exporters.onnx_dynamo import match_inputs
from pytest_exportcheck.runtimes import onnx_runtime
from pytest_exportcheck.runtimes.base import open_session
from pytest_exportcheck.runtimes.onnx_runtime import OnnxRuntimeSession, is_onnx, provider_for

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

FLOAT = TensorProto.FLOAT


def graph(
    nodes: list[Any], inputs: dict[str, int], outputs: dict[str, int], constants: dict[str, Any] | None = None
) -> onnx.ModelProto:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def identity(kind: int) -> onnx.ModelProto:
    return graph([helper.make_node("Identity", ["x"], ["y"])], {"x": kind}, {"y": kind})


def session(model: Any, inputs: dict[str, str], outputs: list[str], **more: Any) -> Any:
    return open_session(Exported(model, inputs, outputs, **more), "cpu", outputs)


SUBTRACT = graph([helper.make_node("Sub", ["a", "b"], ["c"])], {"a": FLOAT, "b": FLOAT}, {"c": FLOAT})


def test_inputs_are_fed_by_name_whatever_their_order() -> None:
    opened = session(SUBTRACT, {"x.q": "b", "x.k": "a"}, ["out"])
    q, k = torch.tensor([1.0]), torch.tensor([5.0])
    for arguments in ({"x": {"q": q, "k": k}}, {"x": {"k": k, "q": q}}):
        ((path, value),) = opened.run(arguments)
        assert (path, value.tolist()) == ("out", [4.0])


def test_an_input_that_the_graph_does_not_use_is_dropped() -> None:
    opened = session(SUBTRACT, {"x": "a", "y": "b", "unused": "gone"}, ["out"])
    arguments = {
        "x": torch.tensor([1.0]),
        "y": torch.tensor([1.0]),
        "unused": torch.ones(3),
        "n": 3,
        "z": None,
    }
    assert opened.run(arguments)[0][1].tolist() == [0.0]


def test_an_input_that_the_call_does_not_have_is_an_error() -> None:
    opened = session(SUBTRACT, {"x": "a", "y": "b"}, ["out"])
    with pytest.raises(RunError, match="inputs b of the ONNX model have no counterpart in the call"):
        opened.run({"x": torch.ones(1)})


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (TensorProto.FLOAT, torch.float32),
        (TensorProto.FLOAT16, torch.float16),
        (TensorProto.BFLOAT16, torch.bfloat16),
        (TensorProto.DOUBLE, torch.float64),
        (TensorProto.INT64, torch.int64),
        (TensorProto.INT32, torch.int32),
        (TensorProto.INT16, torch.int16),
        (TensorProto.INT8, torch.int8),
        (TensorProto.UINT8, torch.uint8),
        (TensorProto.UINT16, torch.uint16),
        (TensorProto.UINT32, torch.uint32),
        (TensorProto.UINT64, torch.uint64),
        (TensorProto.BOOL, torch.bool),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3), (0,), (2, 0, 3), ()])
def test_every_dtype_and_shape_passes_unchanged(
    kind: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    opened = session(identity(kind), {"x": "x"}, ["y"])
    value = torch.arange(6)[: max(1, torch.Size(shape).numel())].to(torch.float32)
    x = (value - 2 if dtype.is_signed else value).to(dtype)
    x = x.reshape(shape) if x.numel() == torch.Size(shape).numel() else x[:0].reshape(shape)
    ((_, y),) = opened.run({"x": x})
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.tolist() == x.tolist()


def test_special_values_and_views_pass_unchanged() -> None:
    opened = session(identity(TensorProto.BFLOAT16), {"x": "x"}, ["y"])
    x = torch.tensor([[float("nan"), float("inf")], [-float("inf"), -0.0]], dtype=torch.bfloat16)
    for given in (x, x.t(), x[:, 1], x[1:].expand(3, 2)):
        ((_, y),) = opened.run({"x": given})
        assert torch.equal(y.view(torch.int16), given.contiguous().view(torch.int16))


def test_the_output_does_not_share_memory_with_the_runtime() -> None:
    opened = session(identity(FLOAT), {"x": "x"}, ["y"])
    ((_, first),) = opened.run({"x": torch.ones(4)})
    opened.run({"x": torch.zeros(4)})
    assert first.tolist() == [1, 1, 1, 1]


def test_a_dtype_that_onnx_has_not() -> None:
    opened = session(identity(FLOAT), {"x": "x"}, ["y"])
    with pytest.raises(RunError, match=r"input x: ONNX Runtime takes no torch\.complex64"):
        opened.run({"x": torch.ones(1, dtype=torch.complex64)})


def test_constants_and_foreign_values_of_the_exporter() -> None:
    opened = session(
        graph(
            [helper.make_node("Add", ["a", "c"], ["y"]), helper.make_node("Identity", ["c"], ["z"])],
            {"a": FLOAT, "c": FLOAT},
            {"y": FLOAT, "z": FLOAT},
        ),
        {"x": "a"},
        ["out", ""],
        constants={"layers": 3},
        extra_inputs={"c": torch.tensor([10.0])},
    )
    assert [
        (path, getattr(v, "tolist", lambda v=v: v)()) for path, v in opened.run({"x": torch.ones(1)})
    ] == [
        ("out", [11.0]),
        ("layers", 3),
    ]


# refusals


@pytest.mark.parametrize("junk", [b"junk", b"", "no/such/file.onnx"])
def test_a_model_that_cannot_be_loaded(junk: Any) -> None:
    with pytest.raises(SessionError, match="onnxruntime cannot load the model"):
        session(junk, {}, [])


def test_an_operator_without_kernel_is_a_session_error() -> None:
    model = graph(
        [helper.make_node("MatMul", ["x", "x"], ["y"])],
        {"x": TensorProto.BFLOAT16},
        {"y": TensorProto.BFLOAT16},
    )
    with pytest.raises(SessionError, match="NOT_IMPLEMENTED"):
        session(model, {"x": "x"}, ["y"])


def test_outputs_that_do_not_match_in_number() -> None:
    with pytest.raises(SessionError, match=r"has 1 output .y., the model has 2 tensors .a, b."):
        session(identity(FLOAT), {"x": "x"}, ["a", "b"])


def test_a_provider_that_is_not_there() -> None:
    assert provider_for("cuda:1") == "CUDAExecutionProvider"
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(SessionError, match="has no CUDAExecutionProvider"):
        OnnxRuntimeSession(Exported(identity(FLOAT), {"x": "x"}, ["y"]), "cuda")


def test_a_silent_fall_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime warns and takes the CPU where a provider that it lists cannot be loaded (no driver)."""
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    listed = ["CUDAExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    with pytest.raises(SessionError, match="runs on CPUExecutionProvider, not on the asked CUDA"):
        OnnxRuntimeSession(Exported(identity(FLOAT), {"x": "x"}, ["y"]), "cuda:1")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"CPUExecutionProvider": 7}, "no node runs on the asked CUDAExecutionProvider: 7 on CPU"),
        ({"CUDAExecutionProvider": 5, "CPUExecutionProvider": 2}, ""),
        ({}, ""),
    ],
)
def test_the_nodes_of_a_session_tell_where_it_runs(
    nodes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session with CUDA as its first provider, of which no node need be on the GPU."""
    import onnxruntime

    class Fake(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, model: Any, options: Any, providers: Any, **more: Any) -> None:
            assert providers == [("CUDAExecutionProvider", {"device_id": 1})]
            super().__init__(model, options, providers=["CPUExecutionProvider"])

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Fake)
    monkeypatch.setattr(onnx_runtime, "_nodes_by_provider", lambda session: nodes)
    exported = Exported(identity(FLOAT), {"x": "x"}, ["y"])
    if message:
        with pytest.raises(SessionError, match=message):
            OnnxRuntimeSession(exported, "cuda:1")
    else:
        facts = OnnxRuntimeSession(exported, "cuda:1").facts
        assert facts["providers"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
        assert facts["nodes_by_provider"] == nodes


def test_the_record_has_the_provider_of_every_node() -> None:
    opened = session(SUBTRACT, {"x": "a", "y": "b"}, ["out"])
    assert opened.facts["providers"] == ["CPUExecutionProvider"]
    assert opened.facts["nodes_by_provider"] == {"CPUExecutionProvider": 1}


def test_what_is_no_program() -> None:
    with pytest.raises(SessionError, match="returned a int"):
        session(42, {}, [])


# forms of a model


def forms(folder: Path) -> dict[str, Any]:
    import onnx_ir

    model = graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        {"x": FLOAT},
        {"y": FLOAT},
        {"w": torch.full((64,), 3.0).numpy()},
    )
    onnx.save(model, folder / "saved.onnx")
    return {
        "proto": model,
        "bytes": model.SerializeToString(),
        "path": folder / "saved.onnx",
        "text": str(folder / "saved.onnx"),
        "ir": onnx_ir.from_proto(model),
    }


@pytest.mark.parametrize("form", ["proto", "bytes", "path", "text", "ir"])
@pytest.mark.parametrize("limit", [onnx_runtime._INLINE_LIMIT, 1])
def test_every_form_runs_with_weights_inside_and_beside(
    form: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runtime, "_INLINE_LIMIT", limit)
    model = forms(tmp_path)[form]
    assert is_onnx(model)
    opened = session(model, {"x": "x"}, ["y"])
    ((_, y),) = opened.run({"x": torch.ones(64)})
    assert y.tolist() == [4.0] * 64
    assert opened.facts["nodes"] == 1
    assert opened.facts["operators"] == {"Add": 1}
    assert opened.facts["opset"] == 20
    assert opened.facts["model_bytes"] >= 256


def test_saving_beside_leaves_the_exporters_model_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runtime, "_INLINE_LIMIT", 1)
    for form in ("proto", "ir"):
        model = forms(tmp_path)[form]
        for _ in range(2):
            opened = session(model, {"x": "x"}, ["y"])
            assert opened.run({"x": torch.ones(64)})[0][1].tolist() == [4.0] * 64
            del opened


def _large() -> onnx.ModelProto:
    return graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": FLOAT},
        {"y": FLOAT},
        {"w": torch.rand(64, 64, generator=torch.Generator().manual_seed(0)).numpy()},
    )


@pytest.mark.parametrize("form", ["proto", "ir"])
def test_large_weights_lie_beside_the_model_while_the_session_lives(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx_ir

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    proto = _large()
    before = proto.SerializeToString()
    model = proto if form == "proto" else onnx_ir.from_proto(proto)
    inline = session(model, {"x": "x"}, ["y"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(onnx_runtime, "_INLINE_LIMIT", 64 * 64 * 4)
    beside = session(model, {"x": "x"}, ["y"])
    (data,) = tmp_path.glob("*/model.onnx.data")
    assert data.stat().st_size == 64 * 64 * 4
    x = torch.rand(3, 64)
    assert torch.equal(inline.run({"x": x})[0][1], beside.run({"x": x})[0][1])
    sizes = [opened.facts.pop("model_bytes") for opened in (inline, beside)]
    assert abs(sizes[0] - sizes[1]) < 200
    assert inline.facts == beside.facts
    # The exporter's model is as it was.
    assert proto.SerializeToString() == before
    del beside
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_failure_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx_ir

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx_ir, "save", full)
    monkeypatch.setattr(onnx_runtime, "_INLINE_LIMIT", 1)
    opened = session(_large(), {"x": "x"}, ["y"])
    assert opened.run({"x": torch.ones(1, 64)})[0][1].shape == (1, 64)
    monkeypatch.setattr(onnx_runtime, "_MESSAGE_LIMIT", 1)
    with pytest.raises(SessionError, match="No space left"):
        session(_large(), {"x": "x"}, ["y"])


# callables and exported programs


def test_a_callable() -> None:
    def program(x: Any, items: Any) -> Any:
        x.add_(1)
        return {"y": x + items[0], "n": 3, "none": None}

    opened = session(program, {}, ["y"])
    x = torch.zeros(2)
    for _ in range(2):
        got = dict(opened.run({"x": x, "items": [torch.ones(2)]}))
        assert got["y"].tolist() == [2, 2]
        assert (got["n"], got["none"]) == (3, None)
    assert x.tolist() == [0, 0]


def test_an_exported_program_checks_its_guards() -> None:
    program = torch.export.export(torch.nn.Linear(3, 2), (), kwargs={"input": torch.ones(4, 3)})
    opened = session(program, {}, ["output"])
    ((path, value),) = opened.run({"input": torch.ones(4, 3)})
    assert (path, tuple(value.shape)) == ("output", (4, 2))
    with pytest.raises(AssertionError, match="Guard failed"):
        opened.run({"input": torch.ones(5, 3)})


# names that the dynamo exporter gives


def test_matching_inputs_with_constants_among_the_leaves() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x[0] + x[3] * x[2]

    program = torch.export.export(Net(), (), kwargs={"x": [torch.ones(1), None, 2, torch.ones(1)]})
    matched = match_inputs(program, ["x.0", "x.1", "x.2", "x.3"], ["x_0", "x_3_orig"])
    assert matched == {"x.0": "x_0", "x.3": "x_3_orig"}


ONNX_CASES = {
    "pass-through": """
        def forward(self, x, y):
            return {"same": x, "sum": x + y}
    """,
    "pass-through-twice": """
        def forward(self, x, y):
            return x, x, x + y, y
    """,
    "one-result-twice": """
        def forward(self, x, y):
            z = x + y
            return {"a": z, "b": z, "c": [z]}
    """,
    "unused": """
        def forward(self, x, y):
            return x * 2
    """,
    "sizes": """
        def forward(self, x, y):
            return {"z": x + y, "n": x.shape[0]}
    """,
    "none": """
        def forward(self, x, y):
            return None, x + y, {"n": None}
    """,
    "constant-tensor": """
        def forward(self, x, y):
            return x + y, torch.arange(3)
    """,
    "nested": """
        def forward(self, x, y):
            return [(x + y, {"k": [x - y]})]
    """,
}


@pytest.mark.parametrize("kind", ONNX_CASES)
def test_outputs_of_every_shape_through_onnx(kind: str, tmp_path: Path) -> None:
    source = f"class Net(nn.Module):\n{ONNX_CASES[kind].strip(chr(10))}\n"
    source = source.replace("\n        ", "\n    ") + CALLS
    run = make_run(tmp_path, source)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert record["onnx_inputs"]


CALLS = """

def build_model():
    return Net()


def calls():
    make = lambda n: ((torch.arange(n * 2.0).reshape(n, 2), torch.ones(n, 2)), {})
    return [make(2), make(3)]
"""


# feeding, in a case


def feed(folder: Path, forward: str, calls: str, exporter: str = "onnx-dynamo") -> tuple[str, Any, Any]:
    """Verdict of a model with `forward` (its arguments and body) on `calls`, a list."""
    text = (
        f"class Net(nn.Module):\n    def forward(self, {forward}\n\n\n"
        f"def build_model():\n    return Net()\n\n\ndef calls():\n    return {calls}\n"
    )
    return verdict(make_run(folder, text), exporter)


EXPORTERS = ["torch-export", "onnx-dynamo", "onnx-torchscript"]


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("values", [("2", "3"), ("2", "2.0"), ("True", "1"), ("'a'", "'b'"), ("2", "None")])
def test_another_value_of_a_baked_scalar_is_never_run_silently(
    values: tuple[str, str], exporter: str, tmp_path: Path
) -> None:
    calls = ", ".join(
        f"((torch.ones({n}, 3), {value}), {{}})" for n, value in zip((2, 4), values, strict=True)
    )
    forward = "x, n):\n        return x * (3 if n is None else len(n) if isinstance(n, str) else n)"
    stage, error, _ = feed(tmp_path, forward, f"[{calls}]", exporter)
    assert stage == "observe", error
    assert "argument n" in str(error)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_scalar_inside_a_container_is_never_run_silently(exporter: str, tmp_path: Path) -> None:
    forward = "items):\n        return items[0] * items[1]"
    calls = "[(([torch.ones(n, 3), n],), {}) for n in (2, 4)]"
    stage, error, _ = feed(tmp_path, forward, calls, exporter)
    assert stage == "observe", error
    assert "items.1" in str(error)
    same = calls.replace("3), n]", "3), 5]")
    assert feed(tmp_path, forward, same, exporter)[0] == "pass"


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_tensor_in_one_call_and_a_number_in_another(exporter: str, tmp_path: Path) -> None:
    stage, error, _ = feed(
        tmp_path,
        "x, n):\n        return x * n",
        "[((torch.ones(2, 3), torch.tensor(2.0)), {}), ((torch.ones(4, 3), 3.0), {})]",
        exporter,
    )
    assert stage == "observe", error
    assert "n" in str(error)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_int32_in_one_call_and_int64_in_another(exporter: str, tmp_path: Path) -> None:
    stage, error, _ = feed(
        tmp_path,
        "x):\n        return x + 1",
        "[((torch.ones(2, 3, dtype=torch.int32),), {}), ((torch.ones(4, 3, dtype=torch.int64),), {})]",
        exporter,
    )
    assert stage == "observe", error
    assert "int32" in str(error)
    assert "int64" in str(error)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "float64", "uint8"])
def test_inputs_keep_their_dtype(dtype: str, exporter: str, tmp_path: Path) -> None:
    stage, error, _ = feed(
        tmp_path,
        "x, y):\n        return x, torch.where(x > 0, y, -y)",
        f"[((torch.ones(n, 3).to(torch.{dtype}), torch.ones(n, 3)), {{}}) for n in (2, 4)]",
        exporter,
    )
    assert stage == "pass", error


def test_a_wrong_dtype_is_refused_not_converted() -> None:
    opened = session(identity(TensorProto.INT64), {"x": "x"}, ["y"])
    with pytest.raises(Exception, match="Unexpected input data type"):
        opened.run({"x": torch.ones(2, dtype=torch.int32)})


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_dict_keys_in_any_order(exporter: str, tmp_path: Path) -> None:
    stage, error, _ = feed(
        tmp_path,
        "d):\n        return d['a'] - 2 * d['b']",
        "[(({'a': torch.ones(2, 3), 'b': torch.zeros(2, 3)},), {}), "
        "(({'b': torch.zeros(4, 3), 'a': torch.ones(4, 3)},), {})]",
        exporter,
    )
    assert stage == "pass", error


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_keywords_in_any_order_and_by_position(exporter: str, tmp_path: Path) -> None:
    stage, error, _ = feed(
        tmp_path,
        "a, b):\n        return a - 2 * b",
        "[((torch.ones(2, 3), torch.zeros(2, 3)), {}), "
        "((), {'b': torch.zeros(4, 3), 'a': torch.ones(4, 3)})]",
        exporter,
    )
    assert stage == "pass", error


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_empty_input_in_one_call(exporter: str, tmp_path: Path) -> None:
    stage, error, record = feed(
        tmp_path,
        "x, past):\n        return torch.cat([past, x], dim=1)",
        "[((torch.ones(2, 3, 4), torch.ones(2, p, 4)), {}) for p in (0, 5)]",
        exporter,
    )
    assert stage == "pass", error
    assert record["calls"] == 2


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_optional_input_that_one_call_lacks_is_no_pass(exporter: str, tmp_path: Path) -> None:
    stage, error, _ = feed(
        tmp_path,
        "x, mask=None):\n        return x if mask is None else x * mask",
        "[((torch.ones(2, 3),), {}), ((torch.ones(4, 3),), {'mask': torch.zeros(4, 3)})]",
        exporter,
    )
    assert stage == "observe", error
    assert "call 0 has no mask" in str(error)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_input_returned_and_one_unused(exporter: str, tmp_path: Path) -> None:
    stage, error, record = feed(
        tmp_path,
        "x, unused, y):\n        return {'same': x, 'sum': x + y}",
        "[(tuple(torch.full((n, 3), float(k)) for k in range(3)), {}) for n in (2, 4)]",
        exporter,
    )
    assert stage == "pass", error
    if exporter.startswith("onnx"):
        assert set(record["unused_inputs"]) <= {"unused"}


def test_the_size_of_a_model_does_not_depend_on_where_its_source_lies() -> None:
    sizes = []
    for folder in ("a", "a/long/path/to/the/source/of/a/model"):
        model = graph([helper.make_node("Identity", ["x"], ["y"])], {"x": FLOAT}, {"y": FLOAT})
        note = model.graph.node[0].metadata_props.add()
        note.key, note.value = "pkg.torch.onnx.stack_trace", f'File "{folder}/model.py", line 3'
        sizes.append(session(model, {"x": "x"}, ["out"]).facts["model_bytes"])
    assert sizes[0] == sizes[1]
    assert sizes[0] > 20
