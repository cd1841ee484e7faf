"""Accepted dynamic shapes as text: one line per tensor, repeated layers folded, and back.

This module knows text only: no torch while comparing or rendering, no files but for `load_dynamic_shapes`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ..dims import DimExpr, parse_dim
from ..keypaths import split_path, text_key

__all__ = [
    "GoldenError",
    "GoldenGraph",
    "compare_goldens",
    "load_dynamic_shapes",
    "parse_golden",
    "render_golden",
]

#: The label of folded layers. A key that looks like one is written with a backslash more.
_RUN = re.compile(r"layers? ([0-9]+)(?:-([0-9]+))?\Z")
_LIKE_RUN = re.compile(r"\\*" + _RUN.pattern)
_INDEX = re.compile(r"(?:0|[1-9][0-9]*)\Z")
_TENSOR = re.compile(r"^(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]$")
_CONSTANT = re.compile(r"none$|[A-Za-z_]\w* = ")
_FIELDS = {"keys": "key", "values": "value"}
_FIELDS_BACK = {short: name for name, short in _FIELDS.items()}


class GoldenError(ValueError):
    """A golden file that cannot be read."""


@dataclass
class GoldenGraph:
    """One graph's inputs: path -> ``int64[batch, seq]`` or a constant, and the classes of its containers."""

    inputs: dict[str, str]
    containers: dict[str, str] = field(default_factory=dict)


def _plain(text: str) -> str:
    """A YAML scalar: plain where that reads back as the same string."""
    if (
        re.fullmatch(r"[A-Za-z_][\w ./()+=-]*(\[[\w ,+-]*\])?", text)
        and not _is_yaml_word(text)
        and text[-1] != " "
    ):
        return text
    return _quoted(text)


def _quoted(text: str) -> str:
    """A double-quoted scalar; not JSON's: YAML joins no surrogate pairs, and takes no DEL as it is."""
    escaped = (
        json.dumps(c)[1:-1] if c < "\x7f" else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
        for c in text
    )
    return f'"{"".join(escaped)}"'


def _is_yaml_word(text: str) -> bool:
    return text.lower() in ("true", "false", "null", "yes", "no", "on", "off", "none", "y", "n")


def _key(text: str) -> str:
    """A key of a YAML mapping that reads back as the same string."""
    plain = re.fullmatch(r"[A-Za-z_]([\w. -]*[\w.-])?", text) and not _is_yaml_word(text)
    return text if plain else _quoted(text)


def _layer(path: str) -> tuple[tuple[str, ...], int, str] | None:
    """``(("cache",), 0, "keys")`` for ``cache.layers.0.keys``."""
    parts = split_path(path)
    for position in range(len(parts) - 2):
        if parts[position] == "layers" and _INDEX.match(parts[position + 1]):
            return tuple(parts[:position]), int(parts[position + 1]), ".".join(parts[position + 2 :])
    return None


def _tree(inputs: Mapping[str, str]) -> dict[str, Any]:
    """Nested mappings of the paths; equal layers folded into ``layers 0-1``."""
    found = {path: _layer(path) for path in inputs}
    # A field that is called `key` of itself would read back as `keys`: such layers are written in full.
    plain = {layer[0] for layer in found.values() if layer and layer[2] in _FIELDS_BACK}
    folded: dict[tuple[str, ...], dict[int, dict[str, str]]] = {}
    for path, layer in found.items():
        if layer and layer[0] not in plain:
            root, index, name = layer
            folded.setdefault(root, {}).setdefault(index, {})[_FIELDS.get(name, name)] = inputs[path]
    tree: dict[str, Any] = {}
    for path, layer in found.items():
        if layer is None or layer[0] in plain:
            _insert(tree, [_label(part) for part in split_path(path)], inputs[path])
        elif layer[0] in folded:
            node = _insert(tree, [_label(part) for part in layer[0]], None)
            node.update(_fold(folded.pop(layer[0])))
    return tree


def _label(part: str) -> str:
    return "\\" + part if _LIKE_RUN.match(part) else part


def _insert(tree: dict[str, Any], parts: list[str], leaf: str | None) -> Any:
    node: Any = tree
    for part in parts[:-1] if leaf is not None else parts:
        node = node.setdefault(part, {})
    if leaf is not None:
        node[parts[-1]] = leaf
    return node


