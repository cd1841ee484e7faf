"""What an `InputObserver` hands out: arguments and shapes in the forms that `torch.export.export` takes.

`infer` decides what one graph must accept; here is who is asked for what, by position or by name, what stands
in for an argument that a call lacks, and how the axes are labelled.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ObserveError
from ..keypaths import root_of
from ..plurals import counted
from ..pytrees import clone_tree, flatten_with_paths, is_constant
from ..pytrees.caches import is_cache
from ..pytrees.cloning import Unkept, blank
from ..pytrees.paths import same_constant
from .dynamic import dynamic_shapes_for
from .infer import ConstantsDiffer, infer_shapes
from .labels import argument_named, check_names, with_labels, with_suggested_labels
from .records import InputObserverInfo, ObserverWarning, RecordedCall, with_defaults
from .resize import choose_example
from .shapes import ConstantLeaf, GraphShapes, TensorLeaf
from .signature import CallSignature
from .structure import InferenceError, check_structure, differing_contexts

__all__ = ["InferenceError", "Interface", "infer_interface"]

_PACKAGE = __name__.split(".", 1)[0] + "."


def warn(message: str) -> None:
    """An `ObserverWarning` at the line outside this package that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ObserverWarning, stacklevel=level)


@dataclass
class Interface:
    """What the calls of an observer need one graph to take.

    Attributes
    ----------
    template:
        By name, in order: the fullest value of each argument. Constants that equal their default are left
        out.
    positional:
        Whether every argument was always passed by position.
    stand_ins:
        Value of an argument where a call lacks it, by name.
    calls:
        Those whose values were kept.
    doubts:
        What a program may refuse, as sentences.
    """

    signature: CallSignature
    shapes: GraphShapes
    template: dict[str, Any]
    positional: bool
    stand_ins: Mapping[str, Any]
    calls: list[RecordedCall]
    doubts: Sequence[str] = ()

    def tensor_paths(self) -> list[str]:
        """Paths of the tensors, in the order of `template`."""
        return [
            path
            for name, value in self.template.items()
            for path, _ in flatten_with_paths(value, name)
            if isinstance(self.shapes.leaves.get(path), TensorLeaf)
        ]

    # shapes

    def dynamic_shapes(self, dim_names: bool | Mapping[Any, Any] | None) -> Any:
        """Nested dynamic shapes; see `InputObserver.infer_dynamic_shapes`."""
        shapes, leaf = self.shapes, None
        if dim_names is True:
            shapes, leaf = with_suggested_labels(self.shapes)
        elif isinstance(dim_names, Mapping):
            (shapes, leaf), unused = with_labels(self.shapes, dim_names, self.signature, self.template)
            for what in unused:
                warn(f"dim_names labels {what}: the label is not used")
        elif dim_names:
            raise TypeError(f"Unexpected type {type(dim_names)} for dim_names: True or a dict is expected")
        options = () if leaf is None else (leaf,)
        by_name = {n: dynamic_shapes_for(value, shapes, n, *options) for n, value in self.template.items()}
        variadic = self._variadic()
        extra = [name for name in by_name if name not in self.signature.names and name not in variadic]
        if self.positional and not variadic:
            return tuple(by_name.values())
        # The names of ``*args`` and ``**kwargs`` hold what they caught, as torch.export sees a call.
        nested: dict[str, Any] = {}
        for name, shape in by_name.items():
            if name in variadic:
                nested.setdefault(str(self.signature.var_positional), [])
            elif name in extra:
                nested.setdefault(str(self.signature.var_keyword), {})[self.signature.spelled(name)] = shape
            else:
                nested[name] = shape
        if variadic:
            nested[str(self.signature.var_positional)] = tuple(by_name[name] for name in variadic)
        order = {name: position for position, name in enumerate(self.signature.source.parameters)}
        return {name: nested[name] for name in sorted(nested, key=lambda name: order.get(name, len(order)))}

    # arguments

    def first_complete(self) -> RecordedCall | None:
        """The first call that has, with the stand-ins, every tensor of the interface."""
        return next((call for call in self.calls if not self._missing(call)), None)

    def fullest(self) -> RecordedCall:
        """The call that lacks least."""
        return min(self.calls, key=lambda call: len(self._missing(call)))

    def _missing(self, call: RecordedCall) -> list[str]:
        return [p for p in self._lacking(call) if root_of(p) not in self.stand_ins]

    def _lacking(self, call: RecordedCall) -> list[str]:
        have = call.shapes().leaves()
        return [path for path in self.tensor_paths() if not isinstance(have.get(path), torch.Tensor)]

    def export_safe(self, accepts: Callable[[tuple[Any, ...], dict[str, Any]], bool]) -> dict[str, Any]:
        """Arguments without sizes that torch.export takes for constants, if `accepts` likes them; copies."""

        def accepted(arguments: dict[str, Any]) -> bool:
            return accepts(*self.signature.call(arguments))

        try:
            example = choose_example(self.calls, self.shapes, accepted)
        except ObserveError as error:
            raise InferenceError(error.message, details=error.details) from error
        arguments = {name: example.arguments.get(name, self.template[name]) for name in self.template}
        risky = self.risky_sizes(arguments)
        if risky:
            warn(f"size 0 or 1 on a dynamic axis ({', '.join(risky[:4])}): {example.note}")
        return arguments

    def complete(self, given: Mapping[str, Any], call: RecordedCall | None = None) -> dict[str, Any]:
        """`given` by name, with what it lacks; copies.

        A missing tensor is zeros of the shape it has in the call that has it, with length 0 on its last
        dynamic axis; the sizes of a cache are those of `call`.
        """
        sizes = {} if call is None else self.shapes.sizes.get(call.index, {})
        made: list[str] = []
        completed = {}
        for name, best in self.template.items():
            value = given.get(name)
            if value is None and name in self.stand_ins:
                value = self.stand_ins[name]
            completed[name] = self._filled(name, best, value, sizes, made)
        # What the user gives counts, though no call had it.
        more = {
            name: value
            for name, value in (given.items() if call is None else ())
            if name not in completed and value is not None and not self._is_default(name, value)
        }
        if more:
            order = {name: place for place, name in enumerate([*self.signature.names, *completed, *more])}
            completed = dict(sorted({**completed, **more}.items(), key=lambda item: order[item[0]]))
        unsafe = [
            path for path in made if "cross_attention_cache" in path or not is_cache(given.get(root_of(path)))
        ]
        if unsafe:
            warn(
                f"{_shown(unsafe)} {'is' if len(unsafe) == 1 else 'are'} not among the inputs: made of "
                "zeros, with length 0 on the last dynamic axis; the model never saw this. Export with a "
                "call that has it, or give value_if_missing"
            )
        copied: dict[str, Any] = clone_tree(completed)
        return copied

    def _is_default(self, name: str, value: Any) -> bool:
        defaults = self.signature.defaults
        return name in defaults and is_constant(value) and same_constant(value, defaults[name])

    def _filled(self, name: str, best: Any, value: Any, sizes: Mapping[str, int], made: list[str]) -> Any:
        pairs = flatten_with_paths(best, name)
        have = {} if value is None else dict(flatten_with_paths(value, name))
        lacks = [
            path
            for path, leaf in pairs
            if isinstance(self.shapes.leaves.get(path), TensorLeaf)
            and not isinstance(have.get(path), torch.Tensor)
        ]
        if not lacks:
            return best if value is None else value
        known = dict(pairs)
        unknown = [path for path, leaf in have.items() if leaf is not None and path not in known]
        if unknown:
            # Filled in leaf by leaf, what has no place would be lost.
            raise ValueError(
                f"{unknown[0]} has no place in {name} as the calls have it ({_shown(list(known))})"
            )
        made.extend(lacks)
        leaves = [
            have[path]
            if have.get(path) is not None
            else self._empty(path, leaf, is_cache(best), sizes)
            if path in lacks
            else leaf
            for path, leaf in pairs
        ]
        _, spec = _pytree.tree_flatten(best)
        return _pytree.tree_unflatten(leaves, spec)

    def _empty(self, path: str, best: torch.Tensor, is_cache: bool, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = list(best.shape)
        leaf = self.shapes.leaves[path]
        assert isinstance(leaf, TensorLeaf)
        if leaf.dynamic:
            shape[max(leaf.dynamic)] = 0
        if is_cache:
            for axis, dim in leaf.dynamic.items():
                if all(name in sizes for name in dim.names):
                    shape[axis] = dim.evaluate(sizes)
        return blank(best, shape)

    def by_name(self, given: Any) -> dict[str, Any]:
        """A user's inputs by name: a dict by names or positions, a tuple by position.

        Raises
        ------
        ValueError
            It is neither, or the signature has no such argument.
        """
        if isinstance(given, Mapping):
            named = {argument_named(self.signature, key): value for key, value in given.items()}
            if len(named) < len(given):
                raise ValueError(f"an input is given twice: {list(given)}")
            check_names(named, self.signature, self.template)
            return named
        if isinstance(given, tuple):
            names = self.signature.positions(len(given))
            if len(names) < len(given):
                raise ValueError(f"{counted(len(given), 'input')} for {counted(len(names), 'argument')}")
            return dict(zip(names, given, strict=False))
        raise ValueError(f"Unexpected type {type(given)}: an index, a tuple or a dict of inputs is expected")

    def arrange(self, arguments: dict[str, Any], as_args_kwargs: bool, flat: bool) -> Any:
        """Arguments in the form of the calls; see `InputObserver.infer_arguments`."""
        if flat:
            leaves = {p: leaf for n, value in arguments.items() for p, leaf in flatten_with_paths(value, n)}
            return [leaves.get(path) for path in self.tensor_paths()]
        if self.positional:
            values = tuple(arguments.values())
            return (values, {}) if as_args_kwargs else values
        args, kwargs = self.signature.call(arguments)
        if as_args_kwargs:
            # What every call passed by position stays there.
            count = min((call.positional or 0 for call in self.calls), default=0)
            for name in self.signature.positions(count)[len(args) :]:
                if name not in kwargs:
                    break
                args = (*args, kwargs.pop(name))
            return args, kwargs
        if args:
            kind = "'*args'" if self._variadic() else "positional-only parameters"
            raise RuntimeError(
                "arguments passed by position and by name cannot be one tuple or one dict, because of the "
                f"{kind} in the signature: set as_args_kwargs=True"
            )
        return kwargs

    def _variadic(self) -> list[str]:
        names = self.signature.positions(len(self.template) + len(self.signature.before_variadic))
        return [name for name in self.template if name in names and name not in self.signature.names]

    # what a person should know

    def risky_sizes(self, arguments: Mapping[str, Any]) -> list[str]:
        """Dynamic axes of size 0 or 1, as text."""
        found = []
        for name, value in arguments.items():
            for path, leaf in flatten_with_paths(value, name):
                known = self.shapes.leaves.get(path)
                if isinstance(known, TensorLeaf) and isinstance(leaf, torch.Tensor):
                    found += [f"{path} axis {a}" for a in known.dynamic if leaf.shape[a] in (0, 1)]
        return found

    def notes(self) -> list[str]:
        """Why the shapes may not be what a person expects."""
        tensors = self.shapes.tensors()
        found = [*self.doubts]
        if tensors and not any(leaf.dynamic for leaf in tensors):
            count = len(self.shapes.sizes)
            why = "only one call was observed" if count == 1 else f"no size differs between {count} calls"
            found.append(
                f"{why}: every axis is static; observe calls of other sizes, or force batch dimensions"
            )
        else:
            static = [
                f"{leaf.path} axis 0"
                for leaf in tensors
                if leaf.dynamic and 0 not in leaf.dynamic and leaf.dims and leaf.dims[0] == 1
                and "." not in leaf.path
            ]  # fmt: skip
            if static:
                found.append(
                    f"{_shown(static)} had size 1 in every call and will be static: observe another size, "
                    "or give set_batch_dimension_for"
                )
        for leaf in self.shapes.leaves.values():
            if isinstance(leaf, ConstantLeaf) and not is_constant(leaf.value):
                kind = leaf.value.kind if isinstance(leaf.value, Unkept) else type(leaf.value)
                found.append(
                    f"argument {leaf.path} is a {kind.__module__}.{kind.__qualname__}: torch.export takes no "
                    "such input; register it with register_class_flattening, or bake it into the model"
                )
        return found


def _shown(items: Sequence[str], most: int = 4) -> str:
    text = ", ".join(items[:most])
    return text if len(items) <= most else f"{text} and {len(items) - most} more"


def infer_interface(
    info: InputObserverInfo,
    batch: bool | Collection[int | str],
    value_if_missing: Mapping[str | int, Any],
    removed: Collection[str],
) -> Interface:
    """What the recorded calls, and the shapes beyond the limit, need one graph to take.

    Raises
    ------
    InferenceError
        One graph cannot serve the recorded calls.
    """
    signature = info.signature
    assert signature is not None
    stand_ins = {argument_named(signature, key): value for key, value in value_if_missing.items()}
    kept = [call.edited({*removed, *_unset_flags(call, info)}) for call in info.calls]
    extra = [
        call.edited({*removed, *_unset_flags(call, info)}, index=len(kept) + position)
        for position, call in enumerate(info.shape_calls)
    ]
    every = with_defaults([*kept, *extra], signature.defaults)
    kept, extra = every[: len(kept)], every[len(kept) :]
    if isinstance(batch, str):
        batch = [batch]
    if not isinstance(batch, (bool, Collection)):
        raise TypeError(
            f"Unexpected type {type(batch)} for set_batch_dimension_for: True, or names or positions"
        )
    batch_names = batch if isinstance(batch, bool) else {argument_named(signature, item) for item in batch}
    if not isinstance(batch_names, bool):
        passed = [name for call in [*kept, *extra] for name in call.shapes().arguments]
        check_names(batch_names, signature, [*passed, *removed], strict=False)
    interface = _infer(kept, kept or extra, info, batch_names, stand_ins)
    by_keyword = {argument_named(signature, key) for key in value_if_missing if isinstance(key, str)}
    if kept and extra:
        fitting = list(kept)
        for call in extra:
            try:
                interface = _infer(kept, [*fitting, call], info, batch_names, stand_ins)
                fitting.append(call)
            except InferenceError as error:  # noqa: PERF203
                what = "a call beyond the limit does not fit the recorded ones and was left out"
                warn(f"{what}: {error.message}")
    if any(call.shapes().arguments.get(name) is None for name in by_keyword for call in kept):
        interface.positional = False
    if any(_leaves_a_gap(call, removed) for call in info.calls):
        interface.positional = False
    info.aligned = interface.tensor_paths()
    return interface


def _leaves_a_gap(call: RecordedCall, removed: Collection[str]) -> bool:
    """Whether a position is taken out from before another one, which would then move into its place."""
    names = list(call.shapes().arguments)[: call.positional or 0]
    kept = [name not in removed for name in names]
    return False in kept and True in kept[kept.index(False) :]


def _unset_flags(call: RecordedCall, info: InputObserverInfo) -> list[str]:
    """Flags of the config that a call passes as ``None``, by name: the model reads the config then."""
    by_name = list(call.shapes().arguments.items())[call.positional or 0 :]
    return [name for name, value in by_name if value is None and name in info.config_flags]


def _infer(
    kept: list[RecordedCall],
    calls: list[RecordedCall],
    info: InputObserverInfo,
    batch: bool | Collection[str],
    stand_ins: Mapping[str, Any],
) -> Interface:
    signature = info.signature
    assert signature is not None
    calls = [call.shapes() for call in calls]
    defaults = dict(signature.defaults)
    for name, value in info.config_flags.items():
        if defaults.get(name) is None:
            defaults[name] = value
    positional = not any(call.by_name for call in calls)
    names = dict.fromkeys(name for call in calls for name in call.arguments)

    def where(name: str) -> str:
        places = signature.positions(len(names) + len(signature.before_variadic))
        return f"Positional argument {places.index(name)}" if positional else f"Named argument {name!r}"

    for name in names:
        found = {call.index: call.arguments.get(name) for call in calls}
        given = {i: stand_ins.get(name) if value is None else value for i, value in found.items()}
        check_structure(where, name, given)
    try:
        shapes = infer_shapes(
            calls,
            signature_order=[*signature.names, *(n for n in stand_ins if n not in signature.names)],
            defaults=defaults,
            batch_dims=batch,
            value_if_missing=lambda name, _: stand_ins.get(name),
        )
    except ConstantsDiffer as error:
        raise InferenceError(
            f"Two calls were made with different constant values: {error.message}",
            details=["observe them apart, one observer for each value, or leave it out with remove_inputs"],
        ) from error
    except ObserveError as error:
        raise InferenceError(error.message, details=error.details) from error
    template = _template(shapes, signature, defaults, calls, positional)
    doubts = [
        text
        for name in template
        for text in differing_contexts(name, {call.index: call.arguments.get(name) for call in calls})
    ]
    return Interface(signature, shapes, template, positional, stand_ins, kept, doubts)


def _template(
    shapes: GraphShapes,
    signature: CallSignature,
    defaults: Mapping[str, Any],
    calls: Sequence[RecordedCall],
    positional: bool,
) -> dict[str, Any]:
    """The fullest value of each argument, in signature order, without constants that equal their default."""

    passed = dict.fromkeys(name for call in calls for name in call.arguments)
    required = {name for name in signature.names if name not in signature.defaults}
    required.update(signature.items(passed))

    def says_nothing(name: str, value: Any) -> bool:
        if value is None:
            # One of ``*args`` keeps its place; one that ``**kwargs`` caught is as good as none.
            return name not in required and signature.defaults.get(name) is None
        return name in defaults and is_constant(value) and same_constant(value, defaults[name])

    names = [name for name in signature.names if name in passed or name in shapes.template]
    names += [name for name in [*shapes.template, *passed] if name not in names]
    template = {name: shapes.template.get(name) for name in dict.fromkeys(names)}
    silent = {name for name, value in template.items() if says_nothing(name, value)}
    if positional:
        # A position before one that is needed stays.
        while template and next(reversed(template)) in silent:
            template.popitem()
        return template
    needed = {name: value for name, value in template.items() if name not in silent}
    before = signature.before(needed)
    if before:
        # What goes by position cannot be left out before another one.
        filled = {name: template.get(name, signature.defaults.get(name)) for name in before}
        needed = filled | {name: value for name, value in needed.items() if name not in filled}
    return needed
