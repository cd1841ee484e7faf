"""A YAML file as plain Python data, plus where each piece of it stands.

Nothing here knows what a spec is. Only `yaml.compose`-like node building is used, never a YAML
constructor: no tag can run code. Scalars follow YAML 1.2 (``1e-4`` is a number, ``off`` is text).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import yaml

from ..errors import Problem, SpecError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Document", "NodePath", "Position", "Report", "parse_document"]

#: A spec is written by hand; anything larger is a mistake (a dataset, a lock file) and slow to parse.
MAX_BYTES = 1024 * 1024

#: Deeper nesting is refused while parsing, before it can exhaust the C stack.
MAX_DEPTH = 40

#: Keys and indices that lead from the top of the file to a node: ``("expect", 0, "when")``.
NodePath = tuple[Any, ...]

_INT = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}

#: Same set as YAML's c-printable. libyaml reports the rest without a line number.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: What ends a line of YAML.
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


class Position(NamedTuple):
    """Where a node stands; lines and columns count from 1.

    `key_line`, `key_column` are those of the mapping key in front of the node, or of the node itself if
    it has none. `text_column` is the column of the first character of a scalar's text (behind its
    opening quote), or 0 if its characters do not map one to one onto columns.
    """

    line: int
    column: int
    key_line: int
    key_column: int
    text_column: int


@dataclass(frozen=True)
class Document:
    """The content of one YAML file.

    Positions are worked out when first asked for, by parsing `text` again: most specs of a large tree are
    never asked, and a hundred small objects for each of a thousand specs double the time of loading them.

    Attributes
    ----------
    data:
        Plain builtins: dict, list, str, int, float, bool, None.
    text:
        The file.
    """

    data: Any = None
    text: str = ""

    @cached_property
    def positions(self) -> dict[NodePath, Position]:
        """The position of every node, by its path from the top."""
        found: dict[NodePath, Position] = {}
        if self.text:
            _locate(_compose(self.text), (), None, found)
        return found

    def position(self, where: NodePath) -> Position:
        """The position of the node at `where`, or of its nearest ancestor that is in the file."""
        for length in range(len(where), -1, -1):
            found = self.positions.get(where[:length])
            if found is not None:
                return found
        return Position(1, 1, 1, 1, 0)

    def line(self, key: str) -> int:
        """Where `key` of the top mapping stands; without parsing, if one line only can be it."""
        lines = [n for n, text in enumerate(_BREAK.split(self.text), 1) if text.startswith(f"{key}:")]
        return lines[0] if len(lines) == 1 else self.position((key,)).key_line


@dataclass
class Report:
    """Collects the problems of one file, so that all of them are told at once."""

    shown: str
    document: Document = Document()
    problems: list[Problem] = field(default_factory=list)
    #: Values with a problem, so that nobody reports a consequence of it.
    reported: set[NodePath] = field(default_factory=set)

    def at(self, line: int, column: int, message: str) -> None:
        """Add a problem at a 1-based position."""
        self.problems.append(Problem(self.shown, line, column, message))

    def value(self, where: NodePath, message: str, offset: int | None = None) -> None:
        """Add a problem about the value at `where`; `offset` counts characters into a scalar's text."""
        self.reported.add(where)
        position = self.document.position(where)
        column = position.column
        if offset is not None and position.text_column and where in self.document.positions:
            column = position.text_column + offset
        self.at(position.line, column, message)

    def key(self, where: NodePath, message: str) -> None:
        """Add a problem about the key that leads to `where`."""
        position = self.document.position(where)
        self.at(position.key_line, position.key_column, message)

    def sorted(self) -> list[Problem]:
        """The problems in file order, each once."""
        return sorted(dict.fromkeys(self.problems), key=lambda p: (p.line, p.column))

    def error(self) -> SpecError:
        """The exception that tells all of them."""
        return SpecError(self.sorted(), self.document)


class _Stop(Exception):
    """Parsing cannot go on; the problem has been reported."""