def _fold(layers: dict[int, dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    """Runs of equal layers: ``("layers 0-1", {...}), ("layer 2", {...})``."""
    runs: list[tuple[int, int, dict[str, str]]] = []
    for index in sorted(layers):
        if runs and runs[-1][2] == layers[index] and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index, layers[index])
        else:
            runs.append((index, index, layers[index]))
    return [
        (f"layers {first}-{last}" if last > first else f"layer {first}", fields)
        for first, last, fields in runs
    ]


def _lines(node: Mapping[str, Any], indent: int) -> list[str]:
    lines = []
    for key, value in node.items():
        name = _key(key)
        if isinstance(value, dict):
            lines.append(f"{'  ' * indent}{name}:")
            lines.extend(_lines(value, indent + 1))
        else:
            lines.append(f"{'  ' * indent}{name}: {_plain(value)}")
    return lines


def render_golden(graphs: Mapping[str | None, GoldenGraph], path: str, spec: str) -> str:
    """The file's text.

    Parameters
    ----------
    graphs:
        By group name; the single key is ``None`` if one graph serves every call.
    path, spec:
        As shown in the header: the golden file, and the spec it belongs to.
    """
    lines = [
        f"# {path} -- accepted dynamic shapes of {spec}.",
        f"# Written by: pytest --exportcheck {spec} --update-shapes",
    ]
    for name, graph in graphs.items():
        indent = 0
        if name is not None:
            if name == next(iter(graphs)):
                lines.append("graphs:")
            lines.append(f"  {_key(name)}:")
            indent = 2
        lines.append("  " * indent + "inputs:")
        lines.extend(_lines(_tree(graph.inputs), indent + 1))
        if graph.containers:
            lines.append("  " * indent + "containers:")
            lines.extend(
                f"{'  ' * (indent + 1)}{_key(where)}: {_plain(cls)}"
                for where, cls in graph.containers.items()
            )
    return "\n".join(lines) + "\n"


def parse_golden(text: str, path: str = "golden") -> dict[str | None, GoldenGraph]:
    """The inverse of `render_golden`.

    Raises
    ------
    GoldenError
        The text is no golden; the message names `path` and the place.
    """
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise GoldenError(f"{place}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict) or not ({"inputs", "graphs"} & set(data)):
        raise GoldenError(f"{path}: expected the keys `inputs` or `graphs`")
    if "graphs" in data and not isinstance(data["graphs"], dict):
        raise GoldenError(f"{path}: `graphs` must map names to sections")
    sections: dict[str | None, Any] = dict(data["graphs"]) if "graphs" in data else {None: data}
    graphs: dict[str | None, GoldenGraph] = {}
    for name, section in sections.items():
        if not isinstance(section, dict) or not isinstance(section.get("inputs"), dict):
            raise GoldenError(f"{path}: graph {name!r} has no `inputs`")
        inputs: dict[str, str] = {}
        _flatten(section["inputs"], "", inputs)
        for leaf, found in inputs.items():
            if not _TENSOR.match(found) and not _CONSTANT.match(found):
                lines = (number for number, line in enumerate(text.splitlines(), 1) if found in line)
                raise GoldenError(
                    f"{path}:{next(lines, 1)}: cannot read {found!r} of {leaf}: expected something like "
                    "float32[batch, 4], int = 1 or none"
                )
        graphs[name] = GoldenGraph(
            inputs, {str(k): str(v) for k, v in (section.get("containers") or {}).items()}
        )
    return graphs


def _flatten(node: Mapping[Any, Any], prefix: str, inputs: dict[str, str]) -> None:
    for key, value in node.items():
        run = _RUN.match(str(key))
        if run and isinstance(value, dict):
            for index in range(int(run[1]), int(run[2] or run[1]) + 1):
                for name, text in value.items():
                    inputs[f"{prefix}layers.{index}.{_FIELDS_BACK.get(str(name), name)}"] = str(text)
            continue
        part = str(key)[_LIKE_RUN.match(str(key)) is not None and str(key).startswith("\\") :]
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{part}.", inputs)
        else:
            inputs[f"{prefix}{part}"] = str(value)


def compare_goldens(accepted: str, proposed: str) -> list[str]:
    """Diff lines of two golden texts (headers ignored), ``[]`` if they say the same."""

    def body(text: str) -> list[str]:
        return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("#")]

    old, new = body(accepted), body(proposed)
    if old == new:
        return []
    return [line for line in difflib.ndiff(old, new) if not line.startswith("?")]


def _dims(text: str, path: str) -> list[int | DimExpr] | None:
    match = _TENSOR.match(text)
    if match is None:
        return None
    try:
        return [parse_dim(part) for part in match["dims"].split(",")] if match["dims"].strip() else []
    except ValueError as error:
        raise GoldenError(f"{path}: {error}") from None


def load_dynamic_shapes(path: str | os.PathLike[str], graph: str | None = None) -> dict[str, Any]:
    """Dynamic shapes from a golden file, as `torch.export.export` takes them.

    Parameters
    ----------
    path:
        The golden file (``__shapes__/llama.yaml``).
    graph:
        Name of the group, for a file with several graphs.

    Returns
    -------
    dict
        Argument name -> ``{axis: Dim.DYNAMIC}`` for a tensor; a dict, list or tuple for such a container, and
        the flat list of its leaves for a cache or another class that is a pytree node.

    Raises
    ------
    GoldenError
        The file is no golden, or has no such graph.

    Examples
    --------
    >>> shapes = load_dynamic_shapes("model_specs/__shapes__/bert.yaml")
    >>> program = torch.export.export(model, (), kwargs=inputs, dynamic_shapes=shapes)
    """
    import torch

    where = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenError(f"{where}: cannot be read: {error}") from None
    graphs = parse_golden(text, where)
    if graph not in graphs:
        names = ", ".join(str(name) for name in graphs if name is not None)
        raise GoldenError(
            f"{where}: no graph {graph!r}" + (f"; it has {names}" if names else ", it has one graph")
        )
    section = graphs[graph]

    def entry(text: str) -> Any:
        dims = _dims(text, where)
        if dims is None:
            return None
        return {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(dims) if isinstance(dim, DimExpr)}

    tree: dict[str, Any] = {}
    for leaf_path, value in section.inputs.items():
        _insert(tree, split_path(leaf_path), value)
    for container in section.containers:
        # An empty one has no leaves to tell of it.
        _insert(tree, split_path(container), None)
    result = _build(tree, "", section, entry, Path(where).absolute().parent.parent)
    # Constants are no inputs of the program.
    return {name: value for name, value in result.items() if _has_tensor(tree[name])}


def _has_tensor(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_has_tensor(child) for child in node.values())
    return _TENSOR.match(node) is not None


def _build(node: Any, path: str, graph: GoldenGraph, entry: Any, folder: Path) -> Any:
    """Shapes of the node at `path`, in the containers that torch.export wants; `folder`: of the spec."""
    if isinstance(node, str):
        return entry(node)
    cls = graph.containers.get(path)
    if cls and (
        set(node) == {"layers"}
        or (cls.endswith("Cache") and not set(node) & {"self_attention_cache", "cross_attention_cache"})
    ):
        # A cache flattens to its tensors, layer by layer.
        return [entry(text) for text in _leaves(node)]
    children = {
        text_key(key): _build(child, f"{path}.{key}" if path else key, graph, entry, folder)
        for key, child in node.items()
    }
    if cls is None:
        if path and list(node) == [str(k) for k in range(len(node))]:
            return list(children.values())
        return children
    if cls in ("dict", "OrderedDict", "defaultdict"):
        return children
    if cls in ("list", "deque"):
        return (list if cls == "list" else deque)(children.values())
    if cls == "tuple":
        return tuple(children.values())
    if cls.startswith("namedtuple "):
        return _named_tuple(cls.removeprefix("namedtuple "), path, folder)(*children.values())
    return list(children.values())


def _named_tuple(reference: str, path: str, folder: Path) -> Any:
    """The class: of a module, or of a file next to the spec that is one, if it can be imported."""
    from ..spec.imports import UserCodeError, load_object

    module, _, name = reference.partition(":")
    try:
        try:
            found: Any = import_module(module.removesuffix(".py"))
        except ImportError:
            if not module.endswith(".py") or not (folder / module).is_file():
                raise
            return load_object(reference, folder)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, UserCodeError) as error:
        raise GoldenError(f"{path} is a named tuple {reference}, which cannot be imported: {error}") from None
    return found


def _leaves(node: Any) -> list[str]:
    """Texts of the leaves in order."""
    if isinstance(node, str):
        return [node]
    return [leaf for child in node.values() for leaf in _leaves(child)]
