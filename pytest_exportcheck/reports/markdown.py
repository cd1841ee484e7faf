"""The matrix and the failures as Markdown, for GitHub's job summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .matrix import Matrix, cell_text, counts, is_case

__all__ = ["markdown", "markdown_cell"]

_FAILED = ("fail", "crash", "timeout", "xpass")


def markdown(records: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """One section; `records` are sorted."""
    cases = [record for record in records if is_case(record)]
    lines = ["## exportcheck", "", f"{len(cases)} cases: {counts(cases)}", ""]
    matrix = Matrix.of(records)
    for group in matrix.groups:
        lines += [f"### {markdown_cell(group.label)}", ""]
        lines.append("| spec | " + " | ".join(map(markdown_cell, group.columns)) + " |")
        lines.append("|---" * (len(group.columns) + 1) + "|")
        for row in matrix.rows:
            cells = [matrix.cell(group, row, column) for column in group.columns]
            shown = [_verdict_cell(text) for text in cells]
            lines.append(f"| {markdown_cell(row)} | " + " | ".join(shown) + " |")
        lines.append("")
    lines += _failures(records)
    lines += [f"{markdown_cell(note)}  " for note in notes]
    return "\n".join(lines) + "\n"


def _failures(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    failed = [record for record in records if record["verdict"].split()[0] in _FAILED]
    if failed:
        yield "### Failures"
        yield ""
    for record in failed:
        yield f"- {_code(record['nodeid'])} **{markdown_cell(cell_text(record['verdict']))}**"
        message = record.get("message")
        if message:
            yield ""
            yield from (f"      {line}" for line in str(message).splitlines())
            yield ""


def _verdict_cell(text: str) -> str:
    """What a person must look at is bold."""
    return f"**{markdown_cell(text)}**" if text.split()[0].isupper() else markdown_cell(text)


def markdown_cell(text: str) -> str:
    """Text that Markdown shows as it is, also inside a table."""
    for char in "\\`*_|<>[]":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())


def _code(text: str) -> str:
    """An inline code span; its fence is longer than any run of backticks inside."""
    fence = "`"
    while fence in text:
        fence += "`"
    padding = " " if "`" in text else ""
    return f"{fence}{padding}{text}{padding}{fence}"
