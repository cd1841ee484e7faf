"""The captured program against eager, beside the one that is judged: was it wrong before its conversion?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ComparisonError, ExportError, ObserveError
from ..exporters.base import split_constants
from ..exporters.guards import Comparison
from ..observe.observation import GraphObservation
from ..plurals import counted
from ..pytrees import clone_tree, flatten_with_paths
from ..spec import ModelSpec
from .compare import LeafComparison, Tolerances, table
from .layout import lies_otherwise
from .numbers import Leaves, _inputs_by_path, _summary
from .padded import mask_lines
from .padding import rules_of_call
from .rounding import MovedEager, compare_rounded
from .shortage import shortage
from .thresholds import decided_lines
from .tight import Tight, too_tight

__all__ = ["CapturedProgram", "runner_of"]

Run = Callable[[dict[str, Any]], Leaves]


class CapturedProgram:
    """What an exporter captured on its way to another format.

    Attributes
    ----------
    differs:
        Calls on which it differs from eager.
    """

    def __init__(
        self, spec: ModelSpec, graph: GraphObservation, tolerances: Tolerances, record: dict[str, Any]
    ) -> None:
        self._spec = spec
        self._graph = graph
        self._tolerances = tolerances
        self._record = record
        self._run: Run | None = None
        self._agrees: list[int] = []
        self._refuses: list[str] = []
        self.differs: list[str] = []
        self._first_differing = -1

    def adopt(self, found: dict[str, Any], runner: Callable[[], Run]) -> None:
        """What the same program has shown in an earlier case; `runner` makes what runs it, when needed."""
        self._record["captured"] = found
        self._agrees = list(range(found["agrees"]))
        self._refuses = list(found["refuses"])
        made: list[Run] = []

        def run(tensors: dict[str, Any]) -> Leaves:
            made[:] = made or [runner()]
            return made[0](tensors)

        self._run = run

    def check(self, program: torch.export.ExportedProgram, run: Run | None = None) -> None:
        """Replay every observed call; refusals by a guard are noted: the ONNX model has no guards.

        Parameters
        ----------
        run:
            Runs the program on (copies of) the tensor arguments by name; default: its module.

        Raises
        ------
        ExportError
            The numbers are not those of eager.
        ComparisonError
            A comparison of the user's own judges nothing.
        """
        try:
            self._run = run or runner_of(program)
        except Exception as error:
            self._record["captured"] = {"not_run": _first_line(error)}
            return
        shown: list[str] = []
        tight: list[Tight] = []
        for position, call in enumerate(self._graph.calls):
            what = f"call {position + 1} of {len(self._graph.calls)}"
            try:
                arguments = self._graph.shapes.complete(call)
            except ObserveError:
                # Said where the call is to be fed to the program that is judged.
                continue
            try:
                results = self._compare(
                    arguments,
                    call.output_leaves(),
                    MovedEager.of(self._graph.target, call),
                )
            except ComparisonError:
                raise
            except Exception as error:
                self._refuses.append(f"{what}: {_first_line(error)}")
                continue
            if all(result.ok for result in results):
                self._agrees.append(position)
            else:
                inputs, example = map(_inputs_by_path, (arguments, self._graph.example.arguments))
                if not self.differs:
                    self._first_differing = call.index
                shown = shown or [*table(results), *lies_otherwise(inputs, example)]
                tight.append(too_tight(results))
                self.differs.append(f"{what}: {_summary(results, self._tolerances)}")
        self._record["captured"] = {
            "agrees": len(self._agrees),
            "refuses": self._refuses,
            "differs": self.differs,
        }
        if self.differs:
            why = tight[0] if all(each.text for each in tight) else Tight()
            raise ExportError(
                f"{why.text}the captured program already differs from eager, {self.differs[0]}",
                details=shown,
                facts=why.facts,
            )

    def _compare(
        self, arguments: Mapping[str, Any], expected: Leaves, eager: MovedEager
    ) -> list[LeafComparison]:
        assert self._run is not None
        tensors, _ = split_constants(arguments)
        with torch.no_grad():
            got = self._run(clone_tree(tensors))
        where = rules_of_call(self._spec, _inputs_by_path(arguments), expected, "export")
        return compare_rounded(expected, got, self._tolerances, where, eager)

    def on_observed_calls(self) -> list[str]:
        """For the details of a failure of the converted program on an observed call."""
        if self._agrees and not self._refuses:
            return ["the captured program agrees with eager: the conversion or the runtime is to blame"]
        if self._refuses:
            return [
                f"the captured program agrees with eager on {len(self._agrees)} of "
                f"{counted(len(self._graph.calls), 'call')} and refuses: {self._refuses[0]}"
            ]
        return []

    def by_masks(self) -> list[str]:
        """For the details of its own failure: whether a mask decides where it differs."""
        run = self._run
        if run is None or self._refuses:
            return []

        def answer(arguments: dict[str, Any]) -> Leaves:
            with torch.no_grad():
                return run(clone_tree(split_constants(arguments)[0]))

        return mask_lines(self._spec, self._graph, self._tolerances, answer)

    def decided(self, comparisons: Sequence[Comparison]) -> list[str]:
        """For the details of its own failure: what was decided by other sizes than those of the call."""
        sizes = self._graph.shapes.sizes.get(self._first_differing, {})
        return decided_lines(comparisons, self._graph.example.sizes, sizes)

    def at(self, arguments: Mapping[str, Any], expected: Leaves) -> list[str]:
        """For the details of a failure of the converted program at other sizes."""
        if self._run is None:
            return []
        try:
            results = self._compare(arguments, expected, MovedEager(self._graph.target, lambda: arguments))
        except ComparisonError as error:
            return [f"the captured program is not judged: {error.message}"]
        except Exception as error:
            if shortage(error) is not None:
                return [f"the captured program is not judged, for want of memory: {_first_line(error)}"]
            return [
                f"the captured program refuses these sizes, the conversion drops that: {_first_line(error)}"
            ]
        if all(result.ok for result in results):
            return ["the captured program agrees with eager: the conversion or the runtime is to blame"]
        return [f"the captured program is wrong too: {_summary(results, self._tolerances)}"]


def runner_of(program: torch.export.ExportedProgram) -> Run:
    """Runs a program on tensor arguments by name."""
    module = program.module()
    return lambda tensors: flatten_with_paths(module(**tensors))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
