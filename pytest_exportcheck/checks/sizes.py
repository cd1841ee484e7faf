"""A program against eager on sizes nobody showed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ResizeError
from ..observe.observation import GraphObservation
from ..observe.resize import other_sizes, resize_arguments, sizes_from_spec
from ..pytrees import clone_tree, flatten_with_paths
from ..runtimes.base import Session
from ..spec import ModelSpec
from .compare import Tolerances, compare_leaves, table
from .numbers import _inputs_by_path, _only_padding, _run, _summary
from .padding import where_masks

__all__ = ["check_other_sizes"]


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def check_other_sizes(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    tolerances: Tolerances,
    record: dict[str, Any],
) -> None:
    """Run the program and eager on sizes that no call had; sizes that eager refuses are listed, not judged.

    Raises
    ------
    ResizeError
        The program fails, or differs from eager, at the first such size.
    """
    if spec.resize == "off":
        return
    if isinstance(spec.resize, Mapping):
        unknown = [name for name in spec.resize if name not in graph.shapes.symbols]
        if unknown:
            raise ResizeError(
                f"resize names {', '.join(unknown)}, the symbols of this graph are "
                f"{', '.join(graph.shapes.symbols) or 'none'}"
            )
        wanted = sizes_from_spec(graph.example, spec.resize)
    else:
        wanted = other_sizes(graph.shapes, graph.example, graph.calls)
    passed: list[str] = []
    refused: list[str] = []
    for sizes in wanted:
        text = _sizes_text(sizes)
        try:
            arguments = resize_arguments(graph.example.arguments, graph.shapes, sizes, graph.calls)
        except Exception as error:
            # A size of the spec that no memory holds.
            raise ResizeError(f"no inputs of sizes {text} can be made: {error}") from error
        try:
            expected = flatten_with_paths(clone_tree(graph.eager(arguments)))
        except Exception as error:
            # Eager's own limits (a fixed image size, a longest position) are no fault of the exporter.
            refused.append(f"{text}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
            continue
        record["resize"] = {"passed": passed, "refused_by_eager": refused, "failed": text}
        got = _run(session, arguments, f"sizes {text}, which eager accepts", ResizeError)
        inputs = _inputs_by_path(arguments)
        where = where_masks(spec.compare, inputs, expected)
        results = compare_leaves(expected, got, tolerances, where)
        if not all(result.ok for result in results):
            details = table(results)
            padding = None if where else _only_padding(expected, got, inputs, tolerances)
            if padding:
                details.extend(padding.splitlines())
            raise ResizeError(
                f"{_summary(results, tolerances)} ({session.description} against eager) at sizes {text}, "
                "which no observed call had",
                details=details,
            )
        passed.append(text)
    record["resize"] = {"passed": passed, "refused_by_eager": refused}
    if isinstance(spec.resize, Mapping) and not passed:
        # Sizes that a person wrote down and nothing was checked at: a mistake in the spec, no pass.
        raise ResizeError("eager refuses every size that resize lists: nothing was checked", details=refused)