def _mark(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


class _Hooks:
    """What our loaders do at each node: count the depth and tell plain scalars from quoted ones.

    The node's tag is used as that marker: ``p`` plain scalar, ``q`` anything else without a tag.
    """

    _depth = 0

    def descend_resolver(self, parent: Any, index: Any) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise _TooDeep(*_mark(parent.start_mark))

    def ascend_resolver(self) -> None:
        self._depth -= 1

    def resolve(self, kind: type, value: Any, implicit: Any) -> str:
        return "p" if kind is yaml.ScalarNode and implicit[0] else "q"


class _TooDeep(Exception):
    def __init__(self, line: int, column: int) -> None:
        super().__init__(line, column)
        self.line, self.column = line, column


def _make_loader() -> Callable[[str], Any]:
    """The loader class: libyaml's if PyYAML was built with it (ten times faster), else the Python one."""
    if getattr(yaml, "__with_libyaml__", False):
        from yaml._yaml import CParser

        class CLoader(_Hooks, CParser):
            def __init__(self, text: str) -> None:
                CParser.__init__(self, text)

        return CLoader
    return _make_python_loader()


def _make_python_loader() -> Callable[[str], Any]:
    from yaml.composer import Composer
    from yaml.parser import Parser
    from yaml.reader import Reader
    from yaml.scanner import Scanner

    class PythonLoader(_Hooks, Reader, Scanner, Parser, Composer):
        def __init__(self, text: str) -> None:
            Reader.__init__(self, text)
            Scanner.__init__(self)
            Parser.__init__(self)
            Composer.__init__(self)

        def dispose(self) -> None:
            pass

    return PythonLoader


_Loader = _make_loader()


def parse_document(text: str, report: Report) -> bool:
    """Parse `text` into ``report.document``; False if it cannot be read as YAML at all.

    Duplicate keys, tags and the like are reported, and parsing goes on so that later problems are
    found as well.
    """
    try:
        bad = _UNPRINTABLE.search(text)
        if bad is not None:
            line = text.count("\n", 0, bad.start()) + 1
            column = bad.start() - text.rfind("\n", 0, bad.start())
            report.at(line, column, f"character {bad.group()!a} is not allowed in YAML")
            return False
        if "&" in text or "*" in text:
            _refuse_aliases(text, report)
        root = _compose(text)
        if root is None:
            report.at(1, 1, "the file is empty: a spec starts with 'exportcheck: 1'")
            return False
        report.document = Document(_build(root, report), text)
        return True
    except _Stop:
        return False
    except _TooDeep as error:
        report.at(error.line, error.column, f"nested deeper than {MAX_DEPTH} levels")
    except yaml.composer.ComposerError as error:
        line, column = _mark(error.problem_mark)
        if error.problem == "but found another document":
            report.at(line, column, "several YAML documents in one file: a spec is one document")
        else:
            report.at(line, column, f"YAML: {error.problem}")
    except yaml.MarkedYAMLError as error:
        line, column = _mark(error.problem_mark or error.context_mark)
        if error.problem == "exceeded maximum nesting depth":  # libyaml reads ahead of our own count
            report.at(line, column, f"nested deeper than {MAX_DEPTH} levels")
        else:
            context = f" ({error.context})" if error.context else ""
            report.at(line, column, f"YAML syntax: {error.problem}{context}")
    except yaml.YAMLError as error:
        report.at(1, 1, f"YAML syntax: {error}")
    return False


def _refuse_aliases(text: str, report: Report) -> None:
    """Aliases are refused before any is expanded: a few lines of them can stand for gigabytes."""
    found = False
    loader = _Loader(text)
    try:
        while loader.check_event():
            event = loader.get_event()
            if getattr(event, "anchor", None):
                name = ("*" if isinstance(event, yaml.AliasEvent) else "&") + event.anchor
                report.at(*_mark(event.start_mark), f"anchors and aliases are not supported ({name})")
                found = True
    finally:
        loader.dispose()
    if found:
        raise _Stop


def _compose(text: str) -> Any:
    """The root node of the one document in `text`, None if there is none."""
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _build(node: Any, report: Report) -> Any:
    """Turn one node into plain data; recursion is bounded by `MAX_DEPTH`."""
    tag = node.tag
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, report)
    if tag != "q":
        _refuse_tag(node, report)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, report) for item in node.value]
    data: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            report.at(*_mark(key_node.start_mark), "a key must be plain text, not a list or a mapping")
        elif key_node.tag == "p" and key_node.value == "<<":
            report.at(*_mark(key_node.start_mark), "merge keys ('<<') are not supported")
        else:
            key = _scalar(key_node, report)
            # 1, 1.0 and true are one dict key in Python, whatever YAML says.
            if key in data:
                _refuse_duplicate(node, key_node, key, report)
            else:
                data[key] = _build(value_node, report)
    return data


def _refuse_duplicate(node: Any, key_node: Any, key: object, report: Report) -> None:
    silent = Report(report.shown)
    for other, _ in node.value:
        if isinstance(other, yaml.ScalarNode) and _scalar(other, silent) == key:
            line = other.start_mark.line + 1
            report.at(*_mark(key_node.start_mark), f"duplicate key {key_node.value!r}, first on line {line}")
            return


def _locate(node: Any, where: NodePath, key: Any, found: dict[NodePath, Position]) -> None:
    """Note where `node` and what is below it stand; `key` is the mark of the key in front of it."""
    line, column = _mark(node.start_mark)
    text_column = 0
    if isinstance(node, yaml.ScalarNode):
        quote = 1 if node.style in ("'", '"') else 0
        width = node.end_mark.column - node.start_mark.column
        exact = node.end_mark.line == node.start_mark.line and width == len(node.value) + 2 * quote
        text_column = column + quote if exact and node.style not in ("|", ">") else 0
    found[where] = Position(line, column, *(_mark(key) if key is not None else (line, column)), text_column)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _locate(item, (*where, index), None, found)
    elif isinstance(node, yaml.MappingNode):
        silent = Report("")
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                below = (*where, _scalar(key_node, silent))
                if below not in found:  # the first of duplicates is the one in the data
                    _locate(value_node, below, key_node.start_mark, found)


def _scalar(node: Any, report: Report) -> Any:
    """A scalar by the YAML 1.2 core schema."""
    text = node.value
    if node.tag != "p":
        if node.tag not in ("q", "tag:yaml.org,2002:str"):
            _refuse_tag(node, report)
        return text
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in "0123456789+-.":
        if _INT.match(text):
            if len(text) > 100:
                report.at(*_mark(node.start_mark), f"integer of {len(text)} digits")
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.match(text):
            return float(text)
    return text


def _refuse_tag(node: Any, report: Report) -> None:
    shown = node.tag.replace("tag:yaml.org,2002:", "!!")
    report.at(*_mark(node.start_mark), f"YAML tags are not supported ({shown})")
