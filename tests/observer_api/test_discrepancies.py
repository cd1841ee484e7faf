"""`check_discrepancies`: numbers of an ONNX model on the recorded calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import pytest
import torch
from onnx import TensorProto

from pytest_exportcheck import InputObserver, make_dynamic_cache

from .helpers import call, f, module, observe

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning", "ignore::UserWarning")

KEYS = {
    "abs", "rel", "sum", "n", "dnan", "dev", ">0.1", ">0.01", "SUCCESS", "index", "duration_torch",
    "ort_duration", "n_inputs", "n_none", "n_empty", "atol", "rtol", "inputs", "outputs_torch", "outputs_ort",
}  # fmt: skip


def graph(
    nodes: list[Any], inputs: dict[str, int], outputs: dict[str, int], constants: dict[str, Any] | None = None
) -> onnx.ModelProto:
    """An ONNX model; inputs and outputs are name -> element type, of any shape."""
    made = oh.make_graph(
        nodes,
        "g",
        [oh.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [oh.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return oh.make_model(made, opset_imports=[oh.make_opsetid("", 18)], ir_version=10)


FLOAT, DOUBLE, INT64, BOOL = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL


def subtract() -> InputObserver:
    return observe(lambda x, y: x - y, *(call(x=f(2, n), y=f(1, n)) for n in (3, 4, 5)))


def sub(a: str, b: str, inputs: list[str]) -> onnx.ModelProto:
    return graph([oh.make_node("Sub", [a, b], ["out"])], dict.fromkeys(inputs, FLOAT), {"out": FLOAT})


def test_a_right_model_in_every_form(tmp_path: Path) -> None:
    observer, model = subtract(), sub("x", "y", ["x", "y"])
    onnx.save(model, tmp_path / "m.onnx")
    for given in (model, tmp_path / "m.onnx", str(tmp_path / "m.onnx"), model.SerializeToString()):
        rows = observer.check_discrepancies(given)
        assert [row["index"] for row in rows] == [0, 1, 2]
        for row in rows:
            assert set(row) == KEYS
            assert row["abs"] < 1e-5
            assert row["SUCCESS"] is True
            assert (row["n_inputs"], row["n_none"], row["n_empty"]) == (2, 0, 0)
    assert "T1s2x3" in observer.check_discrepancies(model)[0]["inputs"]
    assert "inputs" not in observer.check_discrepancies(model, include_io=False)[0]


def test_an_exported_program_of_torch() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any, items: Any, unused: Any = None) -> Any:
            return x + items[0], None, x.sum()

    observer = observe(Net(), *(call(x=f(2, n), items=[f(2, n)], unused=f(n)) for n in (3, 4)))
    shapes = observer.infer_dynamic_shapes()
    kwargs = observer.infer_arguments()
    program = torch.onnx.export(Net(), (), kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert all(row["SUCCESS"] for row in observer.check_discrepancies(program))


def test_a_constant_is_no_input_of_the_onnx_model() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any, y: Any, add: bool = True) -> Any:
            return x + y if add else x - y

    observer = observe(Net(), *(call(x=f(2, n), y=f(1, n), add=False) for n in (3, 4)))
    shapes = observer.infer_dynamic_shapes(dim_names=True)
    kwargs = observer.infer_arguments()
    program = torch.onnx.export(Net(), (), kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert [value.name for value in program.model.graph.inputs] == ["x", "y"]
    assert all(row["SUCCESS"] for row in observer.check_discrepancies(program))


def test_inputs_are_fed_by_name_whatever_their_order() -> None:
    assert all(row["SUCCESS"] for row in subtract().check_discrepancies(sub("x", "y", ["y", "x"])))
    wrong = subtract().check_discrepancies(sub("y", "x", ["x", "y"]))
    assert not any(row["SUCCESS"] for row in wrong)
    assert wrong[0]["abs"] > 0.01


def test_an_input_that_the_exporter_dropped() -> None:
    observer = observe(lambda x, y: -x, *(call(f(2, n), f(n)) for n in (3, 4)))
    model = graph([oh.make_node("Neg", ["x"], ["out"])], {"x": FLOAT}, {"out": FLOAT})
    assert all(row["SUCCESS"] for row in observer.check_discrepancies(model))


def test_names_of_the_exporters_user() -> None:
    observer = subtract()
    assert all(
        row["SUCCESS"] for row in observer.check_discrepancies(sub("left", "right", ["left", "right"]))
    )
    rows = observer.check_discrepancies(sub("left", "left", ["left"]))
    assert "left" in rows[0]["error"]
    assert rows[0]["SUCCESS"] is False


def test_exact_equality_is_a_success() -> None:
    model = graph([oh.make_node("Identity", ["x"], ["out"])], {"x": FLOAT}, {"out": FLOAT})
    row = observe(lambda x: x, call(f(3))).check_discrepancies(model)[0]
    assert row["abs"] == 0
    assert row["SUCCESS"] is True


def constant(value: Any, kind: int) -> onnx.ModelProto:
    return graph([oh.make_node("Identity", ["c"], ["out"])], {}, {"out": kind}, {"c": value})


@pytest.mark.parametrize(
    ("expected", "got", "kind", "success"),
    [
        (torch.ones(2), np.ones(2, np.float32), FLOAT, True),
        (torch.ones(2, dtype=torch.float64), np.ones(2, np.float32), FLOAT, False),
        (torch.ones(2, dtype=torch.int64), np.ones(2, np.float32), FLOAT, False),
        (torch.ones(2, dtype=torch.bool), np.ones(2, np.float32), FLOAT, False),
        (torch.ones(2, dtype=torch.bool), np.ones(2, np.bool_), BOOL, True),
        (torch.ones(2, dtype=torch.int64), np.array([1, 2]), INT64, False),
        (torch.tensor([float("nan"), 1]), np.array([np.nan, 1], np.float32), FLOAT, True),
        (torch.tensor([float("nan"), 1]), np.array([1e10, 1], np.float32), FLOAT, False),
        (torch.tensor([1.0, 1]), np.array([np.nan, 1], np.float32), FLOAT, False),
        (torch.tensor([float("inf"), 1]), np.array([np.inf, 1], np.float32), FLOAT, True),
        (torch.tensor([float("inf"), 1]), np.array([-np.inf, 1], np.float32), FLOAT, False),
        (torch.ones(2), np.ones((2, 1), np.float32), FLOAT, False),
        (torch.zeros(2), np.zeros(2, np.float32), FLOAT, True),
        (torch.full((2,), 0.05), np.full(2, 0.05 + 1e-2, np.float32), FLOAT, False),
    ],
)
def test_verdicts(expected: torch.Tensor, got: Any, kind: int, success: bool) -> None:
    row = observe(lambda x: expected, call(f(2))).check_discrepancies(constant(got, kind))[0]
    assert row["SUCCESS"] is success, row
    assert ("error" in row) == (expected.dtype != torch.from_numpy(got).dtype or expected.shape != got.shape)


def test_a_large_atol_does_not_hide_an_error_of_small_outputs() -> None:
    expected = torch.linspace(-0.098, 0.098, 5)
    got = expected.flip(0).numpy().copy()
    row = observe(lambda x: expected, call(f(2))).check_discrepancies(constant(got, FLOAT), atol=0.5)[0]
    assert row["abs"] > 0.15
    assert row["SUCCESS"] is False


def test_an_output_that_is_none_is_dropped() -> None:
    observer = observe(lambda x: (None, x), call(f(2)))
    model = graph([oh.make_node("Identity", ["x"], ["out"])], {"x": FLOAT}, {"out": FLOAT})
    assert observer.check_discrepancies(model)[0]["SUCCESS"] is True
    row = observer.check_discrepancies(model, skip_none=False)[0]
    assert row["SUCCESS"] is False
    assert "1 output instead of 2" in row["error"]


def test_a_number_of_outputs_that_is_wrong() -> None:
    row = observe(lambda x: (x, x), call(f(2))).check_discrepancies(
        graph([oh.make_node("Identity", ["x"], ["out"])], {"x": FLOAT}, {"out": FLOAT})
    )[0]
    assert row["abs"] == float("inf")
    assert row["SUCCESS"] is False


def test_a_call_that_raised_does_not_shift_the_others() -> None:
    def forward(x: Any) -> Any:
        if x.shape[0] == 3:
            raise RuntimeError("refused")
        return -x

    net, observer = module(forward), InputObserver()
    with observer(net):
        net(f(2))
        with pytest.raises(RuntimeError, match="refused"):
            net(f(3))
        net(f(4))
    model = graph([oh.make_node("Neg", ["x"], ["out"])], {"x": FLOAT}, {"out": FLOAT})
    assert [row["SUCCESS"] for row in observer.check_discrepancies(model)] == [True, True]


def test_missing_tensors_are_counted_and_fed_empty() -> None:
    def forward(x: Any, y: Any = None) -> Any:
        return x if y is None else torch.cat([x, y])

    observer = observe(forward, call(x=f(3)), call(x=f(3), y=f(4)), call(x=f(3), y=f(5)))
    model = graph(
        [oh.make_node("Concat", ["x", "y"], ["out"], axis=0)], {"x": FLOAT, "y": FLOAT}, {"out": FLOAT}
    )
    rows = observer.check_discrepancies(model)
    assert [(row["n_none"], row["n_empty"]) for row in rows] == [(1, 1), (0, 0), (0, 0)]
    assert all(row["SUCCESS"] for row in rows)


def test_leaves_of_a_cache_by_the_names_of_torch_export() -> None:
    def forward(cache: Any) -> Any:
        return cache.layers[1].keys - cache.layers[0].values

    def cache(n: int) -> Any:
        return make_dynamic_cache([(f(1, 1, n, 2), f(1, 1, n, 2)) for _ in range(2)])

    observer = observe(forward, call(cache=cache(3)), call(cache=cache(4)))
    model = sub("cache_key_1", "cache_value_0", ["cache_value_0", "cache_key_1"])
    assert all(row["SUCCESS"] for row in observer.check_discrepancies(model))


def test_thresholds_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    row = subtract().check_discrepancies(sub("y", "x", ["x", "y"]), hist=(0.001,), progress_bar=True)[0]
    assert row[">0.001"] > 0
    assert ">0.1" not in row
    assert "call 1 of 3" in capsys.readouterr().out


def test_nothing_was_captured() -> None:
    with pytest.raises(RuntimeError, match="No inputs were captured"):
        InputObserver().check_discrepancies(sub("x", "y", ["x", "y"]))


def test_what_is_no_onnx_model_is_refused_by_its_type() -> None:
    observer = observe(torch.nn.Linear(3, 2), call(f(2, 3)), call(f(4, 3)))
    program = torch.export.export(torch.nn.Linear(3, 2), (f(2, 3),))
    with pytest.raises(TypeError, match=r"an ONNX model is expected .*, not ExportedProgram"):
        observer.check_discrepancies(program)
