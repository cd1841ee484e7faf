"""Context managers of users as patches: attributes of the model that one sets and does not put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["entered", "taken_back"]

_ABSENT: Any = object()

#: What was put back since it was last asked for: a sentence each.
_taken_back: list[str] = []


@contextlib.contextmanager
def entered(
    scope: contextlib.AbstractContextManager[Any], model: torch.nn.Module | None, name: str
) -> Iterator[None]:
    """Enter `scope`; afterwards the attributes of the model that it set when it was entered are as before.

    What calls of the model change while it is active is not looked at.
    """
    before = _attributes(model)
    changed: dict[tuple[str, str], tuple[dict[str, Any], Any, Any]] = {}
    try:
        with scope:
            after = _attributes(model)
            for key in before.keys() | after.keys():
                held = (before.get(key) or after[key])[0]
                old, value = (found[key][1] if key in found else _ABSENT for found in (before, after))
                if not _same(old, value):
                    changed[key] = held, old, value
            yield
    finally:
        for (path, attribute), (held, old, value) in changed.items():
            now = held.get(attribute, _ABSENT)
            if now is not value:
                continue
            if old is _ABSENT:
                del held[attribute]
            else:
                held[attribute] = old
            was = "removed" if value is _ABSENT else f"changed ({_text(old)} to {_text(value)})"
            was = "added" if old is _ABSENT else was
            _taken_back.append(f"vars({path or 'model'}) {attribute} was {was} by the patch {name}: put back")


def taken_back() -> list[str]:
    """What was put back since the last call."""
    found = list(dict.fromkeys(_taken_back))
    _taken_back.clear()
    return found


def _attributes(model: torch.nn.Module | None) -> dict[tuple[str, str], tuple[dict[str, Any], Any]]:
    """(part, attribute) -> (where it is held, value); dicts of parts are looked at elsewhere."""
    if model is None:
        return {}
    return {
        (path, name): (vars(part), value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if not isinstance(value, dict)
    }


_PLAIN = (bool, int, float, str, type(None))


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and bool(old == new))


def _text(value: Any) -> str:
    """Of a class of the user's the name alone: its ``repr`` may fail."""
    return f"{value!r:.40}" if isinstance(value, _PLAIN) else type(value).__name__
