"""A user's own patches as a mode: a dict, patched classes, patches, a context manager, or a mode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

from ..errors import PatchError
from ..spec.imports import UserCodeError, load_object
from .base import PatchMode
from .modes import PatchList
from .patch import Patch

__all__ = ["as_mode", "as_patches", "load_mode"]


def load_mode(reference: str, folder: Path) -> PatchMode:
    """The mode that ``file.py:name`` (next to the spec, in `folder`) or ``package.module:name`` stands for.

    Raises
    ------
    PatchError
        It cannot be imported, or is nothing that `as_mode` takes.
    """
    try:
        value = load_object(reference, folder, what_may_be=_may_be_modes)
    except UserCodeError as error:
        raise PatchError(f"patch mode {reference}: {error.message}", details=error.details) from None
    file = reference.partition(":")[0]
    return as_mode(reference, value, (folder / file).parent if file.endswith(".py") else None)


def _may_be_modes(module: ModuleType) -> list[str]:
    """Names in a module that it defines itself and that `as_mode` takes."""

    def own(value: Any) -> bool:
        return getattr(value, "__module__", None) == module.__name__

    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and _may_be_mode(value, own(value))
    ]


def _may_be_mode(value: Any, own: bool) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(key, str) and "." in key for key in value)
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_may_be_mode(item, True) for item in value)
    if isinstance(value, Patch):
        return True
    enters = hasattr(value, "__enter__") and hasattr(value, "__exit__")
    if isinstance(value, type):
        return own and (enters or _is_patched_class(value) or issubclass_of_mode(value))
    if inspect.isfunction(value):
        return own and inspect.isgeneratorfunction(inspect.unwrap(value))
    return enters or isinstance(value, PatchMode)


def as_mode(name: str, value: Any, folder: Path | None = None) -> PatchMode:
    """`value` as a patch mode called `name`.

    Parameters
    ----------
    value:
        A mode (an instance or a class), or anything that `as_patches` takes.
    folder:
        Where targets are looked up, too.

    Raises
    ------
    PatchError
        It is none of these; says what is accepted.
    """
    if isinstance(value, type) and not _is_patched_class(value) and issubclass_of_mode(value):
        value = value()
    if isinstance(value, PatchMode):
        return value
    patches = as_patches(value, name)
    return PatchList(name, [lambda model, target: patches], folder=folder)


def issubclass_of_mode(cls: type) -> bool:
    """Whether instances of `cls` look like modes."""
    return all(hasattr(cls, name) for name in ("apply", "before_convert", "after_convert"))


def as_patches(value: Any, name: str = "custom_patches") -> list[Patch]:
    """Patches from a user's statement of them.

    Parameters
    ----------
    value:
        * ``{"package.module.Class.method": replacement}``;
        * a class with ``_PATCHED_CLASS_`` (the class it patches) and ``_PATCHES_`` (names of its methods that
          take the place of that class's; ``None`` among them is passed over);
        * a `Patch`;
        * a context manager, or a callable that returns one and takes nothing, or the model;
        * a list of these, or a module, whose patched classes and patches are taken.
    name:
        What the value is called, in messages.
    """
    return list(_patches(value, name))


def _patches(value: Any, name: str) -> Iterator[Patch]:
    if isinstance(value, Patch):
        yield value
    elif isinstance(value, Mapping):
        for target, replacement in value.items():
            if not isinstance(target, str) or not target.rpartition(".")[0]:
                raise PatchError(f"{name}: {target!r} is no dotted path such as package.module.Class.method")
            if isinstance(replacement, Patch):
                yield replacement
                continue
            if not callable(replacement) and not isinstance(
                replacement, (staticmethod, classmethod, property)
            ):
                raise PatchError(
                    f"{name}: {target} is replaced by a {type(replacement).__name__}, no function"
                )
            yield Patch(target, replacement, why=_first_line(replacement))
    elif _is_patched_class(value):
        yield from _of_class(value, name)
    elif isinstance(value, ModuleType):
        own = [
            item
            for key, item in vars(value).items()
            if isinstance(item, Patch) or (_is_patched_class(item) and not key.startswith("_"))
        ]
        if not own:
            raise PatchError(
                f"{name}: module {value.__name__} has no class with _PATCHED_CLASS_ and no Patch"
            )
        yield from _patches(own, name)
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, type)):
        for item in value:
            yield from _patches(item, name)
    elif hasattr(value, "__enter__") and hasattr(value, "__exit__") and not isinstance(value, type):
        yield _scope(name, _again(value), value)
    elif callable(value):
        yield _scope(name, _with_model(value), value)
    else:
        raise PatchError(
            f"{name}: a {type(value).__name__} is no patches; expected a dict of dotted paths, classes with "
            "_PATCHED_CLASS_ and _PATCHES_, a context manager, a patch mode, or a list of these"
        )


def _is_patched_class(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "_PATCHED_CLASS_")


def _of_class(cls: Any, name: str) -> Iterator[Patch]:
    owner = cls._PATCHED_CLASS_
    if owner is None:
        return  # a class that these versions do not have
    if not isinstance(owner, type):
        raise PatchError(f"{name}: {cls.__name__}._PATCHED_CLASS_ is {owner!r}, neither a class nor None")
    methods = getattr(cls, "_PATCHES_", None)
    if not isinstance(methods, Iterable) or isinstance(methods, str):
        # Without it the mode would change nothing and look like one that does.
        raise PatchError(f"{name}: {cls.__name__} needs _PATCHES_, a list of names of its methods")
    for method in methods:
        if method is None:
            continue
        replacement = inspect.getattr_static(cls, method, None)
        if replacement is None:
            raise PatchError(f"{name}: {cls.__name__}._PATCHES_ names {method!r}, which {cls.__name__} lacks")
        yield Patch(
            f"{owner.__module__}.{owner.__qualname__}.{method}",
            _of_owner(replacement, cls, owner),
            why=_first_line(replacement) or _first_line(cls),
            link=str(getattr(cls, "_PATCHED_PR_", "")),
            owner=owner,
        )


def _of_owner(replacement: Any, cls: type, owner: type) -> Any:
    """A method of `cls` whose ``super()`` and ``__class__`` mean those of the class that it is put into."""
    if isinstance(replacement, (staticmethod, classmethod)):
        return type(replacement)(_of_owner(replacement.__func__, cls, owner))
    closure = getattr(replacement, "__closure__", None)
    if not isinstance(replacement, FunctionType) or not closure:
        return replacement
    names = replacement.__code__.co_freevars
    if "__class__" not in names or closure[names.index("__class__")].cell_contents is not cls:
        return replacement
    cells = tuple(CellType(owner) if n == "__class__" else c for n, c in zip(names, closure, strict=True))
    made = FunctionType(
        replacement.__code__,
        replacement.__globals__,
        replacement.__name__,
        replacement.__defaults__,
        cells,
    )
    made.__kwdefaults__ = replacement.__kwdefaults__
    return functools.update_wrapper(made, replacement, updated=("__dict__",))


def _scope(name: str, enter: Callable[[Any], AbstractContextManager[Any]], value: Any) -> Patch:
    shown = getattr(value, "__qualname__", type(value).__name__)
    own = name == shown or name.endswith((f":{shown}", f".{shown}"))
    return Patch(
        f"context manager {shown}",
        scope=enter,
        why=_first_line(value),
        name=name if own else f"{name}.{shown}",
    )


def _again(manager: Any) -> Callable[[Any], AbstractContextManager[Any]]:
    """What `contextlib.contextmanager` made is entered once, a mode many times: it is made anew, as where it
    serves as a decorator.
    """
    made_anew = getattr(manager, "_recreate_cm", None)
    return (lambda model: manager) if made_anew is None else (lambda model: made_anew())


def _with_model(function: Callable[..., Any]) -> Callable[[Any], AbstractContextManager[Any]]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    takes = any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )

    def enter(model: Any) -> AbstractContextManager[Any]:
        made = function(model) if takes else function()
        if not hasattr(made, "__enter__"):
            raise PatchError(f"{function!r} returned a {type(made).__name__}, which is no context manager")
        return made  # type: ignore[no-any-return]

    return enter


def _first_line(value: Any) -> str:
    value = getattr(value, "__func__", value)
    text = (inspect.getdoc(value) or "") if inspect.isroutine(value) or isinstance(value, type) else ""
    return text.strip().partition("\n")[0]
