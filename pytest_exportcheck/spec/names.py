"""Near-match suggestions, worded the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["choices", "suggest"]


def suggest(name: object, known: Iterable[object], cutoff: float = 0.6) -> str:
    """`` (did you mean 'model'?)`` if something in `known` looks like `name`, else an empty string."""
    import difflib

    candidates = {str(item).lower(): str(item) for item in known}
    close = difflib.get_close_matches(str(name).lower(), list(candidates), n=1, cutoff=cutoff)
    return f" (did you mean {candidates[close[0]]!r}?)" if close else ""


def choices(name: object, known: Iterable[object]) -> str:
    """A suggestion if one is close, else `` (known: a, b, c)``."""
    names = [str(item) for item in known]
    return suggest(name, names) or (f" (known: {', '.join(names)})" if names else "")
