"""The smallest submodules that fail, so that one culprit does not hide another."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree

from ..checks.compare import Tolerances
from ..exporters.base import Exported, Exporter, ExportRequest, target_of
from ..exporters.broken_guards import BrokenGuard
from ..exporters.onnx_dynamo import OnnxDynamo, capture
from ..patches.base import PatchMode
from ..pytrees.string_type import string_type
from ..tracebacks import frame_line, is_machinery
from .piece_text import short_dims
from .pieces import ModelDiagnoseOutput, failed_export
from .programs import asserted_at
from .status import StatusExport, StatusExportCode
from .subject import Clock

__all__ = [
    "CaptureForOnnx",
    "Culprit",
    "CulpritSearch",
    "add_guards",
    "culprits_of_guards",
    "find_culprits",
    "line_of",
]

#: How torch says which demand does not hold, and at which node.
_ASSERTED = re.compile(r"Runtime assertion failed for expression (.+?) on node '(\w+)'")

_FILE = re.compile(r'File "([^"]+)", line (\d+)(?:, in \S+)?\n\s*([^\n]*)')


class CaptureForOnnx:
    """The first step of ``onnx-dynamo`` alone: what it refuses or gets wrong needs no conversion to see."""

    name = "onnx-dynamo (capture)"
    target = "torch"

    def export(self, request: ExportRequest) -> Exported:
        """The captured program as a callable, without guards, which ONNX does not have."""
        program = capture(request)
        module = program.module(check_guards=False)
        module.validate_inputs = False  # type: ignore[assignment]  # sizes, too
        return Exported(module)


@dataclass(frozen=True)
class Culprit:
    """A piece that fails while everything below it is fine.

    Attributes
    ----------
    path, kind:
        Of the module in the model, and its class.
    site:
        Names from the root, which tell call sites of one module apart.
    step, reason:
        As in `StatusExport`; ``GUARD``: the program demands an answer that it gave to the capture;
        ``ASSERT``: it checks a demand when it runs.
    line:
        The line of the user's or of transformers' code: ``file:line in function: code``.
    inputs:
        Of its recorded calls, with shapes.
    dynamic_shapes:
        As inferred from them.
    own_code:
        Whether it fails with all its children replaced by custom ops too; ``None``: it has none, or that was
        not tried.
    parent, parent_exports:
        The piece that calls it, and whether that one exports with all its failing children replaced; ``None``
        if that was not tried.
    parent_reason:
        Why it does not.
    alike:
        Sites of the same class with the same inputs that were not tried.
    only_alone:
        It cannot be exported alone, which inside of the whole need be no fault: that can be exported, or
        fails otherwise.
    """

    path: str
    kind: str
    site: str
    step: str
    reason: str
    line: str = ""
    inputs: tuple[str, ...] = ()
    dynamic_shapes: str = ""
    own_code: bool | None = None
    parent: str = ""
    parent_exports: bool | None = None
    parent_reason: str = ""
    alike: tuple[str, ...] = ()
    only_alone: bool = False

    def lines(self) -> list[str]:
        """As shown to a person."""
        what = {
            "DISC": "gives wrong numbers",
            "EVAL": "does not run",
            "SHAPES": "cannot be one graph",
            "GUARD": "ties the program to sizes",
            "ASSERT": "ties the program to a value that is known only when it runs",
        }
        failed = what.get(self.step, "cannot be exported")
        role = "culprit"
        if self.only_alone:
            role, failed = "perhaps", f"{failed} alone (inside of the whole that need be no fault)"
        shown = [f"{role}: {self.site} ({self.kind}) {failed}: {self.reason}"]
        if self.line:
            shown.append(f"  at {self.line}")
        if self.own_code:
            shown.append("  in its own code: it fails with its children replaced by custom ops too")
        shown.extend(f"  called with {text}" for text in self.inputs)
        if self.dynamic_shapes:
            shown.append(f"  dynamic shapes {self.dynamic_shapes}")
        if self.parent_exports is not None:
            shown.append(
                f"  {self.parent} exports with it replaced by a custom op"
                if self.parent_exports
                else f"  {self.parent} does not export with it replaced either: {self.parent_reason}"
            )
        if self.alike:
            shown.append(f"  not tried, of the same class with the same inputs: {', '.join(self.alike)}")
        return shown

    def to_record(self) -> dict[str, Any]:
        """Plain builtins."""
        return {**vars(self), "inputs": list(self.inputs), "alike": list(self.alike)}


@dataclass
class CulpritSearch:
    """What the search found.

    Attributes
    ----------
    culprits:
        In the order of the calls.
    tried:
        How many exports were made.
    note:
        What was not searched, and why.
    root:
        Result of the whole.
    tree, exporter:
        What was searched, and how its pieces were exported.
    """

    culprits: list[Culprit] = field(default_factory=list)
    tried: int = 0
    note: str = ""
    root: StatusExport | None = None
    tree: ModelDiagnoseOutput | None = field(default=None, repr=False)
    exporter: Exporter | None = field(default=None, repr=False)

    def piece(self, site: str) -> ModelDiagnoseOutput | None:
        """The piece at the site of a culprit."""
        return next((piece for piece in self.tree or () if _site(piece) == site), None)

    def lines(self) -> list[str]:
        """As shown to a person."""
        shown = [line for culprit in self.culprits for line in culprit.lines()]
        return [*shown, f"piece by piece: {self.note}"] if self.note else shown

    def to_record(self) -> dict[str, Any]:
        """Plain builtins."""
        return {
            "culprits": [culprit.to_record() for culprit in self.culprits],
            "tried": self.tried,
            "note": self.note,
        }


def line_of(error: BaseException | None) -> str:
    """The last line of the user's or of transformers' code in the traceback of an error.

    Where the traceback has none (strict mode reads bytecode) the message is asked, which quotes it.
    """
    known: set[int] = set()
    current = error
    found = ""
    while current is not None and id(current) not in known:
        known.add(id(current))
        frames = [f for f in traceback.extract_tb(current.__traceback__) if not is_machinery(f.filename)]
        if frames:
            found = frame_line(frames[-1]).removeprefix("at ")
        current = current.__cause__ or current.__context__
    if not found and error is not None:
        quoted = [match for match in _FILE.findall(str(error)) if not is_machinery(match[0])]
        if quoted:
            file, line, code = quoted[-1]
            found = f"{file}:{line}" + (f": {code.strip()}" if code.strip() else "")
    return found


def find_culprits(
    root: ModelDiagnoseOutput,
    exporter: Exporter,
    clock: Clock,
    *,
    mode: PatchMode | None = None,
    tolerances: Tolerances | None = None,
    options: dict[str, Any] | None = None,
    refusal: BaseException | None = None,
) -> CulpritSearch:
    """Descend from `root` into every piece that fails, down to those whose children are all fine.

    For ``onnx-dynamo`` only the capture is tried: where the conversion is wrong the nodes say more.

    Parameters
    ----------
    root:
        From `trace_execution_piece_by_piece`.
    mode:
        Active around every export.
    refusal:
        What the exporter is known to raise for the whole, which then need not be tried again.
    """
    chosen: Exporter = CaptureForOnnx() if isinstance(exporter, OnnxDynamo) else exporter
    options = {} if chosen is not exporter else dict(options or {})
    search = _Search(chosen, clock, tolerances or Tolerances(), options)
    patches = mode.apply(root.model, target_of(exporter)) if mode is not None else contextlib.nullcontext()
    with patches:
        status = search.export(root) if refusal is None else failed_export(refusal)
        search.found.root, search.found.tree, search.found.exporter = status, root, chosen
        if status.is_ok():
            search.found.note = "the whole passes on the traced calls: nothing to search for"
        else:
            culprits = search.descend(root, status)
            opaque = {_site(piece) for piece in root if _is_opaque(piece)}
            search.found.culprits = _weighed(culprits, status, opaque)
    search.found.tried = search.tried
    return search.found


def _weighed(culprits: list[Culprit], whole: StatusExport, opaque: set[str]) -> list[Culprit]:
    """Where the whole can be exported, those come first that can be, too, and fail when they run.

    Where it cannot, those come last that fail by what they take or return alone: inside it is no matter.
    """
    ran = ("EVAL", "DISC")
    if whole.step in ran:
        alone = [culprit.step not in ran for culprit in culprits]
    else:
        alone = [c.site in opaque and not c.line and c.reason != whole.reason for c in culprits]
    weighed = [replace(c, only_alone=only) for c, only in zip(culprits, alone, strict=True)]
    return sorted(weighed, key=lambda culprit: culprit.only_alone)


def culprits_of_guards(root: ModelDiagnoseOutput, broken: Sequence[BrokenGuard]) -> CulpritSearch | None:
    """Modules whose questions about sizes the inputs answer otherwise; nothing is exported.

    ``None`` if no line or no module is known.
    """
    pieces = {id(piece.model): piece for piece in reversed(list(root))}
    found = CulpritSearch(tree=root)
    told: set[tuple[int, str]] = set()
    for guard in broken:
        piece = next((pieces[id(module)] for module in guard.modules if id(module) in pieces), None)
        if piece is not None and guard.place and (id(piece), guard.demands) not in told:
            told.add((id(piece), guard.demands))
            status = StatusExport(StatusExportCode.FAIL, "GUARD", str(guard))
            found.culprits.append(replace(_culprit(piece, status), line=guard.place))
    return found if found.culprits else None


#: A piece, what its export gave, the sites of those like it that were not tried.
_Failing = tuple[ModelDiagnoseOutput, StatusExport, tuple[str, ...]]


def culprits_of_assertion(
    root: ModelDiagnoseOutput, program: torch.export.ExportedProgram | None, error: BaseException | None
) -> CulpritSearch | None:
    """The module with the value that a captured program checks when it runs; nothing is exported.

    ``None`` if `error` is no such thing, or the program does not say where the value is made.
    """
    said = _ASSERTED.search(str(error))
    made = asserted_at(program, said.group(2)) if said is not None and program is not None else None
    piece = next((p for p in root if made is not None and p.path == made[0]), None)
    if said is None or made is None or piece is None:
        return None
    reason = f"it demands {said.group(1)} of what is computed there, and these inputs break it"
    status = StatusExport(StatusExportCode.FAIL, "ASSERT", reason)
    return CulpritSearch([replace(_culprit(piece, status), line=made[1])], tree=root)


def add_guards(found: CulpritSearch, broken: Sequence[BrokenGuard]) -> None:
    """Where a culprit gives wrong numbers at sizes that it asked about: what it asked, and in which line."""
    for number, culprit in enumerate(found.culprits):
        piece = found.piece(culprit.site)
        asked = next((g for g in broken if piece and g.place and g.modules[:1] == (piece.model,)), None)
        if asked is not None and culprit.step == "DISC" and not culprit.line:
            reason = f"{culprit.reason}; {asked}"
            found.culprits[number] = replace(culprit, line=asked.place, reason=reason)


class _Search:
    def __init__(
        self, exporter: Exporter, clock: Clock, tolerances: Tolerances, options: dict[str, Any]
    ) -> None:
        self.exporter = exporter
        self.clock = clock
        self.tolerances = tolerances
        self.options = options
        self.tried = 0
        self.found = CulpritSearch()
        #: What an exporter says that takes no custom ops: it need not be asked again.
        self.no_custom_ops: StatusExport | None = None

    def export(
        self, piece: ModelDiagnoseOutput, replaced: Sequence[ModelDiagnoseOutput] = ()
    ) -> StatusExport:
        if replaced and self.no_custom_ops is not None:
            return self.no_custom_ops
        self.tried += 1
        status = piece.export_once(
            self.exporter,
            self.options,
            tolerances=self._tolerances_of(piece),
            replaced=replaced,
        )
        if status.step == "CUSTOM":
            self.no_custom_ops = status
        return status

    def _tolerances_of(self, piece: ModelDiagnoseOutput) -> Tolerances:
        # What a spec says about its outputs is not about those of a layer inside.
        return (
            self.tolerances if piece.parent is None else Tolerances(computed_in=self.tolerances.computed_in)
        )

    def descend(self, piece: ModelDiagnoseOutput, status: StatusExport) -> list[Culprit]:
        """Culprits at or below a piece that fails."""
        if not piece.children:
            return [_culprit(piece, status)]
        failing: list[_Failing] = []
        untried: list[ModelDiagnoseOutput] = []
        for first, alike in _kinds(piece.children):
            if self._over(piece):
                break
            result = self.export(first)
            if not result.is_ok():
                failing.append((first, result, tuple(_site(other) for other in alike)))
            elif status.step == "DISC":
                # The same code on the same shapes with other weights: numbers may still differ.
                failing += self._failing_of(alike)
            else:
                untried += alike
        culprit = None
        if not failing:
            culprit = self._own(piece, status)
            if culprit.own_code is not True:
                # What they are made of may say more than their text and shapes do.
                failing = self._failing_of(untried)
                untried = []
        if not failing:
            return [culprit or self._own(piece, status)]
        culprits = self._in_children(failing)
        return self._without(piece, [child for child, _, _ in failing], culprits, untried)

    def _failing_of(self, pieces: Sequence[ModelDiagnoseOutput]) -> list[_Failing]:
        failing: list[_Failing] = []
        for piece in pieces:
            if self._over(piece):
                break
            result = self.export(piece)
            if not result.is_ok():
                failing.append((piece, result, ()))
        return failing

    def _in_children(self, failing: list[_Failing]) -> list[Culprit]:
        culprits: list[Culprit] = []
        for child, result, same in failing:
            below = self.descend(child, result)
            culprits += [replace(c, alike=c.alike or same) if c.site == _site(child) else c for c in below]
        return culprits

    def _own(self, piece: ModelDiagnoseOutput, status: StatusExport) -> Culprit:
        """All children are fine: the piece itself, or what its children do together."""
        culprit = _culprit(piece, status)
        if self._over(piece):
            return culprit
        replaced = _replaceable(piece.children)
        apart = self.export(piece, replaced=replaced)
        if apart.step == "CUSTOM" or (len(replaced) < len(piece.children) and not apart.is_ok()):
            return culprit
        return replace(culprit, own_code=not apart.is_ok())

    def _without(
        self,
        piece: ModelDiagnoseOutput,
        failing: list[ModelDiagnoseOutput],
        culprits: list[Culprit],
        untried: list[ModelDiagnoseOutput],
    ) -> list[Culprit]:
        """Whether the parent exports without its failing children; if not, it has a fault of its own."""
        if self._over(piece):
            return culprits
        alike = [other for other in piece.children if any(_alike(other, one) for one in failing)]
        same = _replaceable(alike)
        if not same:
            return culprits
        apart = self.export(piece, replaced=same)
        if apart.step == "CUSTOM":
            return culprits
        sites = {_site(child) for child in failing}
        told = [
            replace(c, parent=_site(piece), parent_exports=apart.is_ok(), parent_reason=apart.reason)
            if c.site in sites and len(same) == len(alike)
            else c
            for c in culprits
        ]
        own = _culprit(piece, apart)
        if apart.is_ok() or any(
            (own.reason, own.step, own.line) == (c.reason, c.step, c.line) for c in culprits
        ):
            return told
        if more := self._failing_of(untried):
            every = [*failing, *(child for child, _, _ in more)]
            return self._without(piece, every, [*culprits, *self._in_children(more)], [])
        return [*told, self._own(piece, apart)]

    def _over(self, piece: ModelDiagnoseOutput) -> bool:
        if self.clock.over:
            self.found.note = f"the time budget was used up below {_site(piece)}"
        return self.clock.over


def _site(piece: ModelDiagnoseOutput) -> str:
    names = []
    current: ModelDiagnoseOutput | None = piece
    while current is not None and current.parent is not None:
        names.append(current.name)
        current = current.parent
    return ".".join(reversed(names)).replace(".[", "[") or type(piece.model).__name__


def _form(piece: ModelDiagnoseOutput) -> tuple[Any, ...]:
    """What an export of a piece depends on, beside its weights."""
    leaves = [_pytree.tree_leaves(given) for given in piece.inputs]
    return (
        type(piece.model),
        piece.method_name,
        repr(piece.model),
        *(
            tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in call)
            for call in leaves
        ),
    )


def _is_opaque(piece: ModelDiagnoseOutput) -> bool:
    """Whether it takes or returns tensors inside of an object that torch cannot take apart."""
    return any(
        not isinstance(leaf, torch.Tensor | torch.nn.Module)
        and any(isinstance(value, torch.Tensor) for value in _pytree.tree_leaves(vars(leaf)))
        for leaf in _pytree.tree_leaves([piece.inputs, piece.outputs])
        if hasattr(leaf, "__dict__")
    )


def _replaceable(pieces: Sequence[ModelDiagnoseOutput]) -> list[ModelDiagnoseOutput]:
    """Those that a custom op can stand in for: it takes and returns tensors."""
    return [piece for piece in pieces if not _is_opaque(piece)]


def _alike(first: ModelDiagnoseOutput, second: ModelDiagnoseOutput) -> bool:
    return first is second or _form(first) == _form(second)


def _kinds(
    pieces: Sequence[ModelDiagnoseOutput],
) -> Iterator[tuple[ModelDiagnoseOutput, list[ModelDiagnoseOutput]]]:
    """(first of a kind, the others of it): layers of one class differ in their weights only."""
    groups: dict[tuple[Any, ...], list[ModelDiagnoseOutput]] = {}
    for piece in pieces:
        groups.setdefault(_form(piece), []).append(piece)
    for group in groups.values():
        yield group[0], group[1:]


def _culprit(piece: ModelDiagnoseOutput, status: StatusExport) -> Culprit:
    try:
        shapes = short_dims(str(piece.guess_dynamic_shapes()))
    except ValueError as error:
        shapes = f"none: {error}"
    return Culprit(
        piece.path,
        type(piece.model).__name__,
        _site(piece),
        status.step,
        status.reason,
        line_of(status.error),
        tuple(string_type(given, with_shape=True) for given in piece.inputs[:3]),
        shapes,
        parent=_site(piece.parent) if piece.parent is not None else "",
    )
