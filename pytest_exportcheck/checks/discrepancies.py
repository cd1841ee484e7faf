"""An ONNX model against the recorded calls of an `InputObserver`: one row of numbers per call."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..exporters.base import Exported
from ..plurals import counted
from ..pytrees import flatten_with_paths
from ..pytrees.caches import CacheKey
from ..pytrees.string_type import string_type
from ..runtimes.onnx_runtime import OnnxRuntimeSession
from .compare import Tolerances, as_tensor, compare_leaf, unreadable
from .max_diff import max_diff

if TYPE_CHECKING:
    from ..observe.interface import Interface

__all__ = ["check_discrepancies"]

#: atol is scaled down to the size of small outputs, not below this share of it.
_LEAST_SCALE = 1e-2


def check_discrepancies(
    interface: Interface,
    onnx_model: Any,
    *,
    atol: float = 1e-4,
    rtol: float = 0.1,
    hist: Sequence[float] = (0.1, 0.01),
    progress_bar: bool = False,
    include_io: bool = True,
    skip_none: bool = True,
) -> list[dict[str, Any]]:
    """Run `onnx_model` in ONNX Runtime on every recorded call.

    Inputs are fed by name: an input of the graph is matched with the recorded tensor whose path gives its
    name (``cache_key_0``, ``x``), those with names of their own in order among what is left. A tensor that a
    call lacks is fed as `InputObserver.infer_arguments` makes it. Outputs come in the order of the recorded
    ones, or by name where all have the names of recorded ones (the keys of a dict, ``cache_layers_0_keys``).

    Parameters
    ----------
    onnx_model:
        Path, bytes, ``onnx.ModelProto`` or ``torch.onnx.ONNXProgram``.
    atol, rtol:
        ``SUCCESS`` means ``|a - b| <= atol * s + rtol * |b|`` for every element, with ``b`` the recorded
        output and ``s`` its largest absolute value, at least 0.01 and at most 1: what is small beside 1 need
        not be small beside the output. Integers and booleans must be equal.
    hist:
        Thresholds of the columns ``>0.1``.
    progress_bar:
        Print a line per call.
    include_io:
        Add ``inputs``, ``outputs_torch``, ``outputs_ort``: the shapes, and the values in brief.
    skip_none:
        Leave out outputs that are ``None`` (an exporter drops them); ``False``: they count as missing.

    Returns
    -------
    list of dict
        ``abs, rel, sum, n, dnan, dev`` of `max_diff`, ``>0.1`` and the like, ``SUCCESS``, ``index``,
        ``duration_torch`` and ``ort_duration`` in seconds, ``n_inputs``, ``n_none`` (tensors the call lacks),
        ``n_empty`` (tensors of no elements), ``atol``, ``rtol``; ``error`` instead of the numbers where the
        model could not be run, and beside them where shapes, dtypes, the number of outputs, or outputs that
        are no tensors differ.
    """
    inputs, outputs = _signature_of(onnx_model)
    names = _match(interface, inputs)
    exported = Exported(_program(onnx_model), input_names=names, output_paths=list(outputs))
    session = OnnxRuntimeSession(exported, "cpu")
    rows = []
    for call in interface.calls:
        arguments = interface.complete(call.arguments, call)
        tensors = interface.arrange(arguments, False, True)
        row: dict[str, Any] = {
            "index": call.index,
            "duration_torch": call.duration,
            "n_inputs": len(tensors),
            "n_none": len(interface.tensor_paths())
            - sum(isinstance(call.leaves().get(path), torch.Tensor) for path in interface.tensor_paths()),
            "n_empty": sum(tensor.numel() == 0 for tensor in tensors if tensor is not None),
            "atol": atol,
            "rtol": rtol,
        }
        if include_io:
            row["inputs"] = string_type(arguments, with_shape=True, with_min_max=True)
        begin = time.perf_counter()
        try:
            got = _flat(session.run(arguments))
        except Exception as error:  # a row says what is wrong with one call, the others are still run
            rows.append({**row, "SUCCESS": False, "error": f"{type(error).__name__}: {error}"})
            if progress_bar:
                print(f"call {call.index + 1} of {len(interface.calls)}: {rows[-1]['error']}")
            continue
        row["ort_duration"] = time.perf_counter() - begin
        expected = _expected(call.output_leaves(), list(outputs), len(got), skip_none)
        if include_io:
            row["outputs_torch"] = string_type(expected, with_shape=True, with_min_max=True)
            row["outputs_ort"] = string_type(got, with_shape=True, with_min_max=True)
        rows.append({**_numbers(expected, got, hist), **row, **_verdict(expected, got, atol, rtol)})
        if progress_bar:
            print(f"call {call.index + 1} of {len(interface.calls)}: abs={rows[-1]['abs']:.3g}")
    return rows


def _program(onnx_model: Any) -> Any:
    import onnx

    if isinstance(onnx_model, onnx.ModelProto):
        # The session serializes a model: its own copy, so that weights moved to a file stay where they were.
        twin = onnx.ModelProto()
        twin.CopyFrom(onnx_model)
        return twin
    return os.fspath(onnx_model) if isinstance(onnx_model, os.PathLike) else onnx_model


def _signature_of(onnx_model: Any) -> tuple[list[str], list[str]]:
    """Names of the inputs that must be fed, and of the outputs."""
    import onnx

    if isinstance(onnx_model, torch.onnx.ONNXProgram):
        graph = onnx_model.model.graph
        return [str(v.name) for v in graph.inputs if v.name not in graph.initializers], [
            str(v.name) for v in graph.outputs
        ]
    if isinstance(onnx_model, (str, os.PathLike)):
        onnx_model = onnx.load(os.fspath(onnx_model), load_external_data=False)
    elif isinstance(onnx_model, bytes):
        onnx_model = onnx.load_from_string(onnx_model)
    elif not isinstance(onnx_model, onnx.ModelProto):
        raise TypeError(
            "an ONNX model is expected (path, bytes, ModelProto or ONNXProgram), not "
            f"{type(onnx_model).__name__}"
        )
    given = {value.name for value in onnx_model.graph.initializer}
    inputs = [value.name for value in onnx_model.graph.input if value.name not in given]
    return inputs, [value.name for value in onnx_model.graph.output]


def _names_of(interface: Interface) -> dict[str, tuple[str, ...]]:
    """Path of each tensor -> names that exporters give to it, the most likely first."""
    found: dict[str, tuple[str, ...]] = {}
    wanted = set(interface.tensor_paths())
    for root, value in interface.template.items():
        keys = [path for path, _ in torch.utils._pytree.tree_flatten_with_path(value)[0]]
        for (path, _), parts in zip(flatten_with_paths(value, root), keys, strict=True):
            if path not in wanted:
                continue
            torch_parts = [str(part.key) if isinstance(part, CacheKey) else _part(part) for part in parts]
            candidates = ["_".join([root, *torch_parts]), path, path.replace(".", "_")]
            if len(keys) == 1:
                candidates.append(root)
            found[path] = tuple(dict.fromkeys(c for text in candidates for c in (text, _identifier(text))))
    return found


def _part(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _identifier(text: str) -> str:
    # torch.export names placeholders in lower case.
    return re.sub(r"[^a-zA-Z0-9]+", "_", text).lower()


def _match(interface: Interface, inputs: Sequence[str]) -> dict[str, str]:
    """Path -> input of the graph."""
    matched: dict[str, str] = {}
    left = list(inputs)
    names = _names_of(interface)
    for path, candidates in names.items():
        name = next((c for n in candidates for c in (n, f"{n}_orig") if c in left), None)
        if name is not None:
            matched[path] = name
            left.remove(name)
    rest = [path for path in names if path not in matched]
    if left and len(left) == len(rest):
        # The exporter was given names: what is left comes in the order of the call.
        matched.update(zip(rest, left, strict=True))
    return matched


def _flat(outputs: Sequence[tuple[str, Any]]) -> list[Any]:
    """The values; a sequence of tensors gives its items."""
    values: list[Any] = []
    for _, value in outputs:
        many = isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)
        values += value if many else [value]
    return values


def _expected(
    leaves: Sequence[tuple[str, Any]], names: Sequence[str], count: int, skip_none: bool
) -> list[Any]:
    """The outputs that the model has, in its order: tensors, or all where an exporter keeps constants."""
    there = [(path, as_tensor(leaf)) for path, leaf in leaves if leaf is not None or not skip_none]
    tensors = [(path, leaf) for path, leaf in there if isinstance(leaf, torch.Tensor) or leaf is None]
    kept = there if len(there) == count and len(tensors) != count else tensors
    # Outputs that are called like the keys of a dict come by name, whatever their order.
    by_name = {_identifier(path): leaf for path, leaf in kept} | dict(kept)
    if len(names) == len(kept) == len(set(names)) and all(name in by_name for name in names):
        return [by_name[name] for name in names]
    return [leaf for _, leaf in kept]


def _numbers(expected: list[Any], got: list[Any], hist: Sequence[float]) -> dict[str, Any]:
    missing = len(expected) != len(got) or any(value is None or _unreadable(value) for value in expected)
    # Against nothing: as far apart as can be.
    found = max_diff([0], []) if missing else max_diff(expected, got, hist=tuple(hist))
    counts: Mapping[str, int] = found.pop("rep", {})
    found.pop("argm", None)
    found.pop("ddtype", None)
    found.setdefault("dev", 0)
    return {**found, **{f">{limit}": counts.get(f">{limit}", 0) for limit in hist}}


def _unreadable(value: Any) -> str:
    return unreadable(value) if isinstance(value, torch.Tensor) else ""


def _verdict(expected: list[Any], got: list[Any], atol: float, rtol: float) -> dict[str, Any]:
    if len(expected) != len(got):
        return {"SUCCESS": False, "error": f"{counted(len(got), 'output')} instead of {len(expected)}"}
    close = True
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        if _unreadable(a):
            return {"SUCCESS": False, "error": f"output {number}: a {_unreadable(a)} tensor is not compared"}
        if not isinstance(a, torch.Tensor):
            result = compare_leaf("output", a, b, Tolerances())
            if not result.ok:
                return {"SUCCESS": False, "error": f"output {number}: {result.reason}"}
            continue
        a = a.detach().cpu()
        if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return {
                "SUCCESS": False,
                "error": f"output {number}: {string_type(b, with_shape=True)} instead of "
                f"{string_type(a, with_shape=True)}",
            }
        close = close and _close(a, b, atol, rtol)
    return {"SUCCESS": close}


def _close(expected: torch.Tensor, got: torch.Tensor, atol: float, rtol: float) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, got)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), got.to(wide)
    finite = torch.isfinite(a)
    size = float(a[finite].abs().max()) if bool(finite.any()) else 0.0
    scale = min(max(size, _LEAST_SCALE), 1.0) if size else 1.0
    return torch.allclose(b, a, atol=atol * scale, rtol=rtol, equal_nan=True)
