"""What of a patch mode can reach the conversion of a captured program: only that keeps two of them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import PatchMode
from .engine import active_patches
from .modes import PatchList
from .none import NoPatches
from .patch import Patch

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


def parts_of(mode: PatchMode) -> dict[str, Any] | None:
    """The patches in place now, by name, and what each does; ``None`` for a mode that cannot tell."""
    if type(mode).apply not in (NoPatches.apply, PatchList.apply):
        return None
    return {
        patch.name: {
            "target": patch.target,
            "replacement": patch.replacement,
            "wraps": patch.wraps,
            "everywhere": patch.everywhere,
            "scope": patch.scope,
            "rewritten": None if patch.rewritten is None else patch.rewritten.func,
        }
        for patch in active_patches()
    }


def _is_of_models(patch: Patch) -> bool:
    return patch.target.startswith("transformers.") or patch.rewritten is not None
