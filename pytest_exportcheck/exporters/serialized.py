"""A captured program as JSON and back, without its weights and without anything that is unpickled.

The one module that touches ``torch._export.serde`` (private, read with torch 2.13). `torch.export.load`
evaluates text that it finds in a file: sizes are given to sympy, guards are compiled, operators are looked
up by name, and example inputs may be a pickle. Here the text must be of sizes and of operators of torch or
transformers,
example inputs and tree specs are those of the process that asks, and a program that does not come back as it
was is not written.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from .fingerprint import program_lines

__all__ = ["NotSaveable", "from_json", "to_json"]

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prim|prims|higher_order|transformers)\.\w+(\.\w+)?|torch\._?sym_\w+|math\.\w+|"
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|xor|invert|getitem)"
)
#: Written by sympy's ``srepr`` and by torch's own functions of sizes; ``exec`` of nothing else.
_SIZES = re.compile(
    r"Symbol|Integer|Float|Rational|Half|One|Zero|NegativeOne|Add|Mul|Pow|Max|Min|Mod|Abs|floor|ceiling|true|false|"
    r"Equality|Unequality|LessThan|GreaterThan|StrictLessThan|StrictGreaterThan|And|Or|Not|"
    r"FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|"
    r"FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt|"
    r"RoundDecimal|ToFloat|Identity|oo|int_oo"
)
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp),
    *(ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.keyword),
)


class NotSaveable(Exception):
    """The text says why a program cannot be kept."""


def to_json(program: torch.export.ExportedProgram, kwargs: Mapping[str, Any], out_spec: str) -> bytes:
    """The program; raises `NotSaveable` where what comes back is not the same.

    Parameters
    ----------
    kwargs:
        The arguments that it was captured with.
    out_spec:
        Tree spec of what eager returns for them, as text.
    """
    from torch._export.serde import serialize

    written = serialize.ExportedProgramSerializer().serialize(
        program, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False
    )
    plain = _without_notes(json.loads(serialize._to_json_bytes(written.exported_program)))
    _settle_inner_sizes(plain["graph_module"]["graph"])
    if containers := _containers(program):
        plain["containers"] = containers
    data = json.dumps(plain, sort_keys=True).encode()
    specs = _tree_specs(plain)
    example = program.example_inputs
    if example is None or specs[0] != _pytree.treespec_dumps(_pytree.tree_structure(example)):
        raise NotSaveable("its inputs are not those of the example")
    if specs[1] != out_spec:
        raise NotSaveable("it returns another structure than eager")
    again = from_json(data, program.state_dict, program.constants, kwargs, *specs)
    for line, other in itertools.zip_longest(_compared(program), _compared(again)):
        if line is None or other is None:
            raise NotSaveable("it is loaded with other nodes")
        if line != other:
            raise NotSaveable(f"it is loaded otherwise than it was: {_difference(line, other)}")
    return data


def from_json(
    data: bytes,
    state_dict: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    in_spec: str,
    out_spec: str,
) -> torch.export.ExportedProgram:
    """The program that `to_json` wrote; raises `NotSaveable` for text that it would not have written.

    Parameters
    ----------
    state_dict, constants:
        Parameters, buffers and constants of the program by its names for them; used as they are.
    in_spec, out_spec:
        Tree specs of arguments and outputs as text: those of the file must be the same, since reading one may
        import what it names.
    """
    from torch._export.serde import schema, serialize

    plain = json.loads(data)
    _refuse_code(plain)
    if _tree_specs(plain) != (in_spec, out_spec):
        raise NotSaveable("its arguments or outputs have another structure")
    program = serialize.ExportedProgramDeserializer().deserialize(
        _read(schema.ExportedProgram, plain),
        dict(state_dict),
        dict(constants),
        ((), dict(kwargs)),
    )
    _restore_containers(program, plain.get("containers", {}))
    return program


def _containers(program: torch.export.ExportedProgram) -> dict[str, dict[str, list[str]]]:
    """Path of a graph -> node -> which of its arguments are tuples and lists.

    Of operators with graphs, and of what these graphs return: torch's format takes one for the other.
    """
    found = {}
    for path, module in program.graph_module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            kinds = {node.name: [type(each).__name__ for each in node.args] for node in _nodes(path, module)}
            if kinds:
                found[path] = kinds
    return found


def _restore_containers(
    program: torch.export.ExportedProgram, containers: Mapping[str, Mapping[str, list[str]]]
) -> None:
    for path, module in program.graph_module.named_modules():
        if not isinstance(module, torch.fx.GraphModule) or path not in containers:
            continue
        kinds = {"tuple": tuple, "immutable_list": list}
        for node in _nodes(path, module):
            node.args = tuple(
                kinds[kind](given) if kind in kinds and isinstance(given, (tuple, list)) else given
                for given, kind in zip(node.args, containers[path].get(node.name, ()), strict=True)
            )
        module.recompile()


def _nodes(path: str, module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [
        node
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.HigherOrderOperator) or (path and node.op == "output")
    ]


def _read(kind: Any, plain: Any) -> Any:
    """An object of torch's schema, from what JSON holds of it.

    ``serialize._dict_to_dataclass`` does the same, and works out the types of the fields again for each
    object: half of the time of loading a program.
    """
    form, inner = _form(kind)
    if form == "optional":
        return None if plain is None else _read(inner, plain)
    if form == "union":
        ((tag, value),) = plain.items()
        return kind.create(**{tag: _read(inner[tag], value)})
    if form == "dataclass":
        return kind(**{name: _read(inner[name], plain[name]) for name in inner if name in plain})
    if form == "list":
        return [_read(inner, item) for item in plain]
    if form == "dict":
        return {key: _read(inner, value) for key, value in plain.items()}
    return float(plain) if form == "float" else plain


@functools.cache
def _form(kind: Any) -> tuple[str, Any]:
    """(how a type is read, types of what is inside)."""
    from torch._export.serde import schema, union

    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in inside:
        (item,) = (each for each in inside if each is not type(None))
        return "optional", item
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, globalns=vars(schema))
        if issubclass(typing.cast(type, kind), union._Union):
            return "union", hints
        return "dataclass", {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    if origin in (list, dict):
        return origin.__name__, inside[-1]
    return ("float" if kind is float else "plain"), None


def _tree_specs(plain: Any) -> tuple[str, str]:
    root, *others = plain["graph_module"]["module_call_graph"]
    if any(entry["signature"] is not None for entry in others):
        raise NotSaveable("it keeps the signatures of submodules")
    return str(root["signature"]["in_spec"]), str(root["signature"]["out_spec"])


def _without_notes(plain: Any) -> Any:
    """Without what says where nodes come from, but for the modules: `fingerprint` reads those."""
    if isinstance(plain, dict):
        return {
            key: {k: v for k, v in value.items() if k in ("nn_module_stack",)}
            if key == "metadata" and isinstance(value, dict)
            else _without_notes(value)
            for key, value in plain.items()
        }
    if isinstance(plain, list):
        return list(map(_without_notes, plain))
    return plain


def _settle_inner_sizes(graph: Any, inputs: frozenset[str] = frozenset()) -> None:
    """Write the sizes of the example for those of inner tensors, in place: no run reads them.

    Reading one symbolic size takes sympy a millisecond, and most of the time of loading a program went there.
    """
    inputs |= {each["as_tensor"]["name"] for each in graph["inputs"] if "as_tensor" in each}
    for name, meta in graph["tensor_values"].items():
        if name not in inputs:
            for sizes in (meta["sizes"], meta["strides"], [meta["storage_offset"]]):
                for size in sizes:
                    hint = (size.get("as_expr") or {}).get("hint")
                    if hint is not None and "as_int" in hint:
                        size.clear()
                        size["as_int"] = hint["as_int"]
    for node in graph["nodes"]:
        for given in node["inputs"]:
            inner = given["arg"].get("as_graph")
            if inner is not None:
                _settle_inner_sizes(inner["graph"], inputs)


def _compared(program: torch.export.ExportedProgram) -> Iterator[str]:
    # Sizes of inner nodes come back simplified by what is known of the symbols; no run reads them.
    yield from program_lines(program, inner=False)
    # A module of it checks these.
    yield str(list(getattr(program, "_guards_code", ())))
    yield str([entry.fqn for entry in program.module_call_graph])
    yield str(sorted(program.state_dict))
    yield str(sorted(program.constants))


def _difference(one: str, other: str) -> str:
    place = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, place - 40)
    return f"{one[start : place + 60]!r}, {other[start : place + 60]!r}"


def _refuse_code(plain: Any, key: str = "") -> None:
    """Raise `NotSaveable` for text that torch would evaluate, or look up, and that is no size or operator."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            if name in ("as_custom_obj", "as_graph_module", "triton_kernel") and value is not None:
                raise NotSaveable(f"it holds {name}")
            _refuse_code(value, name)
    elif isinstance(plain, list):
        for value in plain:
            _refuse_code(value, key)
    elif isinstance(plain, str):
        good = True
        if key == "expr_str":
            good = _is_size(plain)
        elif key == "guards_code":
            good = _is_guard(plain)
        elif key in ("target", "as_operator"):
            good = _OPERATOR.fullmatch(plain) is not None
        if not good:
            raise NotSaveable(f"{key} {plain[:120]!r} is neither a size nor an operator of torch")


