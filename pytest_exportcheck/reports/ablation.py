"""What an ablation says of each patch, over the cases of a run: whom it helps, whom it harms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plurals import counted

__all__ = ["KINDS", "PatchWorth", "ablation_lines", "as_markdown", "worth_of"]

Record = Mapping[str, Any]

#: Kinds of worth in the order in which they are shown, with the heading of their column.
KINDS = {
    "needed": "needed for",
    "alternative": "needed unless another stays",
    "harmful": "harms",
    "changing": "changes the result of",
    "neutral": "neutral for",
    "failing": "fails with and without it",
}


@dataclass
class PatchWorth:
    """One patch of a mode, over all cases that called it.

    Attributes
    ----------
    cases:
        Kind -> spec -> exporters (with the graph), in order.
    """

    mode: str
    name: str
    cases: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def of(self, kind: str) -> list[str]:
        """The specs of a kind; with the exporters where those of the spec are of several kinds."""
        shown = []
        for spec, exporters in self.cases.get(kind, {}).items():
            several = sum(spec in specs for specs in self.cases.values()) > 1
            shown.append(f"{spec} ({', '.join(exporters)})" if several else spec)
        return shown

    @property
    def unneeded(self) -> bool:
        """Whether no case would miss it."""
        return not self.cases.keys() & {"needed", "alternative"}


def worth_of(records: Sequence[Record]) -> list[PatchWorth]:
    """Every patch that some case called, by mode and name; those that no case needs last."""
    found: dict[tuple[str, str], PatchWorth] = {}
    for record in records:
        for name, one in (record.get("ablation") or {}).get("patches", {}).items():
            mode = str(record["patch_mode"])
            worth = found.setdefault((mode, name), PatchWorth(mode, name))
            spec = str(record["spec"]).rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
            cell = "-".join(str(record[key]) for key in ("exporter", "graph") if record.get(key))
            worth.cases.setdefault(str(one["kind"]), {}).setdefault(spec, []).append(cell)
    return sorted(found.values(), key=lambda worth: (worth.mode, worth.unneeded, worth.name))


def _rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) with the columns that say something."""
    worths = worth_of(records)
    kinds = [
        kind for kind in KINDS if kind in ("needed", "harmful", "neutral") or any(w.of(kind) for w in worths)
    ]
    headings = ["mode", "patch", *(KINDS[kind] for kind in kinds)]
    return headings, [
        [worth.mode, worth.name, *(", ".join(worth.of(kind)) or "-" for kind in kinds)] for worth in worths
    ]


def as_markdown(records: Sequence[Record]) -> str:
    """The table and the notes below it."""
    headings, rows = _rows(records)
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([*lines, "", *_notes(records)]) + "\n"


def ablation_lines(records: Sequence[Record]) -> Iterator[str]:
    """For the terminal, one block per patch: a row of a table would be wider than any terminal."""
    ablated = [record for record in records if record.get("ablation")]
    if not ablated:
        return
    for worth in worth_of(ablated):
        yield f"{worth.mode}  {worth.name}"
        for kind, heading in KINDS.items():
            if worth.of(kind):
                yield f"    {heading}: {', '.join(worth.of(kind))}"
    yield from _notes(ablated)


def _notes(records: Sequence[Record]) -> Iterator[str]:
    worths = worth_of(records)
    for mode in sorted({str(record["patch_mode"]) for record in records if record.get("ablation")}):
        mine = [
            record["ablation"]
            for record in records
            if record["patch_mode"] == mode and record.get("ablation")
        ]
        done = [one for one in mine if "not_done" not in one]
        called = {worth.name for worth in worths if worth.mode == mode}
        never = {name for one in done for name in one["never_called"]} - called
        unneeded = [worth.name for worth in worths if worth.mode == mode and worth.unneeded]
        needs = f"no case needs {', '.join(unneeded)}" if unneeded else "each of these is needed by a case"
        yield (
            f"patch mode {mode}: {counted(len(done), 'case')}, {len(called)} of "
            f"{counted(len(called | never), 'patch', 'patches')} called" + (f"; {needs}" if called else "")
        )
    for record in records:
        why = (record.get("ablation") or {}).get("not_done")
        if why:
            cell = "-".join(
                str(record[key]) for key in ("exporter", "patch_mode", "graph") if record.get(key)
            )
            yield f"not ablated: {record['spec']}[{cell}]: {why}"
