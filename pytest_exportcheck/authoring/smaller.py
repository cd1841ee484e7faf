"""What the largest parameters of a model come from: values of its configuration that its rules left large."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .reduce import WIDTH, is_token_id

__all__ = ["shrunk"]

#: Values from here on are made small.
_LARGE = 256
#: A smaller one that a dimension is a multiple of (channels that double at each stage) is divided by this.
_DIVISOR = 16
#: So many times a value may go into a dimension.
_TIMES = 64
#: Of so many of the largest parameters one dimension is looked for.
_PARAMETERS = 8


def shrunk(
    config: Mapping[str, Any], values: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any] | None:
    """`values` with one that makes the largest parameter smaller; ``None``: no value explains any.

    Parameters
    ----------
    config:
        The configuration that `values` change.
    shapes:
        Shapes of the model's parameters.
    """
    integers = list(_integers(config, values, ()))
    for shape in sorted(shapes, key=math.prod, reverse=True)[:_PARAMETERS]:
        for size in sorted(shape, reverse=True):
            found = [
                (size // value, path, value)
                for path, value in integers
                if size % value == 0 and size // value <= _TIMES
            ]
            if size >= _LARGE and found:
                _, path, value = min(found)
                small = WIDTH if value >= _LARGE else max(2, value // _DIVISOR)
                return _with(values, config, path, small)
    return None


def _integers(
    config: Mapping[str, Any], values: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int]]:
    """(where, value) of every integer that may be a width, as `values` have it."""
    for key, default in config.items():
        value = values.get(key, default)
        if isinstance(default, Mapping):
            if "model_type" in default:
                inner = value if value is not default and isinstance(value, Mapping) else {}
                yield from _integers(default, inner, (*above, key))
        elif not isinstance(value, int) or isinstance(value, bool) or is_token_id(key):
            continue
        # A smaller one that the rules chose stays.
        elif value >= _LARGE or (value == default and value >= _DIVISOR):
            yield (*above, key), value


def _with(
    values: Mapping[str, Any], config: Mapping[str, Any], path: tuple[str, ...], small: int
) -> dict[str, Any]:
    made = copy.deepcopy(dict(values))
    inner, known = made, config
    for key in path[:-1]:
        known = known[key]
        inner = inner.setdefault(key, {"model_type": known["model_type"]})
    inner[path[-1]] = small
    return made
