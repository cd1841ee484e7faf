"""A comparison of two runs as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Sequence

from ..plurals import counted
from .compare import Change, Comparison
from .markdown import markdown_cell
from .record import json_ready

__all__ = ["as_json", "as_markdown", "as_text"]

#: Order and headings of the effects.
_HEADINGS = {"worse": "Got worse", "better": "Got better", "other": "Changed otherwise"}

#: A longer text is cut where nothing is to be done about it: a change for the better, or for neither.
_LONGEST_TEXT = 160

#: Nor are more lines of cases shown there; Markdown and JSON have all of them.
_MOST_LINES = 3

#: Longer lists of cases that only one run has are cut.
_MOST_NAMES = 10


def as_json(comparison: Comparison) -> str:
    """Everything, for machines."""
    data = {"worse": comparison.worse, **dataclasses.asdict(comparison)}
    return json.dumps(json_ready(data), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_text(comparison: Comparison) -> str:
    """For a terminal: whether anything got worse, then what and why."""
    lines = [f"exportcheck compare: {comparison.before} -> {comparison.after}"]
    lines += [f"  {package}" for package in comparison.packages] or ["  the same packages"]
    lines += ["", _headline(comparison)]
    for effect, heading in _HEADINGS.items():
        entries = _entries(comparison, effect)
        if entries:
            lines += ["", f"{_heading(heading, entries)}:"]
            lines += [line for entry in entries for line in _group(entry)]
    for what, names in _missing(comparison):
        lines += ["", f"{what} ({len(names)}):", *(f"  {name}" for name in names[:_MOST_NAMES])]
        if len(names) > _MOST_NAMES:
            lines.append(f"  and {len(names) - _MOST_NAMES} more")
    lines += ["", _summary(comparison)]
    return "\n".join(lines) + "\n"


def _headline(comparison: Comparison) -> str:
    """The answer to what an upgrade broke."""
    count = {effect: len(_cases_of(comparison, effect)) for effect in _HEADINGS}
    if comparison.worse:
        reasons = len(_entries(comparison, "worse"))
        first = f"{counted(count['worse'], 'case')} got worse, for {counted(reasons, 'reason')}"
    elif comparison.compared:
        first = "Nothing got worse"
    else:
        return "No case in common: nothing was compared"
    more = [f"{count['better']} got better"] if count["better"] else []
    return ", ".join([first, *more, f"{comparison.unchanged} unchanged"])


def _heading(heading: str, entries: Sequence[_Entry]) -> str:
    cases = sum(len(entry.cases) for entry in entries)
    several = f", {counted(len(entries), 'kind')}" if 1 < len(entries) < cases else ""
    return f"{heading} ({cases}{several})"


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Cases that are told together, each of them once.

    Attributes
    ----------
    text:
        What is said of all of them first.
    more:
        What else changed -> (the cases of which that is so, its effect).
    """

    text: str
    effect: str
    cases: list[str]
    more: dict[str, tuple[list[str], str]] = dataclasses.field(default_factory=dict)


def _cases_of(comparison: Comparison, effect: str) -> dict[str, list[Change]]:
    """The cases whose worst change has `effect` -> all their changes, those of the worst effect first."""
    found: dict[str, list[Change]] = {}
    for change in comparison.changes:
        found.setdefault(change.case, []).append(change)
    order = list(_HEADINGS)
    changed = {case: sorted(all_, key=lambda each: order.index(each.effect)) for case, all_ in found.items()}
    return {case: changes for case, changes in changed.items() if changes[0].effect == effect}


def _entries(comparison: Comparison, effect: str) -> list[_Entry]:
    """What is said of the cases of `effect`, that of the most cases first.

    Told together is what differs in nothing but the name of the spec, which then reads ``NAME``.
    """
    cases = _cases_of(comparison, effect)
    entries = []
    for text, same in _told_together([changes[0] for changes in cases.values()]).items():
        names = [change.case for change in same]
        rest = _told_together([change for name in names for change in cases[name][1:]])
        more = {text: ([each.case for each in others], others[0].effect) for text, others in rest.items()}
        entries.append(_Entry(text, effect, names, more))
    return entries


def _told_together(changes: Sequence[Change]) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(_without_name(change), []).append(change)
    groups = {
        # With its own name, where there is one only.
        (text if len({change.text for change in same}) > 1 else same[0].text): same
        for text, same in found.items()
    }
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _without_name(change: Change) -> str:
    """The text of a change, without the name of the spec and the line in it."""
    spec = change.case.partition(" [")[0]
    name = spec.rpartition("/")[2]
    text = re.sub(rf"{re.escape(spec)}(?::\d+)*", spec.removesuffix(name) + "NAME.yaml", change.text)
    return text.replace(f"__shapes__/{name}", "__shapes__/NAME.yaml")


