"""What a capture decides by the sizes of its example, and where: the comparisons that torch evaluates.

torch evaluates every Python comparison of sizes (``if x.shape[1] > 32``) with the sizes of the example and
keeps the branch. An ExportedProgram guards most of them, an ONNX model none.

The one module that touches torch's symbolic shapes (private, read with torch 2.13): it watches
``ShapeEnv.evaluate_expr``, which also sees what needs no guard because an earlier one implies it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import sympy
import torch
from torch._guards import TracingContext
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path
from torch.utils._sympy.printers import PythonPrinter

from ..dims import DimExpr
from ..observe import GraphShapes, TensorLeaf
from ..observe.relations import without
from ..observe.shapes import ThinRelation
from ..pytrees import flatten_with_paths
from .running import running_modules

__all__ = [
    "Asked",
    "CaptureWatch",
    "Comparison",
    "Decided",
    "dims_of",
    "internals_missing",
    "place_in_model",
    "size_facts",
]

#: (path of a leaf, axis)
Axis = tuple[str, int]


#: What was decided by sizes, in the symbols of the graph under ``""`` and in those of its shapes without each
#: thin relation under the label of that.
Decided = Mapping[str, Sequence["Comparison"]]


@dataclass(frozen=True)
class Comparison:
    """A comparison of sizes that was evaluated with the sizes of the example.

    Attributes
    ----------
    text:
        Python, in the symbols of the graph: ``seq > 32``.
    names:
        Those symbols.
    place:
        Where the model's code asked: ``model.py:12: if x.shape[1] > 32:``; ``""`` where it was torch itself,
        while it converted the captured program.
    value:
        It stands for a size that was asked for its value (``int(n * 0.5)``): any branch may be decided by it.
    code:
        `text` with ``_0``, ``_1`` for `names`, which may be keywords of Python; ``""``: none.
    """

    text: str
    names: tuple[str, ...]
    place: str = ""
    value: bool = False
    code: str = ""

    def holds(self, sizes: Mapping[str, Any]) -> Any:
        """The truth for sizes of the symbols: integers, or arrays of integers, which give an array.

        ``None`` if it cannot be evaluated; an `ArithmeticError` where a size of 0 is divided by.
        """
        code = _compiled(self.code)
        if code is None:
            return None
        given = {f"_{k}": sizes[name] for k, name in enumerate(self.names)}
        return eval(code, {"__builtins__": _FUNCTIONS}, given)

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text

    def to_plain(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "names": list(self.names)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Comparison:
        """The inverse; `holds` evaluates no other code than conditions of sizes."""
        names = tuple(map(str, plain["names"]))
        return cls(str(plain["text"]), names, str(plain["place"]), bool(plain["value"]), str(plain["code"]))


@dataclass(frozen=True)
class Asked:
    """An answer of torch about sizes, by which a program is bound: its inputs must give the same.

    Attributes
    ----------
    condition:
        What held, in torch's symbols.
    place:
        As of a `Comparison`.
    modules:
        Those that ran, the innermost first.
    """

    condition: sympy.Basic
    place: str
    modules: tuple[torch.nn.Module, ...] = field(default=(), repr=False)


def internals_missing() -> str | None:
    """What this module needs of torch and does not find, ``None`` with a torch that it can read."""
    for name in ("evaluate_expr",):
        if not callable(getattr(ShapeEnv, name, None)):
            return f"ShapeEnv.{name} of torch {torch.__version__}"
    environment = ShapeEnv()
    for name in ("var_to_sources", "replacements", "replacements_slocs", "var_to_range"):
        if not isinstance(getattr(environment, name, None), Mapping):
            return f"ShapeEnv.{name} of torch {torch.__version__}"
    return None


def _sources(kwargs: Mapping[str, Any]) -> dict[str, Axis]:
    """What torch calls the size of each axis -> which one it is.

    ``L['x']['k'].size()[1]`` in non-strict mode, by position among all leaves in strict mode.
    """
    found: dict[str, Axis] = {}
    position = 0
    for name, value in kwargs.items():
        paths = [path for path, _ in flatten_with_paths(value, name)]
        for path, (keys, leaf) in zip(paths, tree_flatten_with_path(value)[0], strict=True):
            source = f"L[{name!r}]" + "".join(map(_key_text, keys))
            for axis in range(leaf.dim() if isinstance(leaf, torch.Tensor) else 0):
                found[f"{source}.size()[{axis}]"] = (path, axis)
                found[f"L['flat_args'][{position}].size()[{axis}]"] = (path, axis)
            position += 1
    return found


def _key_text(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, MappingKey):
        return f"[{key.key!r}]"
    return f".{key.name}" if isinstance(key, GetAttrKey) else f".{key}"


#: Whose frames are not the model's code: torch, this package, the standard library.
_NOT_THE_MODEL = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        os.path.join(sysconfig.get_paths()["purelib"], "onnxscript"),
    )
)
_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep


@functools.cache
def _is_models(filename: str) -> bool:
    path = os.path.realpath(filename)
    if filename.startswith("<") or path.startswith(_NOT_THE_MODEL):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or f"{os.sep}site-packages{os.sep}" in path


def _place_text(filename: str, line: int) -> str:
    roots = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], os.getcwd())
    shown = next(
        (filename[len(root) + 1 :] for root in roots if filename.startswith(root + os.sep)), filename
    )
    linecache.checkcache(filename)
    text = linecache.getline(filename, line).strip()
    return f"{shown}:{line}" + (f": {text}" if text else "")


def place_in_model(filename: str, line: int) -> str:
    """``net.py:12: if x.shape[1] > 32:``, ``""`` where that is no code of the model's."""
    return _place_text(filename, line) if _is_models(filename) else ""


