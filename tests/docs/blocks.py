"""The fenced blocks of the documentation, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>\S*)")
_FILE = re.compile(r"^# (?P<path>[\w./-]+\.\w+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its fence, the language after the fence, its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is the content of, if its first line is a comment with a path."""
        match = _FILE.match(self.text.split("\n", 1)[0])
        return match["path"] if match else None


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Every fenced block of a page; ValueError for a fence without an end or without a language."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        match = _FENCE.match(line)
        if match is None:
            continue
        inside = []
        for _, each in lines:
            if each.strip() == match["fence"]:
                break
            inside.append(each.removeprefix(match["indent"]))
        else:
            raise ValueError(f"{page}:{number}: the block has no end")
        if not match["language"]:
            raise ValueError(f"{page}:{number}: the block names no language")
        yield Block(page, number, match["language"], "\n".join(inside) + "\n")


def all_blocks() -> list[Block]:
    """The blocks of the README and of all pages."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    ]


def commands(text: str) -> list[str]:
    """The commands of a shell block: one a line, comments and blank lines left out."""
    found = (re.sub(r"\s+# .*$", "", line).strip() for line in text.splitlines())
    return [line for line in found if line and not line.startswith("#")]


def workflow_commands(workflow: dict[str, Any]) -> list[str]:
    """The `run:` steps of a GitHub workflow, with each entry of the job's matrix put in."""
    found = []
    for job in workflow["jobs"].values():
        matrix = dict(job.get("strategy", {}).get("matrix", {}))
        entries = matrix.pop("include", [{}])
        for name, values in matrix.items():
            entries = [{**entry, name: value} for entry in entries for value in values]
        for step in job["steps"]:
            if "run" in step:
                found += [_fill(step["run"], entry) for entry in entries]
    return list(dict.fromkeys(found))


def _fill(command: str, values: dict[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        return str(values[match[1]])

    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", value, command)


def words(text: str) -> list[str]:
    """The inline code of a page: what is between single backticks outside of fenced blocks."""
    kept, fence = [], None
    for line in text.splitlines():
        match = _FENCE.match(line)
        if fence is not None:
            fence = None if line.strip() == fence else fence
        elif match is not None:
            fence = match["fence"]
        else:
            kept.append(line)
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(kept))
