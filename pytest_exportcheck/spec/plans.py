"""The calls of a spec, ready to run: their inputs are built, and earlier outputs are filled in when run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import LoadError, ObserveError
from .build import pretrained_folder
from .fill import accepted, resolve_tensor
from .imports import UserCodeError, call_user, load_callable, sibling_imports
from .model import ModelSpec
from .names import choices
from .seeding import seeded, stable_seed
from .tensors import TensorSpec
from .values import CallSpec, Previous

if TYPE_CHECKING:
    import torch

__all__ = ["CallPlan", "build_calls"]

#: transformers renames the argument and output `past_key_values` to `cache`; a spec may use either name.
_ALIASES = {"cache": "past_key_values", "past_key_values": "cache"}

#: Parameters by which a user's callable may ask for more.
_OFFERED = ("model", "device", "dtype", "folder")


@dataclass(frozen=True)
class CallPlan:
    """One call.

    Attributes
    ----------
    index:
        Position in the spec, from 0.
    kind:
        ``forward`` (the observed method), ``generate``, or ``custom`` (a user's callable calls the model).
    place:
        Of the call in the spec: ``model_specs/llama.yaml:14:7``.
    run:
        ``run(model, previous)`` makes the call and returns its output; `previous` is the output of the plan
        before this one. It may be called again: each run gets fresh copies of the same inputs. What the
        model raises is not wrapped.
    """

    index: int
    kind: Literal["forward", "generate", "custom"]
    place: str
    run: Callable[[torch.nn.Module, Any], Any]


def build_calls(
    spec: ModelSpec, device: str, dtype: str, model: torch.nn.Module | None = None
) -> list[CallPlan]:
    """Build the inputs of every call of `spec`.

    Parameters
    ----------
    spec:
        The spec.
    device:
        Where inputs go: ``cpu``, ``cuda`` or ``cuda:1``.
    dtype:
        Name of the dtype of the case.
    model:
        Given to a ``calls`` callable that has an optional parameter `model`.

    Raises
    ------
    ObserveError
        An input cannot be built; the message names the line of the spec.
    """
    import torch

    builder = _Builder(spec, torch.device(device), getattr(torch, dtype), model)
    if isinstance(spec.observe.calls, str):
        return builder.from_callable(spec.observe.calls)
    return [builder.plan(index, call) for index, call in enumerate(spec.observe.calls)]


class _Builder:
    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, model: torch.nn.Module | None
    ) -> None:
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.model = model

    # -- calls written in the spec

    def plan(self, index: int, call: CallSpec) -> CallPlan:
        where = ("observe", "calls", index)
        place = self._place_of_call(*where)
        if call.kind == "call":
            function = self.user(str(call.ref), *where, call.kind)
            return CallPlan(index, "custom", place, self.custom(function, str(call.ref), index))
        args, kwargs = self.inputs(call, index)
        kind: Literal["forward", "generate"] = "generate" if call.kind == "generate" else "forward"
        method = "generate" if kind == "generate" else self.spec.observe.method
        return CallPlan(index, kind, place, self.runner(method, args, kwargs, index))

    def _place_of_call(self, *where: Any) -> str:
        return f"{self.spec.place(*where)}:{self.spec.location(*where)[1]}"

    def inputs(self, call: CallSpec, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        where = ("observe", "calls", index, call.kind)

        def build(value: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, TensorSpec):
                key = "/".join([str(self.spec.model.seed), f"call {index}", *map(str, path)])
                try:
                    return resolve_tensor(value, call.dims, key, self.device, self.dtype)
                except ObserveError as error:
                    message = f"{self.place(where, path)}: {error.message}"
                    raise ObserveError(message, details=error.details) from error
            if isinstance(value, list | tuple):
                return type(value)(build(item, (*path, at)) for at, item in enumerate(value))
            if isinstance(value, dict):
                return {name: build(item, (*path, name)) for name, item in value.items()}
            return value

        args = tuple(build(value, (at,)) for at, value in enumerate(call.args))
        return args, {name: build(value, (name,)) for name, value in call.kwargs.items()}

    def place(self, where: tuple[Any, ...], path: tuple[Any, ...]) -> str:
        head = "kwargs" if path and isinstance(path[0], str) else "args"
        # {args: .., kwargs: ..} adds a level of its own.
        level = (*where, head) if self.spec.in_file(*where, head, *path) else where
        return self.spec.place(*level, *path)

    def runner(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], index: int
    ) -> Callable[[torch.nn.Module, Any], Any]:
        import torch

        place = self.spec.place("observe", "calls", index)
        seed = stable_seed(f"{self.spec.model.seed}/call {index}")
        needs_previous = _has_previous((args, kwargs))

        def run(model: torch.nn.Module, previous: Any) -> Any:
            # Copies in one go, so that one tensor given twice stays one; a model may write into its inputs.
            own_args, own_kwargs = copy.deepcopy((args, kwargs))
            if needs_previous:
                own_args, own_kwargs = _fill_previous((own_args, own_kwargs), previous, place)
            # The module itself is called where possible, so that its hooks run.
            function = model if method == "forward" else getattr(model, method)
            with torch.no_grad(), seeded(seed, self.device):
                return function(*own_args, **_as_called(getattr(model, method), own_kwargs))

        return run

    # -- calls made by user code

    def user(self, ref: str, *where: Any) -> Callable[..., Any]:
        try:
            return load_callable(ref, self.spec.folder)
        except UserCodeError as error:
            raise ObserveError(
                f"{self.spec.place(*where)}: {error.message}", details=error.details
            ) from error

    def offered(self, model: torch.nn.Module | None) -> dict[str, Any]:
        try:
            folder: Path | None = pretrained_folder(self.spec)
        except (UserCodeError, LoadError):
            folder = None
        values = (model, self.device, self.dtype, folder)
        return dict(zip(_OFFERED, values, strict=True))

    def custom(
        self, function: Callable[..., Any], ref: str, index: int
    ) -> Callable[[torch.nn.Module, Any], Any]:
        import torch

        seed = stable_seed(f"{self.spec.model.seed}/call {index}")
        wants_model = _model_parameter(function)

        def run(model: torch.nn.Module, previous: Any) -> Any:
            optional = accepted(function, self.offered(model))
            args: tuple[torch.nn.Module, ...] = ()
            if wants_model is not None:
                optional.pop(wants_model, None)
                args = (model,)
            with torch.no_grad(), seeded(seed, self.device), sibling_imports(self.spec.folder):
                return function(*args, **optional)

        return run

    def from_callable(self, ref: str) -> list[CallPlan]:
        where = ("observe", "calls")
        place, of_call = self.spec.place(*where), self._place_of_call(*where)
        function = self.user(ref, *where)
        if _model_parameter(function) is not None:
            return [CallPlan(0, "custom", of_call, self.custom(function, ref, 0))]
        try:
            with seeded(stable_seed(f"{self.spec.model.seed}/calls"), self.device):
                optional = accepted(function, self.offered(self.model))
                calls = call_user(function, ref, self.spec.folder, **optional)
        except UserCodeError as error:
            raise ObserveError(f"{place}: {error.message}", details=error.details) from error
        if not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
            raise ObserveError(f"{place}: {ref} must return a list of (args, kwargs), got {_shown(calls)}")
        plans = []
        for index, call in enumerate(calls):
            if not (
                isinstance(call, tuple | list)
                and len(call) == 2
                and isinstance(call[0], tuple | list)
                and isinstance(call[1], Mapping)
            ):
                raise ObserveError(
                    f"{place}: {ref}: item {index} is not (args, kwargs), it is {_shown(call)}"
                )
            seen: dict[int, Any] = {}
            args = tuple(self.move(value, seen) for value in call[0])
            kwargs = {str(name): self.move(value, seen) for name, value in call[1].items()}
            run = self.runner(self.spec.observe.method, args, kwargs, index)
            plans.append(CallPlan(index, "forward", of_call, run))
        return plans

    def move(self, value: Any, seen: dict[int, Any]) -> Any:
        """A user's tensors on the device of the case; floating ones in its dtype unless that is float32.

        `seen` maps the ids of objects to their moved copies, so that one tensor given twice stays one.
        """
        if id(value) not in seen:
            # The original is kept alive too: its id must not be given to another object.
            seen[id(value)] = (self._moved(value, seen), value)
        return seen[id(value)][0]

    def _moved(self, value: Any, seen: dict[int, Any]) -> Any:
        import torch

        def move(item: Any) -> Any:
            return self.move(item, seen)

        if isinstance(value, torch.Tensor):
            cast = value.is_floating_point() and self.dtype is not torch.float32
            return value.detach().to(self.device, self.dtype if cast else value.dtype)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(move, value))
        if type(value) in (list, tuple):
            return type(value)(map(move, value))
        if type(value) is dict:
            return {name: move(item) for name, item in value.items()}
        if isinstance(value, torch.nn.Module | type) or not hasattr(value, "__dict__"):
            return value
        if not _holds_tensors(value):
            return value
        # Caches, dataclasses, processor outputs: a shallow copy with its attributes moved. No registration
        # of pytrees is needed for it, and none is made.
        moved = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(moved, name, move(item))
        if isinstance(moved, dict):
            for name, item in list(moved.items()):
                dict.__setitem__(moved, name, move(item))
        return moved


def _as_called(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with the cache under the name that `method` has for it: ``**kwargs`` swallows the other."""
    if not kwargs.keys() & _ALIASES.keys():
        return kwargs
    try:
        known = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return kwargs

    def name_in(name: str) -> str:
        other = _ALIASES.get(name, name)
        return other if other in known and name not in known and other not in kwargs else name

    return {name_in(name): value for name, value in kwargs.items()}


def _holds_tensors(value: Any, depth: int = 6) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, str | bytes | type):
        return False
    items: list[Any] = []
    if isinstance(value, Mapping):
        items += value.values()
    elif isinstance(value, list | tuple):
        items += value
    if hasattr(value, "__dict__"):
        items += vars(value).values()
    return any(_holds_tensors(item, depth - 1) for item in items)


