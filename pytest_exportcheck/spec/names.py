"""Near-match suggestions, worded the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["choices", "is_typo", "suggest"]

#: From this likeness on an unknown name is a mistyped one: a lost letter leaves 0.9 of a long name, while
#: `torch-deferred`, a good name for an exporter of somebody's own, has 0.6 of `torch-export`.
_TYPO = 0.8
_LIKE = 0.6

#: Other words for what we know, and for what the field knows by them.
_SYNONYMS = {
    "gpu": ("cuda",),
    "half": ("float16",),
    "single": ("float32",),
    "double": ("float64",),
    "float": ("float32",),
    "long": ("int64",),
    "int": ("int64",),
    "jit": ("onnx-torchscript",),
    "legacy": ("onnx-torchscript",),
    "opset": ("opset_version",),
    **{f"fp{bits}": (f"float{bits}",) for bits in (16, 32, 64)},
    "bf16": ("bfloat16",),
}

#: Shorter names are part of too many others.
_PART = 3


def suggest(name: object, known: Iterable[object]) -> str:
    """`` (did you mean 'model'?)`` if something in `known` looks like `name`, else an empty string.

    Beside mistyped names: words of the field for the same thing (``gpu``, ``fp16``), and names that were cut
    off (``onnx``: ``onnx-dynamo`` or ``onnx-torchscript``).
    """
    text = str(name).lower()
    candidates = {str(item).lower(): str(item) for item in known}
    found = [word for word in _SYNONYMS.get(text, ()) if word in candidates]
    found = found or _alike(text, list(candidates), _LIKE) or _with_part(text, candidates)
    shown = " or ".join(repr(candidates[word]) for word in found[:3])
    return f" (did you mean {shown}?)" if found else ""


def is_typo(name: object, known: Iterable[object]) -> bool:
    """Whether `name` is so near to one of `known` that nothing else can be meant."""
    return bool(_alike(str(name).lower(), [str(item).lower() for item in known], _TYPO))


def choices(name: object, known: Iterable[object]) -> str:
    """A suggestion if one is close, else `` (known: a, b, c)``."""
    names = [str(item) for item in known]
    return suggest(name, names) or (f" (known: {', '.join(names)})" if names else "")


def _alike(text: str, known: Sequence[str], cutoff: float) -> list[str]:
    import difflib

    return difflib.get_close_matches(text, known, n=1, cutoff=cutoff)


def _with_part(text: str, known: Iterable[str]) -> list[str]:
    """Those that begin with the word `text`, else those that have it elsewhere."""
    if len(text) < _PART:
        return []
    words = {each: re.split(r"[-_.:]", each) for each in known}
    first = [each for each, parts in words.items() if parts[0] == text]
    return first or [each for each, parts in words.items() if text in parts]
