"""``exportcheck patches``: what each patch mode changes, how, and whether it still fits what is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PatchError

if TYPE_CHECKING:
    from .patches.patch import Patch

__all__ = ["run_patches", "run_pytrees"]

#: Modes that are listed and linted when none is named: ``all`` repeats them.
_MODES = ("torch", "transformers", "rewrite", "hf")


def run_patches(names: Sequence[str], diff: bool, check: bool, write: bool, given: Path | None) -> int:
    """Run it; 0 fine, 1 errors found, 2 a mode cannot be loaded."""
    from .patches.lock import LOCK, lint, lock_of, read_lock, write_lock

    try:
        modes = [(name, _patches_of(name)) for name in names or _available()]
        foreign = [name for name, _ in modes if name not in _MODES]
        path = given or (Path("patches.lock.json") if foreign else LOCK)
        if write:
            lock = read_lock(path)
            fresh = lock_of(modes)
            # Modes that were not asked for stay as they are.
            fresh["modes"] = lock["modes"] | fresh["modes"]
            write_lock(path, fresh)
            print(f"{path}: {sum(map(len, fresh['modes'].values()))} targets", file=sys.stderr)
            return 0
        if check:
            lock = read_lock(path)
            found = [finding for name, patches in modes for finding in lint(name, patches, lock)]
            for finding in found:
                print(finding)
            errors = sum(finding.level == "error" for finding in found)
            count = sum(len(patches) for _, patches in modes)
            print(f"{count} patches, {errors} errors, {len(found) - errors} warnings", file=sys.stderr)
            return 1 if errors else 0
    except PatchError as error:
        print(error, file=sys.stderr)
        return 2
    for name, patches in modes:
        for patch in patches:
            _show(name, patch, diff)
    return 0


def _available() -> list[str]:
    from .patches.rewriting import has_rewriting

    return [name for name in _MODES if name != "rewrite" or has_rewriting()]


def _patches_of(name: str) -> list[Patch]:
    from .patches.modes import PatchList
    from .registry import load_patch_mode

    try:
        mode = load_patch_mode(name, Path.cwd())
    except LookupError as error:
        raise PatchError(str(error)) from None
    if not isinstance(mode, PatchList):
        raise PatchError(f"patch mode {name} ({type(mode).__name__}) does not tell its patches")
    return mode.patches(None, "onnx")


def _show(mode: str, patch: Patch, diff: bool) -> None:
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
        from .patches.lock import diff_of

        for line in diff_of(patch):
            print(f"    {line}")


def run_pytrees() -> int:
    """Print how every class flattens, by whom; 1 if a layout is there with which ONNX exports fail."""
    import transformers.cache_utils  # noqa: F401

    from .pytrees.registration import registered_classes

    found = registered_classes()
    for one in found:
        print(one)
    return 1 if any(one.breaks_onnx for one in found) else 0
