"""The matrix in the terminal: columns wrapped into blocks where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..plurals import counted
from .matrix import Group, Matrix

__all__ = ["Piece", "matrix_lines"]

_GAP = "  "

#: With more rows than this, those in which everything passes are only counted.
MANY_ROWS = 40


@dataclass(frozen=True)
class Piece:
    """A piece of a line and its colour (`None`: plain)."""

    text: str
    colour: str | None = None


def matrix_lines(matrix: Matrix, width: int, every_row: bool) -> Iterator[list[Piece]]:
    """The lines of the matrix, each at most `width` wide where a single column fits."""
    rows = matrix.rows
    hidden = 0
    if not every_row and len(rows) > MANY_ROWS:
        rows = [row for row in rows if not matrix.all_pass(row)]
        hidden = len(matrix.rows) - len(rows)
    label_width = max([len("spec"), *map(len, rows)])
    columns = [(group, column) for group in matrix.groups for column in group.columns]
    widths = [
        max(
            len(column),
            len(group.label) if column == group.columns[0] else 0,
            *(len(matrix.cell(group, row, column)) for row in rows),
            1,
        )
        for group, column in columns
    ]
    if rows:
        for number, block in enumerate(_blocks(widths, width - label_width)):
            if number:
                yield []
            yield from _block(matrix, rows, label_width, [(*columns[at], widths[at]) for at in block])
    if hidden:
        yield [Piece(f"{counted(hidden, 'more row')}: everything passes (-v shows them)")]


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Column indices, cut into blocks that fit into `room`; a column that is too wide stands alone."""
    block: list[int] = []
    used = 0
    for at, width in enumerate(widths):
        needed = len(_GAP) + width
        if block and used + needed > room:
            yield block
            block, used = [], 0
        block.append(at)
        used += needed
    if block:
        yield block


def _block(
    matrix: Matrix, rows: Sequence[str], label_width: int, columns: Sequence[tuple[Group, str, int]]
) -> Iterator[list[Piece]]:
    above, before = " " * label_width, None
    for group, _, width in columns:
        above += _GAP + (group.label if group is not before else "").ljust(width)
        before = group
    yield [Piece(above.rstrip())]
    header = "spec".ljust(label_width) + "".join(_GAP + column.ljust(width) for _, column, width in columns)
    yield [Piece(header.rstrip())]
    for row in rows:
        # A spec that has none of these columns (no float16, no cuda) would be a line of dots.
        if not any((row, column) in group.cells for group, column, _ in columns):
            continue
        line = [Piece(row.ljust(label_width))]
        for group, column, width in columns:
            text = matrix.cell(group, row, column)
            last = column is columns[-1][1] and group is columns[-1][0]
            line += [Piece(_GAP), Piece(text if last else text.ljust(width), _colour(text))]
        yield line


def _colour(text: str) -> str | None:
    if text == "pass":
        return "green"
    kind = text.split()[0]
    if kind.isupper():
        return "red"
    return "yellow" if kind in ("xfail", "skip") else None
