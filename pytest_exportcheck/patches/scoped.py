"""Context managers of users as patches: what one sets in the model and does not put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
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
    """Enter `scope`; afterwards what it set in the model when it was entered is as before:
    attributes, entries of dicts, attributes of configurations, constants of its classes.

    What calls of the model change while it is active is not looked at.
    """
    holders = [] if model is None else list(_holders(model))
    before = [dict(holder.live) for holder in holders]
    changed: list[tuple[_Holder, Any, Any, Any]] = []
    try:
        with scope:
            for holder, was in zip(holders, before, strict=True):
                for attribute in was.keys() | holder.live.keys():
                    old, value = was.get(attribute, _ABSENT), holder.live.get(attribute, _ABSENT)
                    if not _same(old, value) and holder.watches(old, value):
                        changed.append((holder, attribute, old, value))
            yield
    finally:
        for holder, attribute, old, value in changed:
            if holder.now().get(attribute, _ABSENT) is not value:
                continue
            holder.put_back(attribute, old)
            how = "removed" if value is _ABSENT else f"changed ({_text(old)} to {_text(value)})"
            how = "added" if old is _ABSENT else how
            _taken_back.append(f"{holder.label}{attribute} was {how} by the patch {name}: put back")


def taken_back() -> list[str]:
    """What was put back since the last call."""
    found = list(dict.fromkeys(_taken_back))
    _taken_back.clear()
    return found


@dataclass(frozen=True)
class _Holder:
    """Where something of a model is held: the namespace of an object, or a dict, of a part of which it is the
    attribute `name`; of a class its `owner`.
    """

    label: str
    live: Mapping[Any, Any]
    part: torch.nn.Module | None = None
    name: str = ""
    owner: type | None = None

    def now(self) -> Mapping[Any, Any]:
        """An export puts copies of plain containers in the place of those that a model had."""
        held = None if self.part is None else _held(vars(self.part).get(self.name))
        return self.live if held is None else held

    def watches(self, *values: Any) -> bool:
        """Functions of classes, and hooks, are looked at around the whole case."""
        return self.owner is None or not any(
            value is not _ABSENT and (callable(value) or hasattr(value, "__get__")) for value in values
        )

    def put_back(self, attribute: Any, old: Any) -> None:
        if self.owner is not None:
            delattr(self.owner, attribute) if old is _ABSENT else setattr(self.owner, attribute, old)
        elif isinstance(held := self.now(), dict):
            if old is _ABSENT:
                del held[attribute]
            else:
                held[attribute] = old


def _holders(model: torch.nn.Module) -> Iterator[_Holder]:
    seen: set[int] = set()
    for path, part in model.named_modules():
        where = f"vars({path or 'model'}) "
        yield _Holder(where, vars(part))
        for name, value in vars(part).items():
            held = _held(value)
            if held is not None and not name.endswith("_hooks") and id(held) not in seen:
                seen.add(id(held))
                yield _Holder(f"{where}{name}.", held, part, name)
        for cls in type(part).__mro__:
            if cls.__module__.partition(".")[0] not in ("torch", "builtins") and id(cls) not in seen:
                seen.add(id(cls))
                yield _Holder(f"{cls.__module__}.{cls.__qualname__}.", vars(cls), owner=cls)


def _held(value: Any) -> dict[Any, Any] | None:
    """A dict itself, and the attributes of a plain object, such as a configuration."""
    if isinstance(value, dict):
        return value
    if callable(value) or isinstance(value, (torch.Tensor, ModuleType)):
        return None
    held = getattr(value, "__dict__", None)
    return held if type(held) is dict else None


_PLAIN = (bool, int, float, str, type(None))


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and bool(old == new))


def _text(value: Any) -> str:
    """Of a class of the user's the name alone: its ``repr`` may fail."""
    return f"{value!r:.40}" if isinstance(value, _PLAIN) else type(value).__name__
