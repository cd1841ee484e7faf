"""``exportcheck patches``: what each patch mode changes, how, and whether it still fits what is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PatchError
from .plurals import counted
from .spec.imports import sibling_imports

if TYPE_CHECKING:
    from .patches.patch import Patch

__all__ = ["run_patches", "run_pytrees"]

#: Modes that are listed and linted when none is named: ``all`` repeats them.
_MODES = ("torch", "transformers", "hf")

_LOCK_NAME = "patches.lock.json"


def run_patches(names: Sequence[str], diff: bool, check: bool, write: bool, given: Path | None) -> int:
    """Run it; 0 fine, 1 errors found or a target is gone, 2 a mode cannot be loaded."""
    wanted = _expanded(names) or list(_MODES)
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(map(_folder_of, wanted)):
            stack.enter_context(sibling_imports(folder))
        return _run(wanted, diff, check, write, given)


def _folder_of(mode: str) -> Path:
    """Where the file of a mode lies, beside which its targets may be."""
    file = mode.partition(":")[0]
    return Path(file).parent if file.endswith(".py") else Path()


def _run(names: Sequence[str], diff: bool, check: bool, write: bool, given: Path | None) -> int:
    from .patches.lock import lint, lock_of, read_lock, write_lock

    try:
        modes = [(name, _patches_of(name)) for name in names]
        places = {name: given or _lock_of(name) for name, _ in modes}
        if write:
            gone = 0
            for path in dict.fromkeys(places.values()):
                mine = [(name, patches) for name, patches in modes if places[name] == path]
                fresh = lock_of(mine)
                gone += _say_missing(mine, fresh)
                # Modes that were not asked for stay as they are.
                fresh["modes"] = read_lock(path)["modes"] | fresh["modes"]
                write_lock(path, fresh)
                count = sum(map(len, fresh["modes"].values()))
                print(f"{path}: {counted(count, 'target')}", file=sys.stderr)
            return 1 if gone else 0
        if check:
            found = [
                finding for name, patches in modes for finding in lint(name, patches, read_lock(places[name]))
            ]
            for finding in found:
                print(finding)
            errors = sum(finding.level == "error" for finding in found)
            count = sum(len(patches) for _, patches in modes)
            numbers = (
                counted(count, "patch", "patches"),
                counted(errors, "error"),
                counted(len(found) - errors, "warning"),
            )
            print(", ".join(numbers), file=sys.stderr)
            return 1 if errors else 0
        shown = True
        for name, patches in modes:
            if name == "rewrite":
                print("rewrite  made for each graph, from its observed calls; a case's record has the diffs")
            for patch in patches:
                shown &= _show(name, patch, diff)
        return 0 if shown else 1
    except PatchError as error:
        _say(error)
        return 2


def _say(error: PatchError) -> None:
    print(error.message, *(f"    {line}" for line in error.details), sep="\n", file=sys.stderr)


def _lock_of(mode: str) -> Path:
    """The lock of a mode: the one that ships, or ``patches.lock.json`` beside the file of a mode of yours."""
    from .patches.lock import LOCK

    if mode in (*_MODES, "rewrite"):
        return LOCK
    module = mode.partition(":")[0]
    if module.endswith(".py"):
        return Path(module).with_name(_LOCK_NAME)
    found = find_spec(module) if ":" in mode else None
    return Path(found.origin).with_name(_LOCK_NAME) if found and found.origin else Path(_LOCK_NAME)


def _say_missing(modes: Sequence[tuple[str, list[Patch]]], lock: Mapping[str, Any]) -> int:
    """Say which targets are not there; how many of them are errors."""
    from .patches.lock import why_gone

    errors = 0
    for name, patches in modes:
        known = lock["modes"].get(name, {})
        for patch in patches:
            if patch.scope is None and patch.name not in known:
                print(
                    f"{name}: not written, the target is gone: {patch.name}: {why_gone(patch)}",
                    file=sys.stderr,
                )
                errors += not patch.optional and not patch.rests()
    return errors


def _expanded(names: Sequence[str]) -> list[str]:
    """``all`` as what it is made of: a patch has one place in the lock."""
    ours = [name for name in _MODES if name != "hf"]
    return list(dict.fromkeys(one for name in names for one in (ours if name == "all" else [name])))


def _patches_of(name: str) -> list[Patch]:
    from .patches.modes import PatchList
    from .registry import load_patch_mode

    if name.endswith(".py"):
        raise PatchError(f"{name} is a file: write {name}:NAME, with the name of its patches")
    try:
        mode = load_patch_mode(name, Path.cwd())
    except LookupError as error:
        raise PatchError(str(error)) from None
    if not isinstance(mode, PatchList):
        raise PatchError(
            f"patch mode {name} ({type(mode).__name__}) is no list of patches: name another mode"
        )
    return mode.patches(None, "onnx")


def _show(mode: str, patch: Patch, diff: bool) -> bool:
    """Print a patch; False where it should have a diff, and its target is gone."""
    print(f"{mode}  {patch.name}")
    if patch.name != patch.target:
        print(f"    target:   {patch.target}")
    if patch.why:
        print(f"    why:      {patch.why}")
    if patch.versions:
        rests = patch.rests()
        print(f"    versions: {patch.versions_text()}{f' -- rests: {rests}' if rests else ''}")
    if patch.runtimes:
        print(f"    only for: {', '.join(patch.runtimes)}")
    if patch.link:
        print(f"    link:     {patch.link}")
    if diff:
        from .patches.lock import diff_of, why_gone

        if patch.scope is None and (gone := why_gone(patch)):
            print(f"    the target is gone: {gone}")
            return patch.optional or bool(patch.rests())
        for line in diff_of(patch):
            print(f"    {line}")
    return True


def run_pytrees(names: Sequence[str]) -> int:
    """Print how every class flattens, and who registered it; torch's own are only counted.

    Returns 0; 1 if a layout is there with which ONNX exports fail; 2 if a mode of `names`, which are imported
    first, cannot be loaded.
    """
    import transformers.cache_utils  # noqa: F401

    from .pytrees.registration import registered_classes

    try:
        for name in _expanded(names):
            _patches_of(name)
    except PatchError as error:
        _say(error)
        return 2
    found = registered_classes()
    shown = [one for one in found if one.cls.__module__.partition(".")[0] != "torch"]
    for one in shown:
        print(one)
    broken = [one for one in shown if one.breaks_onnx]
    print(
        f"{counted(len(shown), 'class', 'classes')}, {len(broken)} in a layout with which ONNX exports fail; "
        f"{len(found) - len(shown)} of torch's own",
        file=sys.stderr,
    )
    return 1 if broken else 0
