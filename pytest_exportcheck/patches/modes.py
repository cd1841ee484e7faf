"""Patch modes made of patches: a name and sources, applied as a whole or in part."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import PatchError
from ..spec.imports import sibling_imports
from ..spec.names import suggest
from .engine import Activity, applied
from .none import NoPatches
from .observed import Observed
from .patch import LOADED, Patch, Source

__all__ = ["AllPatches", "PatchList", "RewritePatches", "TorchPatches", "TransformersPatches"]


class PatchList(NoPatches):
    """A mode whose changes are a list of `Patch`.

    Attributes
    ----------
    sources:
        Where the patches come from, in order; of two with the same name the first counts.
    only:
        Names of the patches that are applied, ``None``: all.
    used:
        By target, names of the patches that were called so far, or whose calls cannot be counted (a context
        manager, a constant).
    folder:
        Of the file that states the patches: its modules can be imported while their targets are looked up.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        *,
        observed_under_itself: bool = False,
        only: Iterable[str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.sources = tuple(sources)
        self.observed_under_itself = observed_under_itself
        self.only = None if only is None else frozenset(only)
        self.used: dict[str, set[str]] = {}
        self.folder = folder

    def patches(self, model: torch.nn.Module | None, target: str) -> list[Patch]:
        """The patches for `model` on the way to `target`; ``None``: every one, whatever model it is for.

        Raises
        ------
        PatchError
            A name of `only` is none of this mode's.
        """
        found: dict[str, Patch] = {}
        for source in self.sources:
            for patch in source(model, target):
                if not patch.runtimes or target in patch.runtimes:
                    found.setdefault(patch.name, patch)
        if self.only is None:
            return list(found.values())
        unknown = sorted(self.only - set(found))
        if unknown and model is None:
            raise PatchError(
                f"patch mode {self.name} has no patch {unknown[0]!r}{suggest(unknown[0], found)}"
            )
        return [patch for name, patch in found.items() if name in self.only]

    def subset(self, names: Iterable[str], name: str | None = None) -> PatchList:
        """The mode with the patches called `names` only, under its own name or another one."""
        part = copy.copy(self)
        part.only, part.used = frozenset(names), {}
        part.name = name or self.name
        return part

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Modules that lie beside the file of the mode can be imported inside the block."""
        return contextlib.nullcontext() if self.folder is None else sibling_imports(self.folder)

    @contextlib.contextmanager
    def apply(self, model: torch.nn.Module | None, target: str) -> Iterator[Any]:
        """Put the patches in place; the block is given their `Activity`."""
        activity = Activity()
        try:
            with (
                self.beside(),
                applied(self.patches(model, target), None if model is LOADED else model) as activity,
            ):
                yield activity
        finally:
            used = {name for name in activity.patches if activity.calls.get(name, 1)}
            self.used.setdefault(target, set()).update(used)


class _Rewriting(PatchList):
    """A mode with rewritten methods, which are made for one graph: from its observed calls."""

    def prepared(self, observed: Observed) -> PatchList:
        """The mode with the methods that `observed` needs rewritten, when the other patches are in place.

        Raises
        ------
        PatchError
            A branch that depends on a tensor stops the export, and cannot be rewritten.
        """
        from .rewrite import RewriteRefused, patches_for

        try:
            with self.apply(observed.module, observed.target):
                patches = patches_for(observed)
        except RewriteRefused as refused:
            # As every failure of a stage: a class that is made from its message, in another process too.
            raise PatchError(refused.message, details=refused.details) from refused
        only = None if self.only is None else self.only | {patch.name for patch in patches}
        return PatchList(self.name, [*self.sources, lambda model, target: patches], only=only)


class TorchPatches(PatchList):
    """``torch``: ours for torch."""

    def __init__(self) -> None:
        from .ours.torch_functions import torch_patches

        super().__init__("torch", [torch_patches])


class TransformersPatches(PatchList):
    """``transformers``: ours for transformers."""

    def __init__(self) -> None:
        from .for_transformers import transformers_patches

        super().__init__("transformers", [transformers_patches])


class RewritePatches(_Rewriting):
    """``rewrite``: methods whose control flow depends on data, rewritten."""

    def __init__(self) -> None:
        super().__init__("rewrite", [])


class AllPatches(_Rewriting):
    """``all``: ``torch``, ``transformers`` and ``rewrite``."""

    def __init__(self) -> None:
        from .for_transformers import transformers_patches
        from .ours.torch_functions import torch_patches

        super().__init__("all", [torch_patches, transformers_patches])
