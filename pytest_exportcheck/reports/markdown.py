"""The matrix and the failures as Markdown, for pull requests and the job summary of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..plurals import counted
from .diagnosis import causes, guilty_line
from .matrix import Matrix, cell_text, counts, is_case
from .read import case_key, case_name
from .refusals import memory_lines
from .reuse import reuse_lines
from .torch_advice import without_advice
from .totals import shapes_text

__all__ = ["markdown", "markdown_cell"]

_FAILED = ("fail", "crash", "timeout", "xpass")

#: Lines of a failure's details that are shown.
_MOST_DETAILS = 20


def markdown(
    records: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
    limit: int | None = None,
    left_out: str | None = None,
) -> str:
    """One section; `records` are sorted.

    Parameters
    ----------
    limit:
        Bytes at most: failures at the end, then rows in which everything passes, then the matrix are left
        out, and it says so.
    left_out:
        Why cases may be missing.
    """
    cases = [record for record in records if is_case(record)]
    reuse = reuse_lines(cases, every_case=False)
    ending = [f"{markdown_cell(note)}  " for note in (*notes, *memory_lines(cases), *reuse)]
    totals = [f"{counted(len(cases), 'case')}: {counts(cases)}", shapes_text(records)]
    head = ["## exportcheck", "", ", ".join(filter(None, totals)), ""]
    if left_out:
        head += [f"Not a full run: {markdown_cell(left_out)}. Cases may be missing.", ""]
    matrix = Matrix.of(records)
    tables: list[str] = []
    for every_row in (True, False):
        tables = list(_tables(matrix, every_row))
        if limit is None or _size([*head, *tables, *ending]) <= limit:
            break
    else:
        tables = ["The matrix is too large for this page.", ""]
    room = None if limit is None else limit - _size([*head, *tables, *ending])
    return "\n".join([*head, *tables, *_failures(records, room), *ending]) + "\n"


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _tables(matrix: Matrix, every_row: bool) -> Iterator[str]:
    rows = [row for row in matrix.rows if every_row or not matrix.all_pass(row)]
    for group in matrix.groups:
        yield f"### {markdown_cell(group.label)}"
        yield ""
        yield "| spec | " + " | ".join(map(markdown_cell, group.columns)) + " |"
        yield "|---" * (len(group.columns) + 1) + "|"
        for row in rows:
            cells = [matrix.cell(group, row, column) for column in group.columns]
            yield f"| {markdown_cell(row)} | " + " | ".join(map(_verdict_cell, cells)) + " |"
        yield ""
    if len(rows) < len(matrix.rows):
        yield f"{counted(len(matrix.rows) - len(rows), 'more row')}: everything passes"
        yield ""


def _failures(records: Sequence[Mapping[str, Any]], room: int | None) -> list[str]:
    failed = [record for record in records if record["verdict"].split()[0] in _FAILED]
    lines = ["### Failures", ""] if failed else []
    for number, record in enumerate(failed):
        block = list(_failure(record))
        rest = f"and {len(failed) - number} more, too many for this page: the JSON report has them"
        if room is not None and _size([*lines, *block, rest]) > room:
            return [*lines, rest]
        lines += block
    return lines


def _failure(record: Mapping[str, Any]) -> Iterator[str]:
    name = record.get("nodeid") or case_name(case_key(record))
    yield f"- {_code(name)} **{markdown_cell(cell_text(record['verdict']))}**"
    whole = [str(line) for line in record.get("details") or ()]
    details = without_advice(whole)
    said = str(record.get("message") or "").splitlines()
    said += [f"  {line}" for line in details[:_MOST_DETAILS]]
    if len(details) > _MOST_DETAILS:
        said.append(f"  ... {counted(len(details) - _MOST_DETAILS, 'more line')}")
    if len(details) < len(whole):
        left = counted(len(whole) - len(details), "line")
        said.append(f"  ({left} of torch's own advice left out: the JSON report has them)")
    guilty = guilty_line(record)
    said += [f"diagnosis: {guilty}"] if guilty else []
    said += _known(record)
    said += [f"accept: {record['accept']}"] if said and record.get("accept") else []
    said += [f"reproduce: {record['reproduce']}"] if said and record.get("reproduce") else []
    if said:
        yield ""
        yield from (f"      {line}" for line in said)
        yield ""


def _known(record: Mapping[str, Any]) -> Iterator[str]:
    """As below a failure in the terminal; each text is one line, whatever another tool wrote into it."""
    for cause in causes(record):
        yield " ".join(f"known cause ({cause.get('name')}): {cause.get('sentence')}".split())
        if cause.get("remedy"):
            yield "  " + " ".join(f"remedy: {cause['remedy']}".split())


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
