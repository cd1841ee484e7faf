"""Whether the files, modules and names that a spec refers to are there; read, never imported or run.

What cannot be known without running code (``from x import *``, ``__getattr__``, modules that only pytest's
configuration puts on the path) is no problem.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import Problem
from .names import choices
from .nodes import Document, NodePath, Report
from .tensors import By, FromFile, TensorSyntaxError, looks_like_tensor, parse_tensor
from .values import REF

__all__ = ["missing_reference", "reference_problems"]


def reference_problems(document: Document, folder: Path, shown: str) -> list[Problem]:
    """What a spec refers to and is not there, each at its place in the file.

    Parameters
    ----------
    document:
        What the file says; it need not be a valid spec.
    folder, shown:
        Of the file, and how messages name it.
    """
    report = Report(shown, document)
    data = _mapping(document.data)
    for where, ref in _references(data):
        problem = missing_reference(ref, folder)
        if problem is not None:
            report.value(where, problem)
    for where, file in _data_files(data):
        if not (folder / file).exists():
            report.value(where, f"there is no {file} next to the spec{_near(folder / file)}")
    return report.sorted()


def _references(data: Mapping[str, Any]) -> Iterator[tuple[NodePath, str]]:
    """Every ``file.py:callable`` and ``package.module:callable``, and where it stands."""
    yield from _refs(data.get("model"), ("model",), "factory")
    for pattern, rule in _mapping(data.get("compare")).items():
        yield from _refs(rule, ("compare", pattern), "by")
    for index, mode in enumerate(_listed(_mapping(data.get("matrix")).get("patch_modes"))):
        if isinstance(mode, str) and REF.match(mode):
            yield ("matrix", "patch_modes", index), mode
    observe = _mapping(data.get("observe"))
    yield from _refs(observe, ("observe",), "calls")
    for index, call in enumerate(_listed(observe.get("calls"))):
        yield from _refs(call, ("observe", "calls", index), "call")
    for where, text in _texts(observe, ("observe",)):
        fill = _fill(text)
        if isinstance(fill, By):
            yield where, fill.ref


def _data_files(data: Mapping[str, Any]) -> Iterator[tuple[NodePath, str]]:
    """Files of tensors, and folders of weights that are named as such."""
    for where, text in _texts(data.get("observe"), ("observe",)):
        fill = _fill(text)
        if isinstance(fill, FromFile):
            yield where, fill.file
    pretrained = _mapping(data.get("model")).get("pretrained")
    if isinstance(pretrained, str) and pretrained.startswith(("./", "../", "/")):
        yield ("model", "pretrained"), pretrained


def _refs(section: object, where: NodePath, key: str) -> Iterator[tuple[NodePath, str]]:
    value = _mapping(section).get(key)
    if isinstance(value, str) and REF.match(value):
        yield (*where, key), value


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: object, where: NodePath) -> Iterator[tuple[NodePath, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping) and set(value) != {"str"}:  # {str: ...} is text, and no description
        for key, item in value.items():
            yield from _texts(item, (*where, key))
    else:
        for index, item in enumerate(_listed(value)):
            yield from _texts(item, (*where, index))


def _fill(text: str) -> object:
    if not looks_like_tensor(text):
        return None
    try:
        return parse_tensor(text).fill
    except TensorSyntaxError:
        return None  # the spec says so itself


def missing_reference(ref: str, folder: Path, next_to: str = " next to the spec") -> str | None:
    """What of `ref` is not there; ``None`` if it is, or nobody can tell. Files are looked up in `folder`."""
    match = REF.match(ref)
    assert match is not None
    module, name = match["module"], match["name"]
    if module.endswith(".py"):
        file: Path | None = folder / module
        if not (folder / module).is_file():
            return f"there is no file {module}{next_to}{_near(folder / module)}"
    else:
        beside = folder / f"{module}.py"
        try:
            package = importlib.util.find_spec(module.partition(".")[0])
        except (ImportError, ValueError):
            return None
        if package is None:
            # It may still be on the path of pytest; where the file lies beside the spec nobody meant that.
            return f"for the file{next_to} write {beside.name}:{name}" if beside.is_file() else None
        file = _source(package, module)
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, ValueError, RecursionError):
        return None
    except SyntaxError as error:
        return f"{module} cannot be imported: line {error.lineno}: {error.msg}"
    names = _names(tree.body)
    first = name.partition(".")[0]
    if names is None or first in names:
        return None
    public = [each for each in names if not each.startswith("_")]
    return f"{module} has no {first!r}{choices(first, public[:20])}"


def _near(path: Path) -> str:
    """What lies in the same folder and has nearly the same name."""
    try:
        names = sorted(item.name for item in path.parent.iterdir() if item.suffix == path.suffix)
    except OSError:
        return ""
    return choices(path.name, names[:20])


def _source(package: Any, module: str) -> Path | None:
    """The source of a submodule of a package that was found; ``None`` if it has none that can be read."""
    if "." not in module:
        return Path(package.origin) if str(package.origin).endswith(".py") else None
    for location in package.submodule_search_locations or ():
        path = Path(location, *module.split(".")[1:])
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _names(body: list[ast.stmt]) -> dict[str, None] | None:
    """The names that a module binds at its top; ``None`` if only running it tells."""
    found: dict[str, None] = {}
    for statement in body:
        nested: list[ast.stmt] = []
        match statement:
            case ast.FunctionDef(name="__getattr__"):
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[statement.name] = None
                continue
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    if alias.name == "*":
                        return None
                    found[alias.asname or alias.name.partition(".")[0]] = None
                continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id] = None
            elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr"):
                return None
        for block in ("body", "orelse", "finalbody"):
            nested += getattr(statement, block, [])
        for holder in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            nested += holder.body
        inner = _names(nested)
        if inner is None:
            return None
        found |= inner
    return found