def _group(entry: _Entry) -> list[str]:
    shown = _shown(entry.text, entry.effect)
    if len(entry.cases) == 1:
        return [f"  {entry.cases[0]}", f"    {shown}", *(f"    {text}" for text in _also(entry))]
    lines = _folded(entry.cases)
    if entry.effect != "worse" and len(lines) > _MOST_LINES + 1:
        lines[_MOST_LINES:] = ["..."]
    count = counted(len(entry.cases), "case")
    return [f"  {count}: {shown}", *(f"    {line}" for line in [*lines, *_also(entry)])]


def _also(entry: _Entry) -> list[str]:
    """What else changed in the cases of an entry: of which of them, where it is not so of all."""
    found = []
    for text, (cases, effect) in entry.more.items():
        shown = _shown(text, effect)
        if len(entry.cases) == 1:
            found.append(shown)
        elif len(cases) == len(entry.cases):
            found.append(f"also: {shown}")
        else:
            which = cases[0] if len(cases) == 1 else counted(len(cases), "of them", "of them")
            found.append(f"also, {which}: {shown}")
    return found


def _shown(text: str, effect: str) -> str:
    return text if effect == "worse" else _cut(text)


def _cut(text: str) -> str:
    """What needs no work is told in one line."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 4].rstrip()} ..."


def _folded(cases: Sequence[str]) -> list[str]:
    """Names of cases: specs of which the same cases are meant in one line."""
    by_spec: dict[str, list[str]] = {}
    for case in cases:
        spec, _, rest = case.partition(" ")
        by_spec.setdefault(spec, []).append(rest)
    by_rest: dict[tuple[str, ...], list[str]] = {}
    for spec, rests in by_spec.items():
        by_rest.setdefault(tuple(rests), []).append(spec)
    lines = []
    for which, specs in by_rest.items():
        if len(specs) == 1 and len(which) <= 2:
            lines += [f"{specs[0]} {rest}" for rest in which]
            continue
        text = f"{', '.join(specs)} {' '.join(which)}"
        lines += textwrap.wrap(
            text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return lines


def as_markdown(comparison: Comparison) -> str:
    """For a pull request."""
    verdict = "nothing got worse" if comparison.compared else "no case in common"
    if comparison.worse:
        verdict = "something got worse"
    lines = [f"## exportcheck compare: {verdict}", ""]
    lines += [f"- {markdown_cell(package)}" for package in comparison.packages] or ["- the same packages"]
    lines += ["", f"{markdown_cell(_headline(comparison))}."]
    for effect, heading in _HEADINGS.items():
        entries = _entries(comparison, effect)
        if entries:
            lines += ["", f"### {_heading(heading, entries)}", ""]
            lines += [line for entry in entries for line in _item(entry)]
    for what, names in _missing(comparison):
        lines += ["", f"### {what}", "", *(f"- {markdown_cell(name)}" for name in names[:_MOST_NAMES])]
        if len(names) > _MOST_NAMES:
            lines.append(f"- and {len(names) - _MOST_NAMES} more")
    lines += ["", markdown_cell(_summary(comparison))]
    return "\n".join(lines) + "\n"


def _item(entry: _Entry) -> list[str]:
    """One thing that is said, and behind a click the cases, if there are many."""
    cases, shown = entry.cases, markdown_cell(_shown(entry.text, entry.effect))
    also = [f"  - {markdown_cell(text)}" for text in _also(entry)]
    if len(cases) == 1:
        return [f"- {markdown_cell(cases[0])}: {shown}", *also]
    names = [f"  {markdown_cell(line)}  " for line in _folded(cases)]
    if entry.effect == "worse" or len(cases) <= 3:
        return [f"- **{counted(len(cases), 'case')}**: {shown}  ", *names, *also]
    summary = f"  <details><summary>{counted(len(cases), 'case')}</summary>"
    return [f"- {shown}", *also, "", summary, "", *names, "", "  </details>", ""]


def _missing(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    by_reason: dict[str, list[str]] = {}
    for name, why in comparison.not_run.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"Not run in {comparison.after}, neither better nor worse: {why}", names
    # The others that are gone got worse, and stand there.
    told = {*comparison.not_run, *(change.case for change in comparison.changes)}
    gone = [name for name in comparison.only_before if name not in told]
    if gone:
        yield f"Only in {comparison.before}", gone
    if comparison.only_after:
        yield f"Only in {comparison.after}", list(comparison.only_after)


def _summary(comparison: Comparison) -> str:
    words = {"worse": "worse", "better": "better", "other": "neither"}
    counts = ", ".join(f"{len(comparison.of(effect))} {word}" for effect, word in words.items())
    bands = ", ".join(f"{name} {band:g}x" for name, band in comparison.bands.items())
    filtered = len(comparison.not_run)
    lost = len(comparison.only_before) - filtered
    gone = "".join(f", {count} {what}" for count, what in ((lost, "gone"), (filtered, "not run")) if count)
    same = f"{counted(comparison.unchanged, 'case')} unchanged"
    return f"changes: {counts}, {same}{gone} (noise bands: {bands})"
