"""YAML file -> `ModelSpec`, or one `SpecError` that tells every problem of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import Problem, SpecError
from ..filepaths import relative_text
from .model import ModelSpec
from .names import suggest
from .nodes import MAX_BYTES, NodePath, Report, parse_document
from .rules import check_rules
from .validate import report_errors
from .values import parse_calls, parse_missing

__all__ = ["load_spec", "parse_spec"]


def load_spec(
    path: Path, root: Path | None = None, known: Mapping[str, Sequence[str]] | None = None
) -> ModelSpec:
    """Read one spec file.

    Parameters
    ----------
    path:
        The file.
    root:
        Messages show paths relative to this folder.
    known:
        Names that exist, by kind (``exporters``, ``patch_modes``, ``comparisons``); others are then a
        problem. These names are open (entry points), so a kind that is absent is not checked.

    Raises
    ------
    SpecError
        The file cannot be read, or is not a valid spec.
    """
    path = Path(path)
    shown = _shown(path, root)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _fault(shown, f"{size} bytes: a spec is at most {MAX_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise _fault(shown, f"cannot be read: {error.strerror or error}") from None
    if b"\0" in raw and not raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _fault(shown, "is a binary file (it has NUL bytes)")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise SpecError([Problem(shown, line, column, "is not UTF-8 text")]) from None
    return parse_spec(text, path, root, known)


def parse_spec(
    text: str, path: Path, root: Path | None = None, known: Mapping[str, Sequence[str]] | None = None
) -> ModelSpec:
    """Like `load_spec`, for text that is not, or not yet, in the file `path`."""
    path = Path(path)
    report = Report(_shown(path, root))
    if not parse_document(text, report):
        raise report.error()
    data = report.document.data
    if not isinstance(data, dict) or "exportcheck" not in data:
        hint = ""
        if isinstance(data, dict):
            hint = next((h for key in data if (h := suggest(key, ["exportcheck"]))), "")
        report.at(1, 1, f"is not a spec: the key 'exportcheck: 1' is missing{hint and ' (mistyped?)'}")
        raise report.error()
    spec = _validate(data, path, known or {}, report)
    if spec is None or report.problems:
        raise report.error()
    return spec.attach(path, report.shown, report.document)


def _validate(
    data: dict[Any, Any], path: Path, known: Mapping[str, Sequence[str]], report: Report
) -> ModelSpec | None:
    prepared = data
    observe = data.get("observe")
    if isinstance(observe, dict):
        observe = dict(observe)
        if "calls" in observe:
            dims = observe.get("dims")
            declared = {name for name in dims if isinstance(name, str)} if isinstance(dims, list) else set()
            calls = parse_calls(observe["calls"], ("observe", "calls"), declared, path.parent, report)
            observe["calls"] = calls
        _parse_stand_ins(observe, ("observe",), path.parent, report)
        if isinstance(observe.get("target"), dict):
            targets = {k: dict(v) if isinstance(v, dict) else v for k, v in observe["target"].items()}
            for name, target in targets.items():
                if isinstance(target, dict):
                    _parse_stand_ins(target, ("observe", "target", name), path.parent, report)
            observe["target"] = targets
        prepared = {**data, "observe": observe}
    check_rules(data, known, report)
    try:
        return ModelSpec.model_validate(prepared)
    except ValidationError as error:
        report_errors(error, ModelSpec, report)
        return None


def _parse_stand_ins(section: dict[Any, Any], where: NodePath, folder: Path, report: Report) -> None:
    key = "value_if_missing"
    if key in section:
        section[key] = parse_missing(section[key], (*where, key), folder, report)


def _shown(path: Path, root: Path | None) -> str:
    return path.as_posix() if root is None else relative_text(path, root)


def _fault(shown: str, message: str) -> SpecError:
    return SpecError([Problem(shown, 1, 1, message)])
