"""Custom ops on their way to ONNX: nodes of their own domain, run by the reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..exporters.base import Exported, Exporter
from .custom_ops import NAMESPACE, ModuleAsOperator
from .onnx_models import reference_outputs, to_numpy, to_torch

__all__ = ["open_with_custom_ops", "table_of"]


def table_of(exporter: Exporter, operators: Sequence[ModuleAsOperator]) -> dict[Any, Callable[..., Any]]:
    """``custom_translation_table`` for the custom ops; empty for an exporter that makes no ONNX.

    Raises
    ------
    NotImplementedError
        The exporter takes no translation table.
    """
    if not operators or "onnx" not in exporter.name or getattr(exporter, "target", "onnx") == "torch":
        return {}
    if exporter.name != "onnx-dynamo":
        raise NotImplementedError(f"{exporter.name} takes no custom ops: use onnx-dynamo or torch-export")
    packet = getattr(torch.ops, NAMESPACE)
    # One structure has one operator; those that a trace will need are defined for the recorded calls.
    return {
        getattr(packet, structure.name).default: _translation(operator, structure)
        for operator in operators
        for structure in operator.structures
    }


def _translation(operator: ModuleAsOperator, structure: Any) -> Callable[..., Any]:
    def translate(*operands: Any) -> Any:
        import onnx
        import onnxscript

        observed = operator.observe(structure)
        outputs = len(observed[0][1]) if observed else 1
        types = sorted(
            {
                kind
                for entry in onnx.defs.get_schema("Identity").type_constraints
                for kind in entry.allowed_type_strs
            }
        )
        make = onnx.defs.OpSchema
        schema = make(
            structure.name,
            NAMESPACE,
            1,
            inputs=[make.FormalParameter(f"x{k}", f"T{k}") for k in range(len(structure.types))],
            outputs=[make.FormalParameter(f"y{k}", f"U{k}") for k in range(outputs)],
            type_constraints=[
                *[(f"T{k}", types, "") for k in range(len(structure.types))],
                *[(f"U{k}", types, "") for k in range(outputs)],
            ],
        )
        node = onnxscript.values.Op(onnxscript.values.Opset(NAMESPACE, 1), structure.name, schema)
        made = node(*operands)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    return translate


class _EvaluatorSession:
    """An ONNX model with custom ops in the reference evaluator, which can be given functions for them."""

    description = "the reference evaluator"

    def __init__(self, exported: Exported, operators: Sequence[ModuleAsOperator]) -> None:
        self._exported = exported
        self._operators = [_kernel(o, structure) for o in operators for structure in o.structures]
        self.facts: dict[str, Any] = {}

    def run(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """(path, value) of the outputs."""
        return reference_outputs(self._exported, arguments, self._operators)


def _kernel(operator: ModuleAsOperator, structure: Any) -> type:
    from onnx.reference.op_run import OpRun

    def run(self: Any, *arrays: Any, **attributes: Any) -> tuple[Any, ...]:
        operands = [
            to_torch(array) if kind == "Tensor" else int(array)
            for array, kind in zip(arrays, structure.types, strict=True)
        ]
        found = getattr(getattr(torch.ops, NAMESPACE), structure.name)(*operands)
        return tuple(to_numpy(tensor) for tensor in found)

    return type(structure.name, (OpRun,), {"op_domain": NAMESPACE, "_run": run})


def open_with_custom_ops(exported: Exported, operators: Sequence[ModuleAsOperator]) -> _EvaluatorSession:
    """A session for a model that ONNX Runtime has no kernels for."""
    return _EvaluatorSession(exported, operators)
