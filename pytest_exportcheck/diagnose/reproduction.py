"""A script that reproduces a failure without this plugin, kept only after it has failed the same way.

Candidates are tried from the smallest module up; each is run in a fresh process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ExportCheckError
from ..exporters.broken_guards import broken_guards
from ..exporters.guards import CaptureWatch
from ..pytrees import register_flattening_functions
from ..runtimes.base import open_session
from .culprits import Culprit
from .pieces import ModelDiagnoseOutput
from .rungs import Ladder, innermost
from .script import Recipe, Script, versions_text, write_script
from .script_model import Factory
from .script_values import CannotWriteError
from .subject import Clock, Sample, Subject, first_line
from .trace import trace_forward_execution

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

__all__ = ["factory_of", "reproduce"]

#: A script imports torch and exports something small.
_LEAST_SECONDS = 180.0

#: Recorded calls of a piece that a script compares.
_CALLS = 3

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\b[su]#?\b")

_DIFFERS = "differs from eager"

#: How torch says which guard does not hold.
_GUARD = re.compile(r"Guard failed: ([^\n]*)")

_SIZE = re.compile(r"\w+(?:\[[^][]*\]|\.\w+)*?\.size\(\)\[\d+\]")


@dataclass(frozen=True)
class _Candidate:
    """A module to reproduce the failure with.

    Attributes
    ----------
    where:
        As named in the texts.
    message:
        First line of what is raised; empty: the numbers differ.
    """

    where: str
    subject: Subject
    samples: list[Sample]
    recipe: Recipe
    message: str


def reproduce(
    found: Diagnosis, subject: Subject, folder: Path, factory: Factory | None, clock: Clock
) -> list[str]:
    """Write ``repro.py``, ``data.safetensors`` and ``ISSUE.md`` into `folder`.

    Returns
    -------
    list of str
        Lines that say what was written, or why nothing was.
    """
    ladder = found.ladder
    if ladder is None or not ladder.guilty or ladder.guilty == "patches":
        what = "a patch is to blame, which no script has" if ladder and ladder.guilty else "nothing is guilty"
        return [f"no reproduction: {what}"]
    if subject.mode is not None and subject.mode.name != "none":
        tried = [f"tried without patch mode {subject.mode.name}"]
    else:
        tried = []
    with torch.no_grad(), subject.active(), register_flattening_functions(None):
        for candidate in _candidates(found, subject, ladder):
            if tried and clock.over:
                return ["no reproduction: the time budget was used up", *_indented(tried)]
            clock.begin(f"reproduction with {candidate.where}")
            says = _says(candidate, found)
            try:
                script = write_script(
                    candidate.subject, subject.model, factory, candidate.samples, candidate.recipe, says
                )
                problem = _attempt(script, candidate, folder, says, clock)
            except CannotWriteError as error:
                problem = str(error)
            if problem in ("", _OTHER_GUARD):
                how = problem or "fails the same way"
                return [f"reproduction ({candidate.where}, {how}): {folder / 'repro.py'}"]
            tried.append(f"{candidate.where}: {problem}")
    return ["no reproduction:", *_indented(tried)]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _candidates(found: Diagnosis, subject: Subject, ladder: Ladder) -> Iterator[_Candidate]:
    """From the smallest module to the whole target."""
    bad = next((rung for rung in ladder.rungs if rung.bad), None)
    recipe = _recipe(ladder.guilty)
    if ladder.refused:
        recipe = Recipe(refused=True)
        for culprit in found.pieces.culprits if found.pieces is not None else ():
            refused = _refused_piece(found, culprit, subject)
            if refused is not None:
                yield _Candidate(culprit.site, *refused[:2], recipe, refused[2])
    elif ladder.guilty in ("capture", "export"):
        for culprit in found.pieces.culprits if found.pieces is not None else ():
            assert found.pieces is not None
            piece = found.pieces.piece(culprit.site)
            # Calls that one graph cannot serve are no failure of an export.
            if piece is None or piece.parent is None or culprit.step == "SHAPES":
                continue
            of_piece = piece.subject(found.pieces.exporter or subject.exporter, dynamic=len(piece.inputs) > 1)
            of_piece.sizes = "off"
            samples = list(of_piece.samples())
            named = [sample for sample in samples if f" on {sample.label}:" in culprit.reason]
            message = "" if culprit.step == "DISC" else culprit.reason.partition(": ")[2] or culprit.reason
            if culprit.step == "ASSERT":
                # Which call breaks it is not known here; nodes have other names in the program of a piece.
                named, message = samples, first_line(str(ladder.error).partition(" on node ")[0])
            yield _Candidate(culprit.site, of_piece, named or samples[:_CALLS], recipe, message)
    elif path := _module_of_node(found):
        said = ""
        if found.nodes is None and ladder.error is not None:
            said = first_line(innermost(ladder.error))
        for piece in _pieces_of(subject, ladder, path):
            try:
                of_piece = piece.subject(subject.exporter, options=dict(subject.options))
            except ExportCheckError:
                continue  # One graph cannot serve its calls; that of the whole model did.
            of_piece.sizes = "off"
            samples = list(of_piece.samples())[-_CALLS:]
            yield _Candidate(path, of_piece, samples, recipe, said)
    message = ""
    if ladder.error is not None and (bad is None or bad.status == "fails"):
        message = first_line(innermost(ladder.error))
    samples = [ladder.inputs] if ladder.inputs is not None else []
    yield _Candidate(type(subject.target.module).__name__, subject, samples, recipe, message)


def _module_of_node(found: Diagnosis) -> str:
    """Path of the module with the first wrong node, or with the one that is not converted."""
    if found.nodes is not None:
        jump = found.nodes.kind == "jump" and found.nodes.first is not None
        return found.nodes.first.module.partition(" (")[0] if jump and found.nodes.first is not None else ""
    place = found.node.partition(" [")[2].partition("; ")[0]
    return place.partition(" (")[0] if place.endswith(")") else ""


def _refused_piece(
    found: Diagnosis, culprit: Culprit, subject: Subject
) -> tuple[Subject, list[Sample], str] | None:
    """The module that ties the program to sizes, if its own program refuses a call by the same line."""
    piece = found.pieces.piece(culprit.site) if found.pieces is not None else None
    if piece is None or piece.parent is None:
        return None
    try:
        own = piece.subject(subject.exporter, dynamic=len(piece.inputs) > 1, options=dict(subject.options))
        own.sizes = "off"
        watch = CaptureWatch()
        exported, paths = own.export(watch)
        session = open_session(exported, own.device, paths)
    except Exception:  # alone it is no graph: the whole model is tried
        return None
    for sample in own.samples():
        broken = broken_guards(watch, own.shapes, sample.arguments)
        if any(guard.place == culprit.line for guard in broken):
            try:
                session.run(sample.tensors)
            except AssertionError as error:
                return own, [sample], first_line(error)
            except Exception:  # it fails there in another way
                continue
    return None


def _recipe(guilty: str) -> Recipe:
    if guilty in ("capture", "export"):
        return Recipe()
    if guilty == "onnx optimizer":
        return Recipe(False)
    if guilty.startswith("onnxruntime "):
        return Recipe(False, level=guilty.partition(" ")[2])
    return Recipe(False, optimize=False)


def _pieces_of(subject: Subject, ladder: Ladder, path: str) -> list[ModelDiagnoseOutput]:
    """The call sites of the module at `path`, traced on the recorded calls and on the inputs that fail."""
    target = subject.target
    if not path or path == "the model":
        return []
    inputs = [call.arguments for call in subject.calls]
    if ladder.inputs is not None:
        inputs.append(ladder.inputs.arguments)
    with trace_forward_execution(target.module, traced_method={"": target.method}) as root:
        for arguments in inputs:
            target.eager(arguments)
    return [piece for piece in root if piece.path == path and piece.parent is not None][:1]


def _says(candidate: _Candidate, found: Diagnosis) -> dict[str, str]:
    kind = type(candidate.subject.target.module).__name__
    expected = "the module is exported, and the program gives the numbers of eager"
    actual = candidate.message or f"the program {_DIFFERS}"
    if candidate.recipe.refused:
        assert found.ladder is not None
        guards = found.ladder.broken
        actual = f"the program refuses sizes that the module takes: {guards[0]}"
    guilty = found.verdict.removeprefix("guilty: ").removeprefix("no step: ").partition("; ")[0]
    return {"title": f"{kind} fails to export: {guilty}", "expected": expected, "actual": actual}


def _attempt(script: Script, candidate: _Candidate, folder: Path, says: dict[str, str], clock: Clock) -> str:
    """Run the script in a fresh process; why it is not kept, or empty if it is in `folder` now.

    A refusal of the same sizes by another guard is kept too: guards that hold are not checked in one order.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="exportcheck-") as temporary:
        place = Path(temporary)
        texts = {"repro.py": script.text, **script.files}
        _write(texts, place)
        save_file(script.tensors, place / "data.safetensors")
        limit = max(clock.left, _LEAST_SECONDS)
        try:
            ran = subprocess.run(
                [sys.executable, "repro.py"],
                cwd=place,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=limit,
                check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        except subprocess.TimeoutExpired:
            return f"the script had not ended after {limit:.0f} s"
        if ran.returncode == 0:
            return "the script does not fail"
        said = [line for line in ran.stderr.splitlines() if line.strip()]
        wanted = candidate.message or _DIFFERS
        other = ""
        if candidate.recipe.refused and (guards := _GUARD.findall(ran.stderr)):
            same = any(_form(guard) == _form(known) for guard in guards for known in _GUARD.findall(wanted))
            other = "" if same else _OTHER_GUARD
        elif not _same(wanted, ran.stderr):
            return f"the script fails otherwise: {said[-1] if said else f'status {ran.returncode}'}"
        try:
            _write(texts, folder)
            (folder / "data.safetensors").write_bytes((place / "data.safetensors").read_bytes())
            (folder / "ISSUE.md").write_text(_issue(script, says, said), encoding="utf-8")
        except OSError as error:
            return f"not written to {folder}: {error}"
    return other


def _write(texts: Mapping[str, str], folder: Path) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


#: A line of torch's log, of ONNX Runtime's, or a warning with its place.
_LOGGED = re.compile(r"[VDIWE]\d{4} [\d:.]+ |\S* ?\d{4}-\d\d-\d\d [\d:.]+ \[|\S+:\d+: \w*Warning: ")

#: So many lines of what a script raised are shown.
_MOST_LINES = 12

_OTHER_GUARD = "refuses the same sizes, by another guard"


def _form(guard: str) -> list[str]:
    """A guard without the names of the inputs, which have others in a script, and in no order."""
    return sorted(re.findall(r"\w+|[^\w\s]", _SIZE.sub("size", guard)))


def _same(wanted: str, text: str) -> bool:
    """Whether a message is in `text`, but for numbers and names of symbols."""

    def plain(value: str) -> str:
        return re.sub(r"\s+", " ", _NUMBER.sub("#", value))

    return plain(wanted)[:200] in plain(text)


def _raised(said: list[str]) -> list[str]:
    """What a script raised, of all that it wrote: no frames, no warnings and no log of a library."""
    first = next((at for at, line in enumerate(said) if line.startswith("Traceback")), 0)
    shown = [line for line in said[first:] if not line.startswith(("  ", "Traceback"))]
    return [line for line in shown if not _LOGGED.match(line)][-_MOST_LINES:]


def _issue(script: Script, says: dict[str, str], said: list[str]) -> str:
    errors = _raised(said)
    fence = "~~~"
    beside = "".join(f", and `{name}`" for name in script.files)
    more = [
        line
        for name, text in script.files.items()
        for line in (f"`{name}`:", "", f"{fence}python", text.rstrip(), fence, "")
    ]
    return "\n".join(
        [
            f"# {says['title']}",
            "",
            f"**Versions**: {versions_text()}",
            "",
            f"**Expected**: {says['expected']}.",
            "",
            f"**Actual**: {says['actual']}",
            "",
            f"{fence}text",
            *errors,
            fence,
            "",
            f"**To reproduce**: `python repro.py`, with `data.safetensors` (weights and inputs){beside} "
            "beside it.",
            "",
            f"{fence}python",
            script.text.rstrip(),
            fence,
            "",
            *more,
        ]
    )


def factory_of(spec: Any) -> Factory | None:
    """The factory that a spec names, ``None`` if it names none."""
    from ..spec.imports import load_callable

    if spec.model.factory is None:
        return None
    function = load_callable(str(spec.model.factory), spec.folder)
    return Factory(function, dict(spec.model.kwargs), spec.folder)
