"""The shapes check of a spec: what was inferred against the accepted golden, and the record of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .checks.carried import Build, check_carried_state
from .checks.eager import check_eager
from .checks.golden import GoldenError, GoldenGraph, compare_goldens, parse_golden, render_golden
from .checks.held import StateWatch
from .checks.numbers import tolerances_of
from .errors import (
    ObserveError,
    ShapesError,
)
from .observe.infer import ConstantLeaf
from .observe.observation import GraphObservation, Observation, warn_of_spec
from .plurals import counted
from .pytrees import register_flattening_functions
from .spec import ModelSpec

__all__ = ["CheckedObservation", "check_shapes", "facts_of"]


class CheckedObservation(Observation):
    """An observation with the text of its golden."""

    def golden_text(self, path: str) -> str:
        """Proposed content of the golden file that is shown as `path`.

        Raises
        ------
        ObserveError
            A graph is broken: a golden without its section would be accepted as whole.
        """
        if self.failures:
            raise self.broken(f"{path} is not written: it would lack a graph")
        return render_golden(self.golden_graphs(), path, self.spec.relative)

    def check(self, graph: GraphObservation, watch: StateWatch, build: Build) -> None:
        """Note a graph as broken where eager disagrees with itself.

        Parameters
        ----------
        watch:
            What the model held before its first call.
        build:
            Makes the model once more, see `check_carried_state`.
        """
        device = torch.device(self.device).type
        known = len(graph.shapes.warnings)
        try:
            tolerances = tolerances_of(self.spec, device, self.dtype)
            check_eager(graph, tolerances)
            same = [other for other in self.graphs.values() if other.target is graph.target]
            before = sorted((call for other in same for call in other.calls), key=lambda call: call.index)
            check_carried_state(graph, before, watch, build, tolerances, self.spec.model.seed)
        except ObserveError as error:
            self.fail(graph.name, error)
        finally:
            for note in graph.shapes.warnings[known:]:
                warn_of_spec(self.spec, note, graph.name)

    def broken(self, *more: str) -> ObserveError:
        """The error that names the broken graphs; `more`: lines before its details."""
        names = [name for name in self.failures if name]
        which = f"graph {names[0]} is" if len(names) == 1 else f"graphs {', '.join(names)} are"
        details = list(more)
        said: dict[str, list[str]] = {}
        for name, failure in self.failures.items():
            said.setdefault("\n".join([failure.message, *failure.details]), []).append(str(name))
        for text, sharing in said.items():
            first, *rest = text.splitlines()
            details += [f"{', '.join(sharing)}: {first}", *(f"  {line}" for line in rest)]
        return ObserveError(f"{which} broken ({len(names)} of {len(self.spec.graph_names)})", details=details)

    def golden_graphs(self) -> dict[str | None, GoldenGraph]:
        """The inferred shapes as golden sections.

        One golden serves every dtype of a spec: the case's dtype is written as the first of the matrix.
        """
        primary = self.spec.matrix.dtypes[0]
        graphs = {}
        for name, graph in self.graphs.items():
            inputs = {}
            for path, leaf in graph.shapes.leaves.items():
                text = str(leaf)
                if not isinstance(leaf, ConstantLeaf) and leaf.dtype == self.dtype:
                    text = text.replace(self.dtype, primary, 1)
                inputs[path] = text
            graphs[name] = GoldenGraph(inputs, dict(graph.shapes.containers))
        return graphs


def check_shapes(observation: CheckedObservation, golden: str | None, path: str) -> None:
    """Compare the inferred dynamic shapes with the accepted ones.

    Where a graph is broken, the others are compared all the same.

    Parameters
    ----------
    golden:
        Text of the golden file, ``None`` if there is none.
    path:
        The file as shown in messages.

    Raises
    ------
    ShapesError
        They differ, or there is no golden; the details hold the diff or the proposed content.
    ObserveError
        A graph is broken, and nothing is wrong with the shapes of the others.
    """
    graphs = observation.golden_graphs()
    proposed = render_golden(graphs, path, observation.spec.relative)
    if golden is None:
        if observation.failures:
            raise observation.broken(
                f"{path} does not exist, and is not written before every graph of it is there",
                *(["proposed content, so far:", *proposed.splitlines()] if graphs else []),
            )
        raise ShapesError(
            f"no accepted dynamic shapes: {path} does not exist",
            details=["proposed content:", *proposed.splitlines()],
        )
    try:
        accepted = parse_golden(golden, path)
    except GoldenError as error:
        raise ShapesError(str(error), details=["proposed content:", *proposed.splitlines()]) from None
    # What is accepted for a broken graph is neither confirmed nor obsolete.
    known = {**{name: accepted[name] for name in observation.failures if name in accepted}, **graphs}
    ordered = {name: known[name] for name in observation.spec.graph_names if name in known}
    diff = compare_goldens(golden, render_golden(ordered, path, observation.spec.relative))
    if diff:
        broken = observation.broken() if observation.failures else None
        raise ShapesError(
            f"inferred dynamic shapes differ from {path}" + (f"; {broken.message}" if broken else ""),
            details=[*diff, *_explain(observation, golden), *(broken.details if broken else ())],
        )
    if observation.failures:
        raise observation.broken(
            f"the other graphs have the shapes of {path}" if graphs else "no graph is left"
        )


@register_flattening_functions(None)
def _explain(observation: CheckedObservation, golden: str) -> list[str]:
    """For each axis that was dynamic and is not now (or the reverse): its sizes in the calls."""
    # What is said -> the leaves of which it is: the layers of a cache freeze together.
    said: dict[str, list[str]] = {}
    frozen: list[tuple[str, int]] = []
    accepted = parse_golden(golden)
    for name, proposed in observation.golden_graphs().items():
        old = accepted.get(name)
        graph = observation.graphs[name]
        for path, text in proposed.inputs.items():
            before = old.inputs.get(path) if old else None
            if before is None or before == text or "[" not in before or "[" not in text:
                continue
            dims_before = before[before.index("[") + 1 : -1].split(", ")
            dims_now = text[text.index("[") + 1 : -1].split(", ")
            for axis, (was, now) in enumerate(zip(dims_before, dims_now, strict=False)):
                if was != now and was.isdigit() != now.isdigit():
                    sizes = [
                        leaf.shape[axis]
                        for call in graph.seen
                        if isinstance(leaf := call.leaves().get(path), torch.Tensor) and leaf.dim() > axis
                    ]
                    kind = "dynamic" if not was.isdigit() else was
                    # A call that begins with an empty cache has no such leaf; where all do, nothing is said.
                    seen = f" (sizes {sizes} in {counted(len(sizes), 'call')})" if sizes else ""
                    if now.isdigit() and (path, axis) not in frozen:
                        frozen.append((path, axis))
                    now = "dynamic" if not now.isdigit() else now
                    paths = said.setdefault(f"axis {axis} was {kind}, is now {now}{seen}", [])
                    paths += [path] if path not in paths else []
    return [
        *(f"{_some(paths)}: {text}" for text, paths in said.items()),
        *_observe_another_size(observation.spec, frozen),
    ]


#: Names that a line has room for.
_NAMED = 3


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _observe_another_size(spec: ModelSpec, frozen: Sequence[tuple[str, int]]) -> list[str]:
    """What to do other than to accept it: an axis is dynamic because the calls vary it."""
    if not frozen:
        return []
    axes = _some([f"axis {axis} of {path}" for path, axis in frozen])
    one = len(frozen) == 1
    return [
        f"if {'it' if one else 'they'} shall stay dynamic, observe another size: let a call of "
        f"{spec.place('observe', 'calls')} give {axes} another {'size' if one else 'size each'}"
    ]


def facts_of(observation: CheckedObservation, golden: str | None) -> Mapping[str, Any]:
    """What the record of a spec's shapes check says about the observation, and about the accepted text."""
    warnings = [warning for graph in observation.graphs.values() for warning in graph.shapes.warnings]
    graphs = [name for name in observation.graphs if name]
    broken = [name for name in observation.failures if name]
    shapes = {name or "": dict(golden.inputs) for name, golden in observation.golden_graphs().items()}
    return {
        "calls": len(observation.calls),
        "graphs": graphs,
        "broken": broken,
        "warnings": warnings,
        "shapes": shapes,
        "accepted": _accepted(golden),
    }


def _accepted(golden: str | None) -> dict[str, dict[str, str]] | None:
    """Graph -> path -> shape; ``None`` where nothing is accepted, or it cannot be read."""
    try:
        graphs = parse_golden(golden) if golden is not None else None
    except GoldenError:
        return None
    return None if graphs is None else {name or "": dict(graph.inputs) for name, graph in graphs.items()}