@functools.lru_cache(maxsize=4096)
def _is_size(text: str) -> bool:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    inside = {id(argument) for node in ast.walk(tree) if isinstance(node, ast.Call) for argument in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not _SIZES.fullmatch(node.id):
                return False
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and (id(node) not in inside or not _is_word(node.value)):
                return False
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name):
                return False
        elif not isinstance(node, _NODES):
            return False
    return True


def _is_word(text: str) -> bool:
    """A symbol's name, or a number with its digits written out."""
    return re.fullmatch(r"\w+|-?[\d.]+(e[+-]?\d+)?", text) is not None


@functools.lru_cache(maxsize=4096)
def _is_guard(text: str) -> bool:
    """A condition of the sizes of ``L['name']...``, as `torch.export` compiles it."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    functions = {*SYMPY_INTERP, "L", "math", "min", "max", "abs", "int", "float", "inf"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if node.id not in functions:
                return False
        elif isinstance(node, ast.Attribute):
            of_math = isinstance(node.value, ast.Name) and node.value.id == "math"
            if node.attr.startswith("_") or not (of_math or _root(node.value) == "L"):
                return False
        elif isinstance(node, ast.Call):
            called = node.func
            sizes = isinstance(called, ast.Attribute) and called.attr in ("size", "stride", "storage_offset")
            of_math = isinstance(called, ast.Attribute) and _root(called.value) == "math"
            if not (sizes or of_math or (isinstance(called, ast.Name) and called.id not in ("L", "math"))):
                return False
        elif not isinstance(node, (*_NODES, ast.Subscript)):
            return False
    return True


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
