"""The source that builds a model again: from its config, or from a factory, whose file is embedded."""

from __future__ import annotations

import ast
import inspect
import pprint
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .script_values import CannotWriteError

__all__ = ["Factory", "ModelSource", "model_source", "only_needed"]

#: Where these occur, names of a module may be looked up by their text.
_BY_TEXT = {"globals", "vars", "exec", "eval", "modules", "__subclasses__"}


@dataclass(frozen=True)
class Factory:
    """What a spec says of its model: a callable and its keyword arguments; `folder`: of the spec."""

    function: Any
    kwargs: Mapping[str, Any]
    folder: Path | None = None


@dataclass(frozen=True)
class ModelSource:
    """Parts of a script.

    Attributes
    ----------
    future, embedded:
        ``from __future__`` lines of an embedded file, and the rest of it.
    imports:
        Lines.
    module:
        Name under which the embedded file is imported here; empty if none is embedded.
    build:
        Body of a function that returns the whole model.
    files:
        Path beside the script -> text of a file that the embedded one imports, or that such a one does.
    """

    build: list[str]
    imports: tuple[str, ...] = ()
    future: tuple[str, ...] = ()
    embedded: str = ""
    module: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def model_source(root: torch.nn.Module, factory: Factory | None) -> ModelSource:
    """Source that builds a model like `root`; its weights come from elsewhere.

    Raises
    ------
    CannotWriteError
        It is neither a model of transformers nor made by a factory.
    """
    utils = sys.modules.get("transformers.modeling_utils")
    if utils is not None and isinstance(root, utils.PreTrainedModel):
        kind, config = type(root), root.config
        if kind.__module__.startswith("transformers."):
            return _from_config(kind, config)
    if factory is None:
        raise CannotWriteError(
            f"no script can build a {type(root).__name__}: there is no config and no factory"
        )
    return _from_factory(factory)


def _from_config(kind: type, config: Any) -> ModelSource:
    values = config.to_dict()
    values.pop("transformers_version", None)
    text = pprint.pformat(_plain(values), width=100, sort_dicts=True)
    lines = [
        f"config = {type(config).__name__}.from_dict(",
        *(f"    {line}" for line in text.splitlines()),
        ")",
    ]
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str):
        # Which attention is chosen is not among the saved values.
        lines.append(f"config._attn_implementation = {attention!r}")
    imports = tuple(f"from {cls.__module__} import {cls.__name__}" for cls in (kind, type(config)))
    return ModelSource([*lines, f"return {kind.__name__}(config)"], imports)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CannotWriteError(f"the config holds a {type(value).__name__}")


def _from_factory(factory: Factory) -> ModelSource:
    function = factory.function
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(function)
        if file is None or not name.isidentifier():
            raise TypeError("it has no file, or is no plain function or class")
        arguments = ", ".join(f"{key}={_literal(value)}" for key, value in factory.kwargs.items())
        build = [f"return {name}({arguments})"]
        if _is_installed(Path(file)):
            return ModelSource(build, (f"from {function.__module__} import {name}",))
        source = Path(file).read_text(encoding="utf-8")
        folders = [Path(file).resolve().parent, *([factory.folder.resolve()] if factory.folder else [])]
        files = _files_beside(source, folders)
    except (OSError, TypeError, ValueError) as error:
        raise CannotWriteError(f"the source of the factory {name} cannot be read: {error}") from None
    future, rest = _split(source)
    return ModelSource(build, (), future, rest, function.__module__, files)


def _files_beside(source: str, folders: Sequence[Path]) -> dict[str, str]:
    """Files in `folders` that `source` imports, and those that they import; of a package all files.

    Raises
    ------
    CannotWriteError
        One would be where the script is.
    """
    found: dict[str, str] = {}
    waiting = [source]
    while waiting:
        for name in _imported(waiting.pop()):
            # As while the model is built: the first folder that has it.
            for path, shown in next(filter(None, (_files_of(folder, name) for folder in folders)), []):
                if shown not in found:
                    found[shown] = path.read_text(encoding="utf-8")
                    waiting.append(found[shown])
    if "repro.py" in found:
        raise CannotWriteError("the factory imports a file that is called repro.py, as the script is")
    return found


def _imported(source: str) -> set[str]:
    """Modules at the top that `source` imports anywhere, none of the standard library."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def _files_of(folder: Path, name: str) -> list[tuple[Path, str]]:
    """(file, path from `folder`) of a module or package of the user's, in order."""
    package = folder / name
    files = sorted(package.rglob("*.py")) if package.is_dir() else []
    if not files and (module := folder / f"{name}.py").is_file():
        files = [module]
    return [(file, file.relative_to(folder).as_posix()) for file in files]


def _literal(value: Any) -> str:
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise CannotWriteError(f"the factory is given a {type(value).__name__}, which has no literal")
    return text


def _is_installed(file: Path) -> bool:
    return any(file.resolve().is_relative_to(Path(sysconfig.get_path(key))) for key in ("purelib", "stdlib"))


def _split(source: str) -> tuple[tuple[str, ...], str]:
    """(``from __future__`` lines, the rest without what only runs as a script)."""
    lines = source.splitlines()
    future = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future += lines[node.lineno - 1 : node.end_lineno]
        elif not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            continue
        assert node.end_lineno is not None
        for at in range(node.lineno - 1, node.end_lineno):
            lines[at] = ""
    return tuple(future), "\n".join(lines).strip("\n")


def only_needed(source: str, wanted: set[str]) -> str:
    """`source` without the functions and classes of its top that neither `wanted` nor the rest of it names.

    Decorated ones stay: a decorator may keep them elsewhere.
    """
    body = ast.parse(source).body
    plain = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list
    ]
    named = {node: _words(node) for node in body}
    if any(words & _BY_TEXT for words in named.values()):
        return source
    needed = wanted.union(*(words for node, words in named.items() if node not in plain))
    kept: set[ast.stmt] = set()
    while found := [node for node in plain if node.name in needed and node not in kept]:
        kept.update(found)
        needed = needed.union(*(named[node] for node in found))
    lines = source.splitlines()
    for node in plain:
        if node in kept:
            continue
        assert node.end_lineno is not None
        first = node.lineno - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        lines[first : node.end_lineno] = [""] * (node.end_lineno - first)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")


def _words(node: ast.AST) -> set[str]:
    """Names that are read, and the words of texts: an annotation may be one."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.update(re.findall(r"\w+", each.value))
    return found