def _model_parameter(function: Callable[..., Any]) -> str | None:
    """The one required parameter that is to get the model; None if the callable needs nothing of us.

    A required parameter with a name that we offer anyway (`device`, `dtype`, `folder`) is not it.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in variadic
        if required and parameter.name not in ("device", "dtype", "folder"):
            return parameter.name
    return None


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def _has_previous(value: Any) -> bool:
    if isinstance(value, Previous):
        return True
    if isinstance(value, dict):
        return any(map(_has_previous, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_previous, value))


def _fill_previous(value: Any, previous: Any, place: str) -> Any:
    if isinstance(value, Previous):
        return copy.deepcopy(_lookup(value, previous, place))
    if type(value) in (list, tuple):
        return type(value)(_fill_previous(item, previous, place) for item in value)
    if type(value) is dict:
        return {name: _fill_previous(item, previous, place) for name, item in value.items()}
    return value


def _lookup(reference: Previous, output: Any, place: str) -> Any:
    current, passed = output, "previous"
    for part in reference.path:
        found = _field(current, part)
        if found is None and isinstance(part, str) and part in _ALIASES:
            found = _field(current, _ALIASES[part])
        if found is None:
            names = _names(current)
            there = "is None" if part in names else f"is not there{choices(part, names[:20])}"
            if part in names and part in _ALIASES:
                there += " (does the previous call have use_cache: true?)"
            raise ObserveError(
                f"{place}: '{reference.text}': {passed}.{part} {there}; "
                f"{passed} is a {type(current).__name__}"
            )
        current, passed = found, f"{passed}.{part}"
    return current


def _field(value: Any, part: str | int) -> Any:
    """A key, an item or an attribute; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(part, getattr(value, part, None) if isinstance(part, str) else None)
    if isinstance(part, int):
        try:
            return value[part]
        except (TypeError, IndexError, KeyError):
            return None
    return getattr(value, part, None)


def _names(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return (
            [*value, *(name for name in vars(value) if name not in value)]
            if hasattr(value, "__dict__")
            else [*value]
        )
    if hasattr(value, "__dict__"):
        return [name for name in vars(value) if not name.startswith("_")]
    return list(range(len(value))) if isinstance(value, list | tuple) else []
