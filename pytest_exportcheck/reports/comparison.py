"""A comparison of two runs as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from ..plurals import counted
from .compare import Change, Comparison
from .markdown import markdown_cell
from .record import json_ready

__all__ = ["as_json", "as_markdown", "as_text"]

#: Order and headings of the effects.
_HEADINGS = {"worse": "Got worse", "better": "Got better", "other": "Changed"}

#: Longer lists of cases that only one run has are cut.
_MOST_NAMES = 10


def as_json(comparison: Comparison) -> str:
    """Everything, for machines."""
    data = {"worse": comparison.worse, **dataclasses.asdict(comparison)}
    return json.dumps(json_ready(data), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_text(comparison: Comparison) -> str:
    """For a terminal: what got worse first."""
    lines = [f"exportcheck compare: {comparison.before} -> {comparison.after}"]
    lines += [f"  {package}" for package in comparison.packages] or ["  the same packages"]
    for effect, heading in _HEADINGS.items():
        changes = comparison.of(effect)
        if changes:
            lines += ["", f"{heading} ({len(changes)}):"]
            lines += _by_case(changes)
    for what, names in _missing(comparison):
        lines += ["", f"{what} ({len(names)}):", *(f"  {name}" for name in names[:_MOST_NAMES])]
        if len(names) > _MOST_NAMES:
            lines.append(f"  and {len(names) - _MOST_NAMES} more")
    lines += ["", _summary(comparison)]
    return "\n".join(lines) + "\n"


def _by_case(changes: list[Change]) -> Iterator[str]:
    """The changes of each case; cases of which the same is said, such as a renamed output, together."""
    texts: dict[str, list[str]] = {}
    for change in changes:
        texts.setdefault(change.case, []).append(f"    {change.text}")
    together: dict[tuple[str, ...], list[str]] = {}
    for case, said in texts.items():
        together.setdefault(tuple(said), []).append(f"  {case}")
    for lines, cases in together.items():
        yield from cases
        yield from lines


def as_markdown(comparison: Comparison) -> str:
    """For a pull request."""
    verdict = "something got worse" if comparison.worse else "nothing got worse"
    lines = [f"## exportcheck compare: {verdict}", ""]
    lines += [f"- {markdown_cell(package)}" for package in comparison.packages] or ["- the same packages"]
    for effect, heading in _HEADINGS.items():
        changes = comparison.of(effect)
        if changes:
            lines += ["", f"### {heading}", "", "| case | what | change |", "|---|---|---|"]
            lines += [
                f"| {markdown_cell(change.case)} | {change.kind} | {markdown_cell(change.text)} |"
                for change in changes
            ]
    for what, names in _missing(comparison):
        lines += ["", f"### {what}", "", *(f"- {markdown_cell(name)}" for name in names)]
    lines += ["", markdown_cell(_summary(comparison))]
    return "\n".join(lines) + "\n"


def _missing(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    by_reason: dict[str, list[str]] = {}
    for name, why in comparison.not_run.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"Not run in {comparison.after}, neither better nor worse: {why}", names
    gone = [name for name in comparison.only_before if name not in comparison.not_run]
    if gone:
        yield f"Only in {comparison.before}", gone
    if comparison.only_after:
        yield f"Only in {comparison.after}", list(comparison.only_after)


def _summary(comparison: Comparison) -> str:
    counts = ", ".join(f"{len(comparison.of(effect))} {effect}" for effect in _HEADINGS)
    bands = ", ".join(f"{name} {band:g}x" for name, band in comparison.bands.items())
    filtered = len(comparison.not_run)
    lost = len(comparison.only_before) - filtered
    gone = "".join(f", {count} {what}" for count, what in ((lost, "gone"), (filtered, "not run")) if count)
    same = f"{counted(comparison.unchanged, 'case')} unchanged"
    return f"changes: {counts}, {same}{gone} (noise bands: {bands})"
