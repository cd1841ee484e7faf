"""All of it for one case, within a time budget: steps, nodes, submodules, known causes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..cases import CaseId
from ..checks.inputs import is_unread
from ..checks.numbers import tolerances_of
from ..checks.uniform import is_uniform
from ..errors import ExportCheckError
from ..exporters.base import Exporter, target_of
from ..exporters.registry import load_exporter
from ..noise import quietly
from ..spec.imports import sibling_imports
from .causes import Cause, Evidence, causes_of_text, known_causes
from .culprits import (
    CulpritSearch,
    add_guards,
    culprits_of_assertion,
    culprits_of_guards,
    find_culprits,
    line_of,
)
from .ladder import Ladder, Rung, climb
from .nodes import NodeSearch, first_bad_node
from .programs import interpret
from .reproduction import factory_of, reproduce
from .subject import Clock, Subject
from .trace import trace_forward_execution

if TYPE_CHECKING:
    from ..pipeline import SpecRun

__all__ = ["Diagnosis", "diagnose", "diagnose_case"]

#: Stages before anything is exported: there are no steps to walk.
_BEFORE = ("load", "observe", "patch", "shapes")

#: The steps are given values with which a program that ignores an input is right.
_UNREAD_VERDICT = (
    "no step differs with the observed values: the program does not read an input, and the message says with "
    "which other values that shows"
)

_UNIFORM_VERDICT = (
    "no step differs with the observed values: all values of an input are equal in them, and the program "
    "does not read it as eager does; the message says with which other value that shows"
)

_TRANSLATING = re.compile(r"Error when translating node %(\w+)")


@dataclass
class Diagnosis:
    """Why a case fails.

    Attributes
    ----------
    stage, message:
        Of the failure that is explained.
    verdict:
        One line.
    ladder, nodes, pieces:
        What the three searches found; ``None`` where one was not made.
    causes:
        Known failures that it looks like.
    node:
        For a refused conversion: the operator, its module and its line.
    reproduction:
        Where the script is, or why there is none.
    notes:
        What was not done, and why.
    seconds:
        Spent.
    """

    stage: str
    message: str
    verdict: str = ""
    ladder: Ladder | None = None
    nodes: NodeSearch | None = None
    pieces: CulpritSearch | None = None
    causes: list[Cause] = field(default_factory=list)
    node: str = ""
    line: str = ""
    reproduction: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """As shown below a failure: the verdict, the steps, the first node, the culprits, known causes."""
        shown = [self.verdict]
        if self.ladder is not None and self.ladder.rungs:
            shown.extend(self.ladder.lines()[1:])
        if self.node:
            shown.append(f"node: {self.node}")
        if self.nodes is not None:
            shown.extend(self.nodes.lines())
        if self.pieces is not None:
            shown.extend(self.pieces.lines())
        if self.line and not (self.pieces is not None and self.pieces.culprits):
            shown.append(f"at {self.line}")
        for cause in self.causes:
            shown.extend(cause.lines())
        return [*shown, *self.reproduction, *self.notes]

    def to_record(self) -> dict[str, Any]:
        """Plain builtins, for the report."""
        return {
            "stage": self.stage,
            "message": self.message,
            "verdict": self.verdict,
            "node": self.node,
            "line": self.line,
            "causes": [cause.to_record() for cause in self.causes],
            "ladder": self.ladder.to_record() if self.ladder is not None else None,
            "nodes": self.nodes.to_record() if self.nodes is not None else None,
            "pieces": self.pieces.to_record() if self.pieces is not None else None,
            "reproduction": list(self.reproduction),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }


def subject_of_case(run: SpecRun, case: CaseId) -> Subject:
    """The subject of a case, from the observation that the run holds."""
    assert case.exporter is not None
    exporter = cast(Exporter, load_exporter(case.exporter))
    own = getattr(exporter, "observed_under", None)
    name = case.patch_mode or "none"
    mode = run.mode(name)
    under = str(own) if name == "own" and own is not None else name if mode.observed_under_itself else "none"
    observation = run.observe(case.device, case.dtype, under)
    mode = run.prepared(case, mode, observation, target_of(exporter))
    graph = observation.graph(case.graph)
    spec = run.spec
    return Subject(
        observation.model,
        graph.target,
        graph.shapes,
        graph.example,
        graph.calls,
        exporter,
        tolerances_of(spec, case.device, case.dtype),
        mode,
        run.mode(under),
        dict(spec.exporter_options.get(exporter.name, {})),
        observation.device,
        spec.resize,
        spec,
        run.share,
    )


def diagnose_case(
    run: SpecRun,
    case: CaseId,
    error: ExportCheckError,
    budget_s: float = 120.0,
    *,
    begin: Callable[[str], None] = lambda step: None,
    fresh: bool = False,
    reproduction: Path | None = None,
) -> Diagnosis:
    """Explain the failure of a case of a spec.

    Parameters
    ----------
    run:
        Holds the model and its observation; both are reused.
    budget_s:
        Seconds after which no new step begins. A step that runs is not interrupted.
    begin:
        Told the name of each step as it begins: a step may end the process.
    fresh:
        Nothing ran in this process before, so that no history is to blame.
    reproduction:
        Folder for a script that fails the same way without this plugin.

    Returns
    -------
    Diagnosis
        It never raises for what it finds: a step of its own that fails is a note.
    """
    clock = Clock(budget_s, begin)
    if error.stage in _BEFORE or case.exporter is None:
        found = Diagnosis(error.stage, error.message, f"the case fails at {error.stage}, before any export")
        found.causes = causes_of_text(_text(error), error.stage, case.dtype, fresh)
        found.seconds = clock.spent
        return found
    try:
        subject = subject_of_case(run, case)
    except ExportCheckError as again:
        found = Diagnosis(error.stage, error.message, f"not reproduced: {again.stage}: {again.message}")
        found.seconds = clock.spent
        return found
    subject.failed = cast("dict[str, int] | None", error.facts.get("sizes"))
    with sibling_imports(run.spec.folder):
        found = diagnose(subject, error, clock, dtype=case.dtype, fresh=fresh)
    if reproduction is not None:
        with quietly(), sibling_imports(run.spec.folder):
            try:
                found.reproduction = reproduce(found, subject, reproduction, factory_of(run.spec), clock)
            except Exception as problem:  # as for the other steps
                found.reproduction = [f"no reproduction: {type(problem).__name__}: {problem}"]
        found.seconds = clock.spent
    return found


def diagnose(
    subject: Subject, error: ExportCheckError | None, clock: Clock, *, dtype: str = "", fresh: bool = False
) -> Diagnosis:
    """Explain the failure of a subject; see `diagnose_case`."""
    found = Diagnosis(error.stage if error is not None else "", error.message if error is not None else "")
    with torch.no_grad(), quietly():
        try:
            found.ladder = climb(subject, clock)
        except Exception as problem:  # a diagnosis must not hide the failure that it explains
            found.notes.append(f"the steps could not be walked: {type(problem).__name__}: {problem}")
        ladder = found.ladder
        if ladder is not None:
            _name_axes(ladder, found.message)
            found.verdict = ladder.verdict
            if not ladder.guilty and is_unread(found.message):
                found.verdict = _UNREAD_VERDICT
            if not ladder.guilty and is_uniform(found.message):
                found.verdict = _UNIFORM_VERDICT
            found.line = line_of(ladder.error)
            _look_at_nodes(found, subject, ladder, clock)
            _look_at_pieces(found, subject, ladder, clock)
    if not found.verdict:
        found.verdict = "nothing was found"
    found.causes = known_causes(
        replace(_evidence(found, error, dtype, fresh), example_too=_wrong_on_example(subject, found.ladder))
    )
    found.seconds = clock.spent
    return found


def _name_axes(ladder: Ladder, message: str) -> None:
    """Of a capture that is refused for axes that became constants, say which, as the failure does."""
    _, found, said = message.partition(" refuses the model: ")
    if found and "became a constant: " in said and ladder.guilty == "capture" and ladder.captured is None:
        ladder.what = f"torch.export{found}{said}"


def _wrong_on_example(subject: Subject, ladder: Ladder | None) -> bool:
    """Whether the captured program, found guilty, gives other numbers on what it was made of, too."""
    if ladder is None or ladder.guilty != "capture" or ladder.captured is None or ladder.error is not None:
        return False
    with torch.no_grad(), quietly(), contextlib.suppress(Exception), subject.active():
        sample = subject.sample_of_example()
        got = interpret(ladder.captured, sample.tensors, [path for path, _ in sample.expected])
        return not all(result.ok for result in sample.compare(got, subject.tolerances))
    return False


def _text(error: ExportCheckError | None) -> str:
    return "\n".join([error.message, *error.details]) if error is not None else ""


def _look_at_nodes(found: Diagnosis, subject: Subject, ladder: Ladder, clock: Clock) -> None:
    """Inside the ONNX graph, where it is the graph or what runs it that is wrong."""
    refused = _TRANSLATING.search(_chain(ladder.error)) if ladder.error is not None else None
    if refused is not None:
        found.node = _described(ladder, refused.group(1))
    differs = bool(ladder.rungs) and any(rung.status == "differs" for rung in ladder.rungs)
    program = ladder.decomposed
    if program is None or ladder.inputs is None or not differs or ladder.guilty in ("capture", "patches"):
        return
    level = "DISABLE_ALL"
    exported = ladder.plain
    if ladder.guilty.startswith("onnxruntime"):
        level, exported = ladder.guilty.partition(" ")[2], ladder.final
    elif ladder.guilty == "onnx optimizer" or any(r.name == "onnx optimizer" and r.bad for r in ladder.rungs):
        exported = ladder.final
    if exported is None:
        return
    if exported is ladder.plain and any(r.name == "conversion" and r.status == "fails" for r in ladder.rungs):
        return  # it cannot be run; the verdict says why
    if clock.over:
        found.notes.append("the nodes were not searched: the time budget was used up")
        return
    clock.begin("first node")
    try:
        with subject.active():
            found.nodes = first_bad_node(
                program, exported, ladder.inputs, subject.tolerances, clock, level=level, device="cpu"
            )
    except Exception as problem:  # as above
        found.notes.append(f"the nodes could not be searched: {type(problem).__name__}: {problem}")
        return
    _refine(found, ladder)


def _refine(found: Diagnosis, ladder: Ladder) -> None:
    """Say in the verdict what the nodes showed."""
    nodes = found.nodes
    assert nodes is not None
    if nodes.overflow is not None and any(_infinite_in_torch(rung) for rung in ladder.rungs):
        # Eager itself has no number there: who keeps a wider one is not wrong.
        first = nodes.first = nodes.overflow
        nodes.kind, nodes.kernel, nodes.kernel_note = "overflow", None, ""
        place = f" in {first.module}" if first.module else ""
        ladder.guilty = "overflow"
        ladder.what = (
            f"no step: %{first.name} = {first.operator}{place} leaves the range of {first.dtype} in eager, "
            f"and not in the step {_first_bad(ladder)}, which rounds otherwise or computes in a wider dtype"
        )
        ladder.workaround = "clamp before it, or that layer in float32"
    elif nodes.kind == "jump" and nodes.first is not None:
        made = f" ({nodes.first.onnx_nodes})" if nodes.first.onnx_nodes else ""
        place = f" in {nodes.first.module}" if nodes.first.module else ""
        ladder.what += f"; first wrong node %{nodes.first.name} = {nodes.first.operator}{made}{place}"
        if nodes.kernel and ladder.guilty == "conversion":
            ladder.guilty = "kernel"
            ladder.what = ladder.what.replace("conversion to ONNX", "a kernel of onnxruntime", 1)
    elif nodes.kind == "drift" and nodes.first is not None:
        ladder.guilty = "drift"
        ladder.what = (
            f"no single step: rounding errors add up (drift), %{nodes.first.name} is the first value outside "
            "the tolerance"
        )
        ladder.workaround = "a tolerance for this dtype, or a part of the model in float32"
    found.verdict = ladder.verdict


def _infinite_in_torch(rung: Rung) -> bool:
    return rung.status == "differs" and re.search(r"instead of (-?inf|nan)\b", rung.note) is not None


def _first_bad(ladder: Ladder) -> str:
    return next(rung.name for rung in ladder.rungs if rung.bad)


def _chain(error: BaseException) -> str:
    texts, known = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in known:
        known.add(id(current))
        texts.append(str(current))
        current = current.__cause__
    return "\n".join(texts)


def _described(ladder: Ladder, name: str) -> str:
    from .programs import module_path, source_line

    for program in (ladder.decomposed, ladder.captured):
        for node in program.graph.nodes if program is not None else ():
            if node.name == name:
                place = "; ".join(
                    p for p in (module_path(node), source_line(node.meta.get("stack_trace"))) if p
                )
                return f"%{name} = {node.target}" + (f" [{place}]" if place else "")
    return f"%{name}"


def _look_at_pieces(found: Diagnosis, subject: Subject, ladder: Ladder, clock: Clock) -> None:
    """The smallest submodules that fail, where the capture (or a patch) is to blame."""
    if ladder.guilty not in ("capture", "patches", "export"):
        return
    if clock.over:
        found.notes.append("the submodules were not searched: the time budget was used up")
        return
    clock.begin("submodules")
    target = subject.target
    inputs = [call.arguments for call in subject.calls]
    if ladder.inputs is not None and ladder.inputs.label.startswith("sizes"):
        # It fails only there: the pieces must be called with these sizes too.
        inputs.append(ladder.inputs.arguments)
    try:
        with subject.active():
            methods = {"": target.method}
            with trace_forward_execution(target.module, traced_method=methods) as root:
                for arguments in inputs:
                    target.eager(arguments)
            # Who asked is known from the capture: nothing need be exported again.
            if ladder.refused:
                asked = culprits_of_guards(root, ladder.broken)
            else:
                asked = culprits_of_assertion(root, ladder.captured, ladder.error)
            found.pieces = asked or find_culprits(
                root,
                subject.exporter,
                clock,
                mode=subject.mode,
                tolerances=subject.tolerances,
                options=subject.options,
                refusal=ladder.error if ladder.final is None and ladder.captured is None else None,
            )
        add_guards(found.pieces, ladder.broken)
        if found.pieces.culprits:
            first = found.pieces.culprits[0]
            more = f" and {len(found.pieces.culprits) - 1} more" if len(found.pieces.culprits) > 1 else ""
            ladder.what += f"; smallest failing module: {first.site} ({first.kind}){more}"
            found.verdict = ladder.verdict
    except Exception as problem:  # as above
        found.notes.append(f"the submodules could not be searched: {type(problem).__name__}: {problem}")


def _evidence(found: Diagnosis, error: ExportCheckError | None, dtype: str, fresh: bool) -> Evidence:
    ladder = found.ladder
    parts = [_text(error), found.verdict]
    operators: Sequence[str] = ()
    differs = other = False
    masked: bool | None = None
    if ladder is not None:
        parts += [rung.note for rung in ladder.rungs]
        if ladder.error is not None:
            parts.append(_chain(ladder.error))
        differs = any(rung.status == "differs" for rung in ladder.rungs)
        other = ladder.sample.startswith("sizes")
        if ladder.inputs is not None:
            with contextlib.suppress(Exception):
                masked = _has_masked_rows(ladder.inputs.arguments)
        if ladder.captured is not None:
            operators = sorted(
                {str(n.target) for n in ladder.captured.graph.nodes if n.op == "call_function"}
            )
    if found.pieces is not None:
        parts += [
            f"{culprit.kind}: {culprit.reason}" for culprit in found.pieces.culprits if not culprit.only_alone
        ]
    return Evidence(
        "\n".join(parts),
        found.stage,
        dtype,
        ladder.guilty if ladder is not None else "",
        differs,
        other,
        masked,
        operators,
        fresh,
    )


def _has_masked_rows(arguments: dict[str, Any]) -> bool:
    """Whether an input that is a mask has a row in which nothing is allowed.

    A mask is known by its name; a row of -inf is one under every name. A mask of left padding counts: its
    first query positions see nothing but padding.
    """
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.numel():
            continue
        if value.is_floating_point():
            if bool((value == -torch.inf).all(-1).any()):
                return True
            if "mask" not in name:
                continue
            blocked = value <= torch.finfo(value.dtype).min / 2
            if bool(blocked.all(-1).any()):
                return True
            if not bool(((value == 0) | (value == 1)).all()):
                continue
        if "mask" not in name:
            continue
        allowed = value.bool()
        if bool((~allowed.any(-1)).any()) or (allowed.dim() == 2 and bool((~allowed[:, 0]).any())):
            return True
    return False
