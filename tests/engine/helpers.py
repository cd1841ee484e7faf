"""What several test files of the engine need: recorded calls, small specs with their model beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.observe import CallSignature, GraphShapes, InputObserver, RecordedCall, infer_shapes
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.pytrees import register_flattening_functions
from pytest_exportcheck.spec import load_spec

__all__ = ["Function", "infer", "make_run", "record", "rows", "verdict"]


class Function(torch.nn.Module):
    """A module whose ``forward`` is a given function, with the function's own signature."""

    def __new__(cls, function: Callable[..., Any]) -> Function:
        kind = type("Function", (Function,), {"forward": staticmethod(function)})
        return super().__new__(kind)

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()


def record(function: Callable[..., Any], *calls: tuple[Sequence[Any], Mapping[str, Any]]) -> InputObserver:
    """Call `function` under an observer."""
    model = Function(function)
    observer = InputObserver()
    with observer(model, store_n_calls=len(calls)):
        for args, kwargs in calls:
            model(*args, **kwargs)
    return observer


def infer(
    function: Callable[..., Any], *calls: tuple[Sequence[Any], Mapping[str, Any]], **options: Any
) -> tuple[GraphShapes, list[RecordedCall]]:
    """Shapes inferred from calls of `function`, and the recorded calls."""
    info = record(function, *calls).info
    assert info.signature is not None
    signature: CallSignature = info.signature
    with register_flattening_functions():
        shapes = infer_shapes(
            info.calls, signature_order=signature.names, defaults=signature.defaults, **options
        )
    return shapes, info.calls


def rows(shapes: GraphShapes) -> dict[str, str]:
    """Path -> text of every leaf."""
    return {path: str(leaf) for path, leaf in shapes.leaves.items()}


def make_run(folder: Path, source: str, extra: str = "", name: str = "net") -> SpecRun:
    """A spec whose model and calls are the functions ``build_model`` and ``calls`` of `source`."""
    header = "import torch\nfrom torch import nn\n\n\n"
    (folder / f"{name}.py").write_text(header + textwrap.dedent(source), encoding="utf-8")
    observe = "" if "observe:" in extra else f'observe: {{calls: "{name}.py:calls"}}\n'
    spec = folder / f"{name}.yaml"
    spec.write_text(
        f'exportcheck: 1\nmodel: {{factory: "{name}.py:build_model"}}\n{observe}{textwrap.dedent(extra)}',
        encoding="utf-8",
    )
    return SpecRun(load_spec(spec, folder))


def verdict(
    run: SpecRun, exporter: str, mode: str = "none", graph: str | None = None
) -> tuple[str, ExportCheckError | None, dict[str, Any]]:
    """(``pass`` or the stage that failed, the failure, the record) of one case on the CPU in float32."""
    record: dict[str, Any] = {}
    case = CaseId(run.spec.relative, exporter, mode, "cpu", "float32", graph)
    try:
        run_case(run, case, lambda stage: None, record)
    except ExportCheckError as error:
        return error.stage, error, record
    return "pass", None, record
