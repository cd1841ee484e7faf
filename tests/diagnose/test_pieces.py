"""Piece by piece: the API of the documents, and what must be right where older tools are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_exportcheck.diagnose.custom_ops import installed
from pytest_exportcheck.diagnose.piece_text import short_dims
from pytest_exportcheck.diagnose.pieces import ModelDiagnoseOutput
from pytest_exportcheck.diagnose.status import CustomOpStrategy, StatusExport, StatusExportCode
from pytest_exportcheck.diagnose.trace import trace_execution_piece_by_piece, trace_forward_execution

from .helpers import Deep, Raises

pytestmark = pytest.mark.filterwarnings("ignore")

D = torch.export.Dim.DYNAMIC


def wide(*sizes: int) -> list[Any]:
    return [((torch.randn(n, 6),), {}) for n in sizes]


def statuses(diag: ModelDiagnoseOutput) -> dict[str, str]:
    return {
        piece.name: piece.exporter_status.status.name for piece in diag if hasattr(piece, "exporter_status")
    }


class Sub(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub = Sub()
        self.subfail = Raises()
        self.lin = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.sub(x, x * x) + self.subfail(x))


# status codes


def test_codes_are_sets() -> None:
    code = StatusExportCode
    assert (code.OK | code.CHILDC).name == "OK_CHILDC"
    assert (code.FAIL | code.DISC).name == "FAIL_DISC"
    assert code.OK & code.FAIL == code.NONE
    assert code.FAIL.remove(code.FAIL) is code.NONE
    assert code.OK.remove(code.FAIL) is code.OK
    assert code.CUSTOM in (code.FAIL | code.CUSTOM)
    assert code.NONE.name == "NONE"
    assert code["DISC"] is code.DISC
    assert not StatusExport(code.OK | code.FAIL).is_ok()


def test_text_of_a_status_is_short_and_has_one_line() -> None:
    status = StatusExport(StatusExportCode.FAIL, "EXPORT", "a" * 200 + "\nsecond")
    text = status.pretty_text()
    assert text.startswith("FAIL -- step=EXPORT, reason='aaa")
    assert len(text) < 150
    assert "second" not in text
    assert StatusExport(StatusExportCode.OK, exported=torch.ones(1)).pretty_text() == "OK -- Tensor"


# tracing


@pytest.mark.parametrize(
    "inputs",
    [
        wide(5, 7),
        [{"x": torch.randn(5, 6)}, {"x": torch.randn(7, 6)}],
        [(torch.randn(5, 6),), (torch.randn(7, 6),)],
    ],
)
def test_inputs_in_three_forms(inputs: list[Any]) -> None:
    model = Model()
    before = dict(vars(model.sub))
    diag = trace_execution_piece_by_piece(model, inputs)
    assert [piece.name for piece in diag] == ["__main__", "sub", "subfail", "lin"]
    by_name = isinstance(inputs[0], dict)
    assert diag.guess_dynamic_shapes() == (((), {"x": {0: D}}) if by_name else (({0: D},), {}))
    assert diag.children[0].guess_dynamic_shapes() == (({0: D}, {0: D}), {})
    assert vars(model.sub) == before
    text = diag.pretty_text(with_dynamic_shape=True)
    assert ">>> sub: Sub" in text
    assert "DS=" in text
    assert "T1s5x6" in text
    assert diag.children[0].full_name == "sub:Sub"
    assert diag.children[0].dot_name == ".. sub - Sub"
    assert diag.children[0].custom_op_name == "C_Model_sub"
    assert diag.custom_op_name == "C_Model"


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        trace_execution_piece_by_piece(Model(), [])
    with pytest.raises(TypeError, match="inputs are"):
        trace_execution_piece_by_piece(Model(), ["x"])


def test_call_sites_of_one_module_are_kept_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.lin = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.lin(self.act(x)))

    diag = trace_execution_piece_by_piece(Net(), wide(5, 7))
    assert [piece.name for piece in diag] == ["__main__", "act", "lin", "act#2"]
    first, second = diag.children[0], diag.children[2]
    # On one line, and of other widths: merged, axis 1 would look dynamic.
    assert first.guess_dynamic_shapes() == second.guess_dynamic_shapes() == (({0: D},), {})
    assert [tuple(given[0][0].shape) for given in second.inputs] == [(5, 4), (7, 4)]


def test_a_loop_is_one_site_and_passes_of_other_shapes_are_not() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(6, 6)
            self.act = nn.ReLU()
            self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(x.shape[0] % 3 + 1):
                x = self.cell(x)
            for layer in self.layers:
                x = self.act(layer(x))
            return x

    diag = trace_execution_piece_by_piece(Net(), wide(5, 7))
    names = [piece.name for piece in diag.children]
    assert names == ["cell", "layers[0]", "act", "layers[1]", "act#2"]
    cell = diag.children[0]
    assert (cell.n_calls, cell.guess_dynamic_shapes()) == (5, (({0: D},), {}))
    assert diag.children[2].guess_dynamic_shapes() == (({0: D},), {})


def test_nothing_is_left_behind_by_a_model_that_raises() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            if x.shape[0] == 7:
                raise ValueError("no sevens")
            return y

    model = Net()
    with pytest.raises(ValueError, match="no sevens"):
        trace_execution_piece_by_piece(model, wide(5, 7))
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lin)


def test_another_method_is_traced() -> None:
    class Coder(nn.Module):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coder = Coder()

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.coder.encode(x) + 1

    diag = trace_execution_piece_by_piece(Net(), wide(5, 7), traced_method={"": "run", "Coder": "encode"})
    assert [(piece.name, piece.method_name) for piece in diag] == [("__main__", "run"), ("coder", "encode")]
    assert diag.try_export("fx", replace_by_custom_op=CustomOpStrategy.LOCAL).is_ok()
    assert statuses(diag) == {"__main__": "OK_CHILDC", "coder": "OK"}


def test_the_context_manager_records_what_happens_inside() -> None:
    model = Model()
    with trace_forward_execution(model) as diag:
        model(torch.randn(5, 6))
        model(torch.randn(7, 6))
    assert len(diag.inputs) == len(diag.outputs) == 2
    assert isinstance(diag.outputs[0], tuple)


def test_dynamic_axes_are_shown_as_dyn() -> None:
    diag = trace_execution_piece_by_piece(torch.nn.Linear(6, 4), [((torch.randn(n, 6),), {}) for n in (2, 3)])
    assert "DS=(({0: DYN},), {})" in diag.pretty_text(with_dynamic_shape=True)
    assert short_dims(str(torch.export.Dim.DYNAMIC)) == "DYN"
    assert short_dims("{0: <_DimHint.DYNAMIC: 3>}") == "{0: DYN}"


def test_one_call_gives_static_shapes() -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5))
    assert diag.guess_dynamic_shapes() == (({},), {})
    status = diag.children[2].try_export("fx")
    assert status.is_ok()
    assert "5, 6" in str(diag.children[2].fx)


# exporting


def test_a_failing_child_is_found_and_nothing_says_ok_for_it() -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    status = diag.try_export("fx")
    assert not status.is_ok()
    assert status.step == "EXPORT"
    assert statuses(diag) == {"__main__": "FAIL", "sub": "OK", "subfail": "FAIL", "lin": "OK"}
    report = diag.get_export_report()
    assert "subfail" in report
    assert report.count("FAIL -- step=EXPORT") == 2
    assert "def forward" in diag.get_export_report(exported_program=True)
    assert "placeholder" in diag.get_export_report(fx=True)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            CustomOpStrategy.ONLY_IF_FAILING,
            {"__main__": "OK_CHILDC", "sub": "OK", "subfail": "FAIL", "lin": "OK"},
        ),
        (CustomOpStrategy.LOCAL, {"__main__": "OK_CHILDC", "sub": "OK", "subfail": "FAIL", "lin": "OK"}),
        (
            CustomOpStrategy.ALWAYS,
            {"__main__": "FAIL_CUSTOM", "sub": "OK_CUSTOM", "subfail": "FAIL_CUSTOM", "lin": "OK_CUSTOM"},
        ),
    ],
)
def test_strategies(strategy: CustomOpStrategy, expected: dict[str, str]) -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    status = diag.try_export("fx", replace_by_custom_op=strategy)
    assert statuses(diag) == expected
    name = "C_Model" if strategy is CustomOpStrategy.ALWAYS else "C_Model_subfail"
    assert f"torch.ops.diag_lib.{name}.default" in str(status.exported)
    assert installed() == []
    assert "forward" not in vars(diag.model.sub)


def test_a_strategy_by_name_and_by_type() -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    diag.try_export("fx", replace_by_custom_op={"Model": CustomOpStrategy.LOCAL})
    assert statuses(diag)["__main__"] == "OK_CHILDC"
    assert diag.try_export("fx", replace_by_custom_op={"lin": CustomOpStrategy.ALWAYS}).status.name == "FAIL"
    assert statuses(diag)["lin"] == "OK_CUSTOM"
    assert statuses(diag)["sub"] == "OK"
    diag.try_export("fx", replace_by_custom_op={Sub: CustomOpStrategy.ALWAYS})
    assert statuses(diag)["sub"] == "OK_CUSTOM"
    with pytest.raises(TypeError, match="CustomOpStrategy"):
        diag.try_export("fx", replace_by_custom_op={"Model"})  # type: ignore[arg-type]


def test_onnx_with_custom_ops_is_run_too() -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    status = diag.export_once("onnx_dynamo", replaced=diag.children)
    assert status.status.name == "OK_CHILDC"
    assert len(diag.exporter_discs) == 2
    assert max(row["abs"] for row in diag.exporter_discs) < 1e-5
    domains = {node.domain for node in status.exported.model.graph}
    assert "diag_lib" in domains
    assert diag.onnx_dynamo is status.exported


def test_torch_script_says_that_it_takes_no_custom_ops() -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    assert diag.children[0].try_export("torch_script").is_ok()
    status = diag.export_once("torch_script", replaced=diag.children)
    assert status.step == "CUSTOM"
    assert not status.is_ok()


def test_wrong_numbers_are_a_failure_of_the_piece_that_makes_them() -> None:
    class Threshold(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] != 3 else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Threshold()
            self.lin = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(self.inner(x))

    from pytest_exportcheck.diagnose.culprits import CaptureForOnnx

    diag = trace_execution_piece_by_piece(Net(), wide(3, 7, 9))
    status = diag.try_export(CaptureForOnnx())
    assert status.status.name == "FAIL_DISC"
    assert status.step == "DISC"
    assert statuses(diag) == {"__main__": "FAIL_DISC", "inner": "FAIL_DISC", "lin": "OK"}
    assert diag.try_export(CaptureForOnnx(), discrepancies=False).is_ok()


def test_not_quiet_raises() -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    with pytest.raises(Exception, match="data-dependent"):
        diag.try_export("fx", quiet=False)


def test_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    diag = trace_execution_piece_by_piece(Model(), wide(5, 7))
    monkeypatch.setenv("DIAGPRINTSTATUS", "1")
    monkeypatch.setenv("DIAGPRINTEXPORT", "1")
    diag.children[2].try_export("fx")
    shown = capsys.readouterr().out
    assert ".. lin - Linear --- OK -- ExportedProgram" in shown
    assert "dynamic shapes=" in shown
    monkeypatch.setenv("DIAGNAME", "subfail")
    with pytest.raises(Exception, match="data-dependent"):
        diag.try_export("fx")


def test_exporter_kwargs_choose_strict_mode() -> None:
    diag = trace_execution_piece_by_piece(nn.Linear(6, 4), wide(5, 7))
    assert diag.try_export("fx", exporter_kwargs={"strict": False}).is_ok()
    assert diag.try_export("fx", exporter_kwargs={"strict": True}).is_ok()
    assert not diag.try_export("fx", exporter_kwargs={"nonsense": 1}).is_ok()


def test_kwargs_of_a_variadic_signature() -> None:
    class Net(nn.Module):
        def forward(
            self, x: torch.Tensor, y: torch.Tensor | None = None, **kwargs: torch.Tensor
        ) -> torch.Tensor:
            return x.abs() + torch.exp(y) + kwargs["z"]

    inputs = [((torch.randn(n, 6),), {"y": torch.randn(n, 6), "z": torch.randn(n, 6)}) for n in (5, 7)]
    diag = trace_execution_piece_by_piece(Net(), inputs)
    assert diag.guess_dynamic_shapes() == (({0: D},), {"y": {0: D}, "z": {0: D}})
    assert diag.try_export("fx").is_ok()
    assert diag.try_export("fx", replace_by_custom_op=CustomOpStrategy.ALWAYS).is_ok()


# custom ops


def local(model: nn.Module, inputs: list[Any], **options: Any) -> ModelDiagnoseOutput:
    diag = trace_execution_piece_by_piece(model.eval(), inputs)
    status = diag.try_export("fx", replace_by_custom_op=CustomOpStrategy.LOCAL, **options)
    assert status.is_ok(), status.reason
    assert "diag_lib" in str(status.exported)
    assert installed() == []
    return diag


class Around(nn.Module):
    """Calls `inner` and takes tensors out of what it returns."""

    def __init__(self, inner: nn.Module, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self.inner, x)


def test_a_shape_that_is_no_inputs_needs_no_shape_function() -> None:
    diag = local(Around(nn.Linear(6, 4), lambda inner, x: inner(x) + 1), wide(5, 7))
    assert diag.children[0].forward_custom_op_schema == "(Tensor x0) -> Tensor[]"
    ((source, dtype, function),) = diag.children[0].build_shape_mapping_indices()
    assert (source, dtype) == (None, torch.float32)
    assert function is not None
    assert function(torch.randn(11, 6)).shape == (11, 4)


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, extra: Any, flag: bool = False, scale: float | None = None) -> Any:
        total = x + extra["a"][0] + (extra["b"] if extra["b"] is not None else 0)
        return {"sum": total * (scale or 1.0), "none": None, "parts": [x, (total, x.shape[0])], "flag": flag}


def test_nested_inputs_none_and_numbers_go_through_a_custom_op() -> None:
    def use(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = inner(x, {"a": [x * 2], "b": None}, scale=2.0)
        second = inner(x, extra={"a": [x], "b": x * 3}, flag=True)
        assert first["none"] is None
        assert second["flag"] is True
        return first["sum"] + second["parts"][1][0] * second["parts"][1][1]

    diag = local(Around(Nested(), use), wide(5, 7))
    assert [piece.name for piece in diag.children] == ["inner", "inner#2"]
    assert statuses(diag) == {"__main__": "OK_CHILDC", "inner": "OK", "inner#2": "OK"}


def test_a_cache_goes_in_comes_out_and_is_updated_in_place() -> None:
    from transformers.cache_utils import DynamicCache

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            keys, values = cache.update(x[:, None], x[:, None] * 2, 0)
            return keys.sum((1, 2)) + values.sum((1, 2))

    class Make(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            cache = DynamicCache()
            cache.update(x[:, None], x[:, None] + 1, 0)
            return x + 1, cache

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = Make()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> Any:
            y, cache = self.make(x)
            z = self.attention(y, cache)
            return z, cache

    inputs = [((torch.randn(2, n, 4),), {}) for n in (3, 5)]
    diag = local(Net(), inputs)
    assert statuses(diag) == {"__main__": "OK_CHILDC", "make": "OK", "attention": "OK"}
    _, cache = diag.fx.module()(x=torch.randn(2, 6, 4)) if False else (None, None)
    assert cache is None
    # The cache that the model returns holds what the replaced layer put into it.
    assert [row["abs"] for row in diag.exporter_discs] == [0, 0]
    shapes = diag.children[1].guess_dynamic_shapes()
    assert shapes == (({1: D}, [{2: D}, {2: D}]), {})


def test_a_tensor_that_is_written_into() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x.sum(-1)

    def use(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        total = inner(y)
        return total[:, None] + y

    local(Around(Writes(), use), wide(5, 7))


def test_shapes_of_a_module_that_no_fake_tensor_passes() -> None:
    class Grows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cat([x, x], 0) if x.sum() > 1e9 else torch.cat([x, x * 2], 0)
            return torch.cat([y, y[:1]], 1 if x.max() > 1e9 else 0)

    diag = trace_execution_piece_by_piece(Around(Grows(), lambda inner, x: inner(x) * 2), wide(5, 7, 8))
    status = diag.try_export("fx", replace_by_custom_op=CustomOpStrategy.ONLY_IF_FAILING)
    assert status.status.name == "OK_CHILDC"
    given = {"Grows": {0: lambda x: torch.empty(x.shape[0] * 2 + 1, x.shape[1])}}
    status = diag.try_export(
        "fx", replace_by_custom_op=CustomOpStrategy.ONLY_IF_FAILING, shape_functions=given
    )
    assert status.status.name == "OK_CHILDC"
    assert "2*s" in str(status.exported)


def test_an_exception_leaves_no_custom_op() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            return y if y.sum() > 0 else -y

    model = Net()
    diag = trace_execution_piece_by_piece(model, wide(5, 7))
    with pytest.raises(Exception, match="data-dependent"):
        diag.try_export("fx", replace_by_custom_op=CustomOpStrategy.LOCAL, quiet=False)
    assert installed() == []
    assert "forward" not in vars(model.lin)
    assert not hasattr(torch.ops.diag_lib, "C_Net_lin")
    status = diag.try_export("fx", replace_by_custom_op=CustomOpStrategy.LOCAL)
    assert status.status.name == "FAIL_CHILDC"
    assert model(torch.ones(2, 6)).shape == (2, 6)


def test_custom_ops_by_hand() -> None:
    diag = trace_execution_piece_by_piece(Deep().eval(), wide(5, 7))
    x = torch.randn(3, 6)
    want = diag.model(x)
    block = diag.children[0]
    block.put_custom_op_inplace()
    try:
        assert block.is_customized()
        assert installed() == ["C_Deep_block"]
        torch.testing.assert_close(diag.model(x), want)
    finally:
        block.remove_custom_op_inplace()
    block.remove_custom_op_inplace()
    assert installed() == []


def test_pieces_can_be_built_by_hand() -> None:
    lin = nn.Linear(6, 4)
    diag = ModelDiagnoseOutput(None, "top", lin)
    child = ModelDiagnoseOutput(diag, "child", nn.ReLU(), level=1)
    diag.add_child(child)
    for n in (5, 7):
        diag.add_inputs((torch.randn(n, 6),), {})
        diag.add_outputs(lin(diag.inputs[-1][0][0]))
    assert list(diag) == [diag, child]
    assert diag.try_export("fx").is_ok()
    with pytest.raises(TypeError):
        diag.add_inputs((), {"nonsense": 1})
    assert "child" in diag.get_export_report()


def test_dynamic_shapes_of_objects() -> None:
    diag = ModelDiagnoseOutput(None, "top", nn.ReLU())
    guess = diag.guess_dynamic_shape_object
    a, b = torch.zeros(2, 3), torch.zeros(4, 3)
    assert guess(a, b) == {0: D}
    assert guess({"x": a, "y": [a, None]}, {"x": b, "y": [a, None]}) == {"x": {0: D}, "y": [{}, None]}
    assert guess((a, 3), (b, 4)) == ({0: D}, None)
    assert guess(None, a, b) == {0: D}
    with pytest.raises(ValueError, match="ranks"):
        guess(a, torch.zeros(3))
    with pytest.raises(ValueError, match=r"several types.*input x"):
        guess(a, 3, msg=lambda: " (input x)")
    with pytest.raises(ValueError, match="lengths"):
        guess([a], [a, b])


@pytest.mark.parametrize(
    "strategy", [CustomOpStrategy.NONE, CustomOpStrategy.ONLY_IF_FAILING, CustomOpStrategy.LOCAL]
)
def test_a_decoder_with_its_cache(strategy: CustomOpStrategy) -> None:
    from .test_faults import decode, tiny_llama

    diag = trace_execution_piece_by_piece(tiny_llama(), [decode(None, 2, 3, 4), decode(None, 3, 6, 5)])
    args, kwargs = diag.guess_dynamic_shapes()
    assert args == ()
    assert kwargs == {"input_ids": {0: D, 1: D}, "cache": [{0: D, 2: D}] * 4}
    status = diag.try_export("fx", replace_by_custom_op=strategy)
    assert status.is_ok(), status.reason
    if strategy is CustomOpStrategy.LOCAL:
        bad = {name: text for name, text in statuses(diag).items() if not text.startswith("OK")}
        assert bad == {}
        assert sum(1 for _ in diag) > 15
