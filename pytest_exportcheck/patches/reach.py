"""What of a patch mode can reach the conversion of a captured program: only that keeps two of them apart."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from .base import PatchMode
from .engine import active_patches
from .modes import PatchList
from .none import NoPatches
from .patch import MODELING, Patch

__all__ = ["Reach", "parts_of", "reach_of"]

#: Whose version, or source, tells what their functions do.
_KNOWN = ("pytest_exportcheck", "transformers")


@dataclass(frozen=True)
class Reach:
    """What a mode may change in a conversion.

    Attributes
    ----------
    values:
        Equal for two modes that change the same.
    text:
        The same for another process; ``None`` for what has no such text: a function of the user's.
    """

    values: tuple[Any, ...] = ()
    text: str | None = ""


def reach_of(mode: PatchMode, *, custom_operators: bool) -> Reach | None:
    """The reach of the patches that are in place now; ``None`` for a mode of which it cannot be told.

    The conversion works on operators and calls no code of the model: patches of transformers, and rewritten
    methods, cannot change it.

    Parameters
    ----------
    custom_operators:
        The program has operators that are not torch's: their code may call anything.
    """
    if type(mode).apply not in (NoPatches.apply, PatchList.apply):
        return None
    patches = [patch for patch in active_patches() if custom_operators or not _is_of_models(patch)]
    hooks = [
        function
        for name in ("before_convert", "after_convert")
        if (function := getattr(type(mode), name)) is not getattr(NoPatches, name)
    ]
    hooks += [vars(mode)[name] for name in ("before_convert", "after_convert") if name in vars(mode)]
    functions = [*hooks, *(patch.scope or patch.replacement for patch in patches)]
    names = [f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', '')}" for f in functions]
    known = all(name.partition(".")[0] in _KNOWN for name in names)
    return Reach(
        # Two instances may differ in what their hooks do.
        (*patches, *([mode] if hooks else [])),
        "\n".join([*(patch.name for patch in patches), *names]) if known else None,
    )


def parts_of(mode: PatchMode, model: torch.nn.Module) -> dict[str, Any] | None:
    """The patches in place now, by name, and what each does; ``None`` for a mode that cannot tell.

    Those that transformers has for modules of other models than `model` are left out: they are in place if
    anything has imported such a module, which says what ran before.
    """
    if type(mode).apply not in (NoPatches.apply, PatchList.apply):
        return None
    patches = active_patches()
    # Looked for only where a patch asks: it takes milliseconds.
    reached = _modules_reached(model) if any(map(_module_of_another, patches)) else None
    return {
        patch.name: {
            "target": patch.target,
            "replacement": patch.replacement,
            "wraps": patch.wraps,
            "everywhere": patch.everywhere,
            "scope": patch.scope,
            "rewritten": None if patch.rewritten is None else patch.rewritten.func,
        }
        for patch in patches
        if reached is None or _module_of_another(patch) in (None, *reached)
    }


def _module_of_another(patch: Patch) -> str | None:
    """The module of a model that a patch of transformers' own is for; ``None`` for all other patches."""
    found = MODELING.match(patch.target)
    own = str(getattr(patch.replacement, "__module__", "")).partition(".")[0] == "transformers"
    return found.group(0) if found is not None and own else None


def _modules_reached(model: torch.nn.Module) -> set[str] | None:
    """Modules of models of transformers that the code of `model` is in, or names something of; ``None``: any,
    where its code may ask transformers for them.
    """
    stack = [cls.__module__ for part in model.modules() for cls in type(part).__mro__]
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        top = name.partition(".")[0]
        if name in seen or top in ("torch", "builtins", "typing") or name not in sys.modules:
            continue
        seen.add(name)
        if top == "transformers" and MODELING.match(name) is None:
            continue  # It serves all models, and has names of none but in passing.
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] == "transformers" and top != "transformers":
                    return None
                stack.append(value.__name__)
            else:
                kind = value if isinstance(value, (type, FunctionType)) else type(value)
                stack.append(str(kind.__module__))
    return {found.group(0) for name in seen if (found := MODELING.match(name)) is not None}


def _is_of_models(patch: Patch) -> bool:
    return patch.target.startswith("transformers.") or patch.rewritten is not None