@functools.cache
def _is_an_exporter(filename: str) -> bool:
    return os.path.realpath(filename).startswith(os.path.realpath(os.path.dirname(__file__)) + os.sep)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the model's code that runs; ``""`` if there is none."""
    # In strict mode dynamo reads the bytecode: the frames are its own.
    for entry in reversed(TracingContext.extract_stack()):
        if _is_models(entry.filename):
            return _place_text(entry.filename, entry.lineno or 0)
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_an_exporter(filename) and frame.f_code.co_name != "forward":
            return ""  # the exporter: what is further out called it
        if _is_models(filename):
            return _place_text(filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def _passed_over() -> set[str]:
    """Files that torch passes over when it looks for the line that a refusal is about."""
    files: set[str] = getattr(symbolic_shapes, "uninteresting_files", set)()
    return files


class CaptureWatch(AbstractContextManager["CaptureWatch"]):
    """Records comparisons of sizes while a model is captured and converted.

    Attributes
    ----------
    missing:
        Why nothing is recorded, ``None`` if all is well.
    """

    def __init__(self) -> None:
        self.missing = internals_missing()
        self._kwargs: dict[str, Axis] = {}
        #: By the identity of the ShapeEnv, which is kept so that no other gets its identity.
        self._seen: dict[int, tuple[ShapeEnv, dict[sympy.Basic, tuple[Any, str]]]] = {}
        self._causes: dict[tuple[int, sympy.Symbol], tuple[sympy.Basic, Any, str]] = {}
        self._asked: dict[tuple[int, int], Asked] = {}
        self._narrowed: dict[tuple[int, sympy.Symbol, str], Asked] = {}
        self._added: dict[str, list[Comparison]] = {}
        #: Of a capture of an earlier run, by the text of the shapes.
        self._restored: dict[str, list[Comparison]] = {}
        self._original: Any = None
        self._passed = False
        #: What `_comparison` made: it is asked for by several digests, and by the thresholds.
        self._made: dict[tuple[int, sympy.Basic, Any], Comparison | None] = {}

    def inputs(self, kwargs: Mapping[str, Any]) -> None:
        """The arguments that are captured, by name."""
        self._kwargs = _sources(kwargs)

    def __enter__(self) -> CaptureWatch:
        if self.missing is None:
            original = self._original = ShapeEnv.evaluate_expr
            watch = self

            def evaluate_expr(env: ShapeEnv, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
                _, seen = watch._seen.setdefault(id(env), (env, {}))
                if not orig_expr.free_symbols:
                    return original(env, orig_expr, *args, **kwargs)
                if not watch._passed:
                    # Else torch names a line below as what a refusal was caused by. Not before: asking for
                    # these files imports all that captures, which a capture of an earlier run does without.
                    watch._passed = True
                    _passed_over().add(evaluate_expr.__code__.co_filename)
                before = {symbol for symbol in orig_expr.free_symbols if symbol in env.replacements}
                guards, ranges = len(env.guards), dict(env.var_to_range)
                result = original(env, orig_expr, *args, **kwargs)
                # What is asked again may be guarded only then.
                bound, new = len(env.guards) > guards, orig_expr not in seen
                place = _place(sys._getframe(1)) if bound or new else ""
                if bound:
                    watch._bound(env, guards, ranges, place)
                if not new:
                    return result
                seen[orig_expr] = (result, place)
                for symbol in orig_expr.free_symbols - before:
                    if isinstance(env.replacements.get(symbol), sympy.Integer):
                        watch._causes[id(env), symbol] = (orig_expr, result, place)
                return result

            ShapeEnv.evaluate_expr = evaluate_expr  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *exc: object) -> None:
        if self._original is not None:
            ShapeEnv.evaluate_expr = self._original  # type: ignore[method-assign]
            self._original = None
        if self._passed:
            self._passed = False
            _passed_over().discard(self.__exit__.__code__.co_filename)

    def _bound(self, env: ShapeEnv, guards: int, ranges: Mapping[Any, Any], place: str) -> None:
        """A question was answered by a guard: who asked, and which sizes that bounds."""
        try:
            modules = tuple(running_modules(sys._getframe(2)))
        except Exception:  # of dynamo's objects: what is looked at must not fail for it
            modules = ()
        for number in range(guards, len(env.guards)):
            self._asked[id(env), number] = Asked(env.guards[number].expr, place, modules)
        asked = self._asked[id(env), len(env.guards) - 1]
        for symbol, now in env.var_to_range.items():
            was = ranges.get(symbol)
            for bound in ("lower", "upper"):
                if was is not None and getattr(was, bound) != getattr(now, bound):
                    self._narrowed[id(env), symbol, bound] = asked

    def bounds(self) -> Iterator[tuple[dict[sympy.Symbol, Axis], Mapping[Any, Any], list[Any], Any]]:
        """Of each capture: axes of the symbols, their ranges, what was asked, and what narrowed a range."""
        for key, (env, _) in self._seen.items():
            asked = [
                self._asked.get((key, number), Asked(guard.expr, ""))
                for number, guard in enumerate(env.guards)
            ]
            narrowed = {(symbol, end): a for (k, symbol, end), a in self._narrowed.items() if k == key}
            yield self._axes(env), env.var_to_range, asked, narrowed

    def mark(self) -> dict[int, int]:
        """How much was seen so far, for `comparisons`."""
        return {key: len(seen) for key, (_, seen) in self._seen.items()}

    def add(self, decided: Decided) -> None:
        """Comparisons of another capture's conversion, which stands for the one of this capture."""
        for label, comparisons in decided.items():
            self._added.setdefault(label, []).extend(comparisons)

    def decided(
        self, shapes: GraphShapes, since: Mapping[int, int] | None = None
    ) -> dict[str, list[Comparison]]:
        """The comparisons in the symbols of `shapes`, and in those that there are without a thin relation."""
        return {
            "": self.comparisons(shapes, since),
            **{each.label: self.comparisons(shapes, since, each) for each in shapes.thin},
        }

    def restore(self, comparisons: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """What was seen in an earlier run: for each text of shapes (`dims_of`) its comparisons, plain."""
        self._restored = {
            dims: list(map(Comparison.from_plain, found)) for dims, found in comparisons.items()
        }

    def comparisons(
        self,
        shapes: GraphShapes,
        since: Mapping[int, int] | None = None,
        relation: ThinRelation | None = None,
    ) -> list[Comparison]:
        """Each comparison once, in the symbols of `shapes`, at the first place that asks it.

        Parameters
        ----------
        since:
            A `mark`: those only that were seen after it.
        relation:
            One of the thin relations of `shapes`: in the symbols that there are without it.
        """
        shapes = shapes if relation is None else without(shapes, relation)
        label = "" if relation is None else relation.label
        found: dict[str, Comparison] = {}

        def note(comparison: Comparison | None) -> None:
            known = found.get(comparison.text) if comparison else None
            if comparison is not None and (known is None or (comparison.place and not known.place)):
                found[comparison.text] = comparison

        for key, (env, seen) in self._seen.items():
            symbols = self._symbols(env, shapes)
            ours = frozenset(symbols.items())
            for expression, (result, place) in itertools.islice(
                seen.items(), since.get(key, 0) if since else 0, None
            ):
                asked = key, expression, ours
                if asked not in self._made:
                    self._made[asked] = _comparison(expression, result, place, symbols)
                note(self._made[asked])
        if since is None:
            for comparison in (*self._restored.get(dims_of(shapes), ()), *self._added.get(label, ())):
                note(comparison)
        return list(found.values())

    def _symbols(self, env: ShapeEnv, shapes: GraphShapes) -> dict[sympy.Symbol, sympy.Expr]:
        """torch's symbols -> what they are in ours; those of no axis of an input are left out."""
        symbols: dict[sympy.Symbol, sympy.Expr] = {}
        for symbol, (path, axis) in self._axes(env).items():
            leaf = shapes.leaves.get(path)
            dim = leaf.dims[axis] if isinstance(leaf, TensorLeaf) and axis < len(leaf.dims) else None
            if dim is not None:
                symbols[symbol] = sympy.Integer(dim) if isinstance(dim, int) else _expression(dim)
        return symbols

    def _axes(self, env: ShapeEnv) -> dict[sympy.Symbol, Axis]:
        axes = {}
        for symbol, sources in env.var_to_sources.items():
            known = [self._kwargs[source.name] for source in sources if source.name in self._kwargs]
            if known:
                axes[symbol] = known[0]
        return axes

    def frozen(self) -> dict[Axis, str]:
        """Axes that became constants -> why: ``x.shape[0] == 5 (net.py:4: return x + bias)``."""
        reasons: dict[Axis, str] = {}
        for env, _ in self._seen.values():
            axes = self._axes(env)
            names = {symbol: sympy.Symbol(f"{path}.shape[{axis}]") for symbol, (path, axis) in axes.items()}
            for symbol, axis in axes.items():
                root: Any = symbol
                while isinstance(env.replacements.get(root), sympy.Symbol):
                    root = env.replacements[root]
                if not isinstance(env.replacements.get(root), sympy.Integer):
                    continue
                expression, result, place = self._causes.get((id(env), root), (None, None, ""))
                if expression is None:
                    place = _recorded_place(env.replacements_slocs.get(root))
                    expression = sympy.Eq(root, env.replacements[root], evaluate=False)
                    result = sympy.true
                text = _text(_as_condition(expression, result, held=True).xreplace(names))
                fixed = f"{names[symbol]} == {env.replacements[root]}"
                if fixed not in text:
                    text += f", which leaves {fixed}"
                reasons[axis] = f"{text} ({place})" if place else text
        return reasons


def dims_of(shapes: GraphShapes) -> str:
    """The tensors of a graph with their axes, as text."""
    return "; ".join(f"{leaf.path} {leaf}" for leaf in shapes.tensors())


def _recorded_place(location: Any) -> str:
    frame: Any = getattr(location, "framework_loc", None)
    filename = getattr(frame, "filename", "")
    return place_in_model(filename, frame.lineno or 0) if filename else ""


def _expression(dim: DimExpr) -> sympy.Expr:
    terms = [sign * sympy.Symbol(name, integer=True, nonnegative=True) for name, sign in dim.terms]
    return sympy.Add(*terms, sympy.Integer(dim.offset))


def _is_condition(expression: sympy.Basic) -> bool:
    # A symbol of sympy is a Boolean too.
    return isinstance(expression, (sympy.core.relational.Relational, sympy.logic.boolalg.BooleanFunction))


def _as_condition(expression: sympy.Basic, result: Any, held: bool = False) -> sympy.Basic:
    """A condition: a size that was asked for its value (``int(n)``, ``range(n)``) is compared with that.

    `held`: the way round in which it was true.
    """
    if _is_condition(expression):
        negated = sympy.Not(expression)
        return negated if held and not bool(result) else expression
    return sympy.Eq(expression, sympy.sympify(result), evaluate=False)


_LONG_FLOAT = re.compile(r"(?<![\w.])\d+\.\d{8,}(?:e[+-]?\d+)?")


def _text(condition: sympy.Basic) -> str:
    try:
        # 0.5 is printed with all its digits.
        return _LONG_FLOAT.sub(lambda m: repr(float(m[0])), str(PythonPrinter().doprint(condition)))
    except Exception:
        # torch has functions of sizes for which this printer has no text.
        return str(condition)


def _comparison(
    expression: sympy.Basic, result: Any, place: str, symbols: Mapping[sympy.Symbol, sympy.Expr]
) -> Comparison | None:
    """``None`` if it is about anything but the sizes of inputs, or is settled by what our symbols say."""
    if not expression.free_symbols <= symbols.keys():
        return None
    condition = _as_condition(expression, result).xreplace(dict(symbols))
    ours = sorted(condition.free_symbols, key=str)
    if not ours:
        return None
    # Any name may stand in a spec, keywords of Python too.
    safe = {symbol: sympy.Symbol(f"_{k}", integer=True, nonnegative=True) for k, symbol in enumerate(ours)}
    names = tuple(map(str, ours))
    value = not _is_condition(expression)
    return Comparison(_text(condition), names, place, value, _text(condition.xreplace(safe)))


@functools.lru_cache(maxsize=1024)
def _compiled(code: str) -> Any:
    """The code object of a condition; ``None`` for what is no text of sizes and the functions below."""
    try:
        tree = ast.parse(code, mode="eval")
    except (SyntaxError, ValueError):
        return None
    # It may have been read from a file.
    return compile(tree, "<comparison>", "eval") if all(map(_is_of_sizes, ast.walk(tree))) else None


def _is_of_sizes(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or (node.id[:1] == "_" and node.id[1:].isdigit())
    if isinstance(node, ast.Attribute):
        owner = _FUNCTIONS.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return node.attr in getattr(owner, "__dict__", {})
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float))
    if isinstance(node, ast.Call):
        return not node.keywords
    kinds = (ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.expr_context)
    return isinstance(node, (*kinds, ast.boolop, ast.operator, ast.unaryop, ast.cmpop))


def size_facts(program: torch.export.ExportedProgram) -> Iterator[str]:
    """What the conversion of `program` may decide by, beside its nodes: what torch knows of its symbols."""
    environments: dict[int, ShapeEnv] = {}
    for node in program.graph.nodes:
        environment = getattr(getattr(node.meta.get("val"), "fake_mode", None), "shape_env", None)
        if environment is not None:
            environments.setdefault(id(environment), environment)
    for environment in environments.values():
        yield "symbols"
        for name in (
            "backed_var_to_val",
            "unbacked_var_to_val",
            "var_to_hint_override",
            "var_to_range",
            "replacements",
            "axioms",
        ):
            known: Mapping[Any, Any] = getattr(environment, name, {})
            yield f"{name} {sorted(f'{symbol}: {value}' for symbol, value in known.items())}"
        for name in ("divisible", "size_like"):
            yield f"{name} {sorted(map(str, getattr(environment, name, ())))}"
        yield f"guards {[str(guard.expr) for guard in environment.guards]}"
        asserts = getattr(environment, "deferred_runtime_asserts", {})
        yield f"asserts {[(str(k), [str(each.expr) for each in v]) for k, v in asserts.items()]}"


def _to_integers(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: function(np.asarray(values, dtype=float)).astype(np.int64)


_MATH = {
    **{name: getattr(np, name) for name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "log2")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("cos", "sin", "tan")},
    "floor": _to_integers(np.floor),
    "ceil": _to_integers(np.ceil),
    "trunc": _to_integers(np.trunc),
    "inf": np.inf,
    "nan": np.nan,
    "pi": np.pi,
    "e": np.e,
}

#: What torch's printer writes beside operators; numpy's take arrays.
_FUNCTIONS: Mapping[str, Any] = {
    "math": SimpleNamespace(**_MATH),
    "torch": SimpleNamespace(
        sym_float=lambda values: np.asarray(values, dtype=float), _sym_sqrt=np.sqrt, sym_sqrt=np.sqrt
    ),
    "min": lambda *values: functools.reduce(np.minimum, values),
    "max": lambda *values: functools.reduce(np.maximum, values),
    "abs": abs,
    "int": int,
    "round": round,
}
