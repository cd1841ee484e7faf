"""Do the patches still fit what is installed? Source, signature and versions of every target, kept in a file.

A target that is gone, or a parameter that a replacement would drop, is an error; a body that changed is a
warning, with what changed: the patch was written against another text.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import hashlib
import inspect
import json
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import PatchError
from .patch import MISSING, Patch, name_of, nearest, resolve

__all__ = [
    "LOCK",
    "Finding",
    "diff_of",
    "lint",
    "lock_of",
    "read_lock",
    "source_of",
    "why_gone",
    "write_lock",
]

#: The lock of our own modes and of ``hf``.
LOCK = Path(__file__).with_name("lock.json")

_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Finding:
    """One thing that `lint` says of a patch; `level` is ``error`` or ``warning``."""

    level: str
    mode: str
    name: str
    message: str
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.level}: {self.mode}: {self.name}: {self.message}",
                *(f"    {line}" for line in self.details),
            ]
        )


def source_of(value: Any) -> str:
    """Source of a function or class without its indentation, ``""`` for what has none (a builtin)."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(value)))
    except (OSError, TypeError):
        return ""


def _parameters(value: Any) -> dict[str, inspect.Parameter] | None:
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    try:
        return dict(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None


def _text(parameters: dict[str, inspect.Parameter] | None) -> list[str] | None:
    """Names in order, ``*args`` as such; annotations and defaults are the body's matter."""
    if parameters is None:
        return None
    stars: dict[Any, str] = dict(zip(_KINDS, ("*", "**"), strict=True))
    return [stars.get(parameter.kind, "") + name for name, parameter in parameters.items()]


def lock_of(modes: Iterable[tuple[str, Sequence[Patch]]]) -> dict[str, Any]:
    """What `write_lock` writes for the patches of each mode: plain builtins."""
    entries: dict[str, dict[str, Any]] = {}
    for mode, patches in modes:
        for patch in patches:
            if patch.scope is not None:
                continue
            original = _original(patch)
            if original is MISSING:
                continue
            source = source_of(original)
            now = _parameters(original)
            entries.setdefault(mode, {})[patch.name] = {
                "target": patch.target,
                "parameters": _text(now),
                "dropped": _dropped(patch, now, _parameters(_replacement(patch, original)), None),
                "sha256": _hash(source) if source else None,
                "source": _pack(source),
                "depends": {path: _pack(_source_at(path)) for path in patch.depends},
            }
    return {"schema": 1, "versions": _versions(), "modes": entries}


def _source_at(path: str) -> str:
    try:
        return source_of(resolve(path)[2])
    except PatchError:
        return ""


def _original(patch: Patch) -> Any:
    try:
        return resolve(patch.target, patch.owner)[2]
    except PatchError:
        return MISSING


def _replacement(patch: Patch, original: Any) -> Any:
    if not patch.wraps:
        return patch.replacement
    try:
        return patch.replacement(original)
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(
            f"patch {patch.target}: its factory raises {type(error).__name__}: {error}"
        ) from error


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers", "onnxscript"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _pack(source: str) -> str:
    return base64.b85encode(zlib.compress(source.encode(), 9)).decode() if source else ""


def _unpack(packed: str) -> str:
    return zlib.decompress(base64.b85decode(packed)).decode() if packed else ""


def write_lock(path: Path, lock: dict[str, Any]) -> None:
    """Write a lock, one entry a line so that a diff names the target that changed."""
    lines = [f'{{"schema": {lock["schema"]}, "versions": {json.dumps(lock["versions"])}, "modes": {{']
    modes = lock["modes"]
    for position, (mode, entries) in enumerate(sorted(modes.items())):
        lines.append(f"{json.dumps(mode)}: {{")
        rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
        lines += [row + ("," if index + 1 < len(rows) else "") for index, row in enumerate(rows)]
        lines.append("}" + ("," if position + 1 < len(modes) else ""))
    path.write_text("\n".join([*lines, "}}"]) + "\n", encoding="utf-8")


def read_lock(path: Path) -> dict[str, Any]:
    """A lock from a file; an empty one if there is none. `PatchError` if the file is no lock."""
    if not path.exists():
        return {"schema": 1, "versions": {}, "modes": {}}
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(lock, dict) or lock.get("schema") != 1:
            raise ValueError("schema is not 1")
        if not _texts_by_name(lock.get("versions")) or not isinstance(lock.get("modes"), dict):
            raise ValueError("it has no versions or no modes")
        for mode, entries in lock["modes"].items():
            for name in entries if isinstance(entries, dict) else [""]:
                if not name or not _is_entry(entries[name]):
                    raise ValueError(f"what it has of {f'{mode}: {name}' if name else mode} is damaged")
    except (OSError, ValueError) as error:
        raise PatchError(
            f"{path} is no lock of patches: {error}; delete it, and write it again with --update-lock"
        ) from error
    return lock


def _is_entry(entry: Any) -> bool:
    """Whether `entry` is what `lock_of` writes, and its source is the text whose hash it has."""
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        return False
    lists = [entry.get("dropped", []), [] if entry.get("parameters") is None else entry["parameters"]]
    if not all(isinstance(one, list) and all(isinstance(x, str) for x in one) for one in lists):
        return False
    depends = entry.get("depends", {})
    if not _texts_by_name(depends):
        return False
    try:
        texts = [_unpack(packed) for packed in (entry["source"], *depends.values())]
    except (ValueError, zlib.error):
        return False
    return entry.get("sha256") == (_hash(texts[0]) if texts[0] else None)


def _texts_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def why_gone(patch: Patch) -> str:
    """Why there is no target, with the nearest name; ``""`` where there is one."""
    try:
        owner, attribute, original = resolve(patch.target, patch.owner)
    except PatchError as error:
        return error.message.removeprefix(f"patch {patch.target}: ")
    return f"{name_of(owner)} has no {attribute!r}{nearest(owner, attribute)}" if original is MISSING else ""


def lint(mode: str, patches: Sequence[Patch], lock: dict[str, Any]) -> list[Finding]:
    """What is wrong with the patches of a mode, against what is installed and against the lock."""
    known = lock["modes"].get(mode, {})
    found = []
    for patch in patches:
        if patch.scope is None and not patch.rests():
            found += list(_lint_one(mode, patch, known.get(patch.name), lock["versions"]))
    names = {patch.name for patch in patches}
    found += [
        Finding("warning", mode, name, "is in the lock and no longer a patch: write the lock again")
        for name in known
        if name not in names
    ]
    return found


def _lint_one(mode: str, patch: Patch, known: Any, versions: dict[str, str]) -> Iterable[Finding]:
    def finding(level: str, message: str, details: Sequence[str] = ()) -> Finding:
        return Finding(level, mode, patch.name, message, tuple(details))

    if gone := why_gone(patch):
        yield finding("error", gone)
        return
    original = _original(patch)
    try:
        replacement = _replacement(patch, original)
    except PatchError as error:
        yield finding("error", error.message.removeprefix(f"patch {patch.target}: "))
        return
    now = _parameters(original)
    if known is None:
        yield finding("warning", "is not in the lock: write it with --update-lock")
    taken = _parameters(replacement)
    dropped = _dropped(patch, now, taken, known)
    # What was dropped when the lock was written was accepted with it (a registry that is not ours).
    accepted = set(known.get("dropped", ())) if known else set()
    if dropped:
        yield finding(
            "warning" if accepted.issuperset(dropped) else "error",
            f"the replacement does not take {', '.join(dropped)}, which the target has",
            [
                f"target:      ({', '.join(_text(now) or ())})",
                f"replacement: ({', '.join(_text(taken) or ())})",
                *_broken_calls(dropped, now or {}, taken or {}),
                "where a model makes such a call, change the patch; elsewhere there is nothing to do",
            ],
        )
    if needed := _needed(now or {}, taken or {}):
        yield finding(
            "error",
            f"the replacement needs {', '.join(needed)}, which the target has not: every call of the target "
            "is a TypeError while the mode is active",
        )
    if known is None:
        return
    before, current = known.get("parameters"), _text(now)
    if before is not None and current is not None:
        lost = [name for name in before if name not in current]
        if lost:
            yield finding(
                "error", f"the target no longer takes {', '.join(lost)}, which it did {_when(versions)}"
            )
    source = source_of(original)
    if known.get("sha256") and _hash(source) != known["sha256"]:
        yield finding(
            "warning",
            f"the target is another text than {_when(versions)}: see whether the patch still fits",
            _diff(_unpack(known["source"]), source, "locked", "installed"),
        )
    for path, changes in _changed_depends(known):
        yield finding(
            "warning", f"{path}, which it counts on, is another text than {_when(versions)}", changes
        )


def _changed_depends(known: Any) -> Iterable[tuple[str, list[str]]]:
    for path, packed in known.get("depends", {}).items():
        before, now = _unpack(packed), _source_at(path)
        if before != now:
            yield path, _diff(before, now, "locked", "installed")


def _when(versions: dict[str, str]) -> str:
    return f"when the lock was written ({', '.join(f'{name} {number}' for name, number in versions.items())})"


def _dropped(
    patch: Patch,
    now: dict[str, inspect.Parameter] | None,
    taken: dict[str, inspect.Parameter] | None,
    known: Any,
) -> list[str]:
    """Parameters of the target that the replacement refuses, or swallows without a look.

    ``**kwargs`` of a replacement that is not given the original swallows what was added since the lock.
    """
    if now is None or taken is None:
        return []
    moved = [f"{name} by position" for name in _moved(now, taken)]
    kinds = {parameter.kind for parameter in taken.values()}
    named = [name for name, parameter in now.items() if parameter.kind not in _KINDS]
    own = [name for name, parameter in taken.items() if parameter.kind not in _KINDS]
    # What a method calls its instance is its own matter, where it takes one.
    missing = [name for name in named[bool(own) and own[:1] != named[:1] :] if name not in own]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return [*missing, *moved]
    if patch.wraps:
        return moved  # the rest is handed on to the original
    before = known.get("parameters") if known else None
    return [*(name for name in missing if before is not None and name not in before), *moved]


def _needed(now: dict[str, inspect.Parameter], taken: dict[str, inspect.Parameter]) -> list[str]:
    """Parameters of the replacement without a default that no call of the target gives."""
    if not now or any(parameter.kind in _KINDS for parameter in now.values()):
        return []  # not known, or of any number and name
    places, named = _by_position(now), _by_position(taken)
    return [
        name
        for name, parameter in taken.items()
        if parameter.default is parameter.empty
        and parameter.kind not in _KINDS
        and name not in now
        and (name not in named or named.index(name) >= len(places))
    ]


def _by_position(parameters: dict[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def _moved(now: dict[str, inspect.Parameter], taken: dict[str, inspect.Parameter]) -> list[str]:
    """Parameters whose place among the positional ones another one of the target has in the replacement."""
    pairs = zip(_by_position(now), _by_position(taken), strict=False)
    return [name for name, other in pairs if other != name and other in now and name in taken]


def _broken_calls(
    dropped: Sequence[str], now: dict[str, inspect.Parameter], taken: dict[str, inspect.Parameter]
) -> Iterable[str]:
    """Which calls of the target fail, or mean something else, under the replacement: a sentence each."""
    places, own = _by_position(now), _by_position(taken)
    kinds = {parameter.kind for parameter in taken.values()}
    for name in places:
        at = places.index(name)
        if f"{name} by position" in dropped:
            yield f"a call that gives `{name}` by position: it arrives as `{own[at]}`"
        elif name in dropped and at < len(own):
            yield f"a call with `{name}=...`: {_by_keyword(kinds)}; by position it arrives as `{own[at]}`"
        elif name in dropped:
            yield f"a call with `{name}=...`: {_by_keyword(kinds)}"
        elif at and at >= len(own) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            yield f"a call that gives `{name}` by position: TypeError; by its name it works"
    for name in now:
        if name in dropped and name not in places:
            yield f"a call with `{name}=...`: {_by_keyword(kinds)}"


def _by_keyword(kinds: set[Any]) -> str:
    swallowed = inspect.Parameter.VAR_KEYWORD in kinds
    return "computed as if it were not there" if swallowed else "TypeError while the mode is active"


def diff_of(patch: Patch) -> list[str]:
    """A unified diff from the original to the replacement; one line that says why there is none."""
    if patch.scope is not None:
        return [f"(a context manager: {patch.target})"]
    original = _original(patch)
    if original is MISSING:
        return [f"(the target is gone: {why_gone(patch)})"]
    replacement = _replacement(patch, original)
    old, new = source_of(original), source_of(replacement)
    if not new:
        return [f"(no source of the replacement {replacement!r})"]
    return (
        _diff(old, new, patch.target, "replacement")
        if old
        else ["(the original is no Python)", *new.splitlines()]
    )


def _diff(old: str, new: str, before: str, after: str) -> list[str]:
    return [
        line.rstrip("\n")
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), before, after, lineterm="")
    ]
