"""Cases with outputs outside the tolerance that agree all the same: eager itself moves as far by rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..plurals import counted
from .read import case_key, case_name

__all__ = ["rounding_lines"]

#: Cases that are named; the report has all.
_SHOWN = 3


def rounding_lines(records: Sequence[Mapping[str, Any]], every_case: bool = False) -> Iterator[str]:
    """One line per case, with the first output that rounding explains."""
    found = [record for record in records if record.get("rounding")]
    shown = found if every_case else found[:_SHOWN]
    for record in shown:
        first, *more = map(str, record["rounding"])
        rest = f" (and {len(more)} more)" if more else ""
        yield f"rounding: {case_name(case_key(record))}: {first}{rest}"
    if len(shown) < len(found):
        yield f"rounding: and {counted(len(found) - len(shown), 'more case')} (-v names them)"
