"""What a program that passed has shown: the same program on the same inputs shows the same again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .cases import CaseId
from .exporters.base import Exported, ExportRequest
from .exporters.capture_cache import KeptCapture
from .exporters.conversions import Weights
from .exporters.fingerprint import draws_random_numbers, graph_digest
from .exporters.guards import CaptureWatch
from .observe.observation import GraphObservation

__all__ = ["Outcome", "Outcomes", "Replay"]


@dataclass
class Outcomes:
    """Of one spec in one process.

    Attributes
    ----------
    keep:
        Whether another case may come that can use them.
    """

    keep: bool = False
    _kept: list[tuple[Outcome, dict[str, Any]]] = field(default_factory=list)
    _replayed: list[tuple[GraphObservation, str, Weights, dict[str, Any]]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._replayed.clear()

    def replay(
        self, case: CaseId, graph: GraphObservation, program: Any, watch: CaptureWatch
    ) -> Replay | None:
        """Of a captured program on its way to another format; ``None`` where two runs of it may differ."""
        if case.device != "cpu":
            return None
        if isinstance(program, KeptCapture):
            facts = program.facts
            return None if facts.random else Replay(self, graph, facts.graph, program.weights)
        if draws_random_numbers(program):
            return None
        return Replay(self, graph, graph_digest(program, watch, graph.shapes), Weights.of(program))

    def of(
        self,
        case: CaseId,
        graph: GraphObservation,
        exported: Exported,
        request: ExportRequest,
        watch: CaptureWatch,
    ) -> Outcome | None:
        """What the program of a case will have shown; ``None`` where two runs of it may differ.

        Of a GPU, where sums have no order, nothing is kept.
        """
        program = exported.program
        if case.device != "cpu":
            return None
        kept = exported.kept
        if kept is not None and kept.facts.random:
            return None
        if isinstance(program, KeptCapture):
            return Outcome(self, case, graph, program.facts.graph, program.weights, request.output_paths)
        if isinstance(program, torch.export.ExportedProgram):
            if draws_random_numbers(program):
                return None
            made_of: Any = graph_digest(program, watch, graph.shapes)
            return Outcome(self, case, graph, made_of, Weights.of(program), request.output_paths)
        captured = getattr(program, "exported_program", None)
        if kept is None and (captured is None or draws_random_numbers(captured)):
            return None
        # The very ONNX model that an earlier case was given: `Conversions` found that it is the same.
        return Outcome(self, case, graph, program.model, None, request.output_paths)


@dataclass(frozen=True)
class Replay:
    """The observed calls of a graph through a captured program."""

    among: Outcomes
    graph: GraphObservation
    made_of: str
    weights: Weights

    def known(self) -> dict[str, Any] | None:
        """What the record says of it, where the same program was replayed without a difference."""
        for graph, made_of, weights, found in self.among._replayed:
            if graph is self.graph and made_of == self.made_of and weights.equal(self.weights):
                return copy.deepcopy(found)
        return None

    def keep(self, found: Mapping[str, Any]) -> None:
        """It agreed, or refused calls: note what the record says."""
        self.among._replayed.append((self.graph, self.made_of, self.weights, copy.deepcopy(dict(found))))


@dataclass(frozen=True)
class Outcome:
    """Of one case: what it depends on, beside the spec.

    Attributes
    ----------
    graph:
        The calls, with what eager returned, and the other sizes.
    made_of:
        Digest of an ExportedProgram, or an ONNX model.
    """

    among: Outcomes
    case: CaseId
    graph: GraphObservation
    made_of: Any
    weights: Weights | None
    output_paths: list[str]

    def known(self) -> dict[str, Any] | None:
        """What the record of an earlier case with the same program says from `session` on."""
        for other, record in self.among._kept:
            if other._is(self):
                return {**copy.deepcopy(record), "same_graph_as": other.case.patch_mode}
        return None

    def keep(self, record: Mapping[str, Any]) -> None:
        """The case passed: note what its record says from `session` on."""
        self.among._kept.append((self, copy.deepcopy(dict(record))))

    def _is(self, other: Outcome) -> bool:
        same_program = (
            self.made_of is other.made_of
            if self.weights is None or other.weights is None
            else self.made_of == other.made_of and self.weights.equal(other.weights)
        )
        return (
            same_program
            and self.graph is other.graph
            and (self.case.exporter, self.case.device, self.case.dtype)
            == (other.case.exporter, other.case.device, other.case.dtype)
            and self.output_paths == other.output_paths
        )
