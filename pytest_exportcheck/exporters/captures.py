"""The capture of one case: made now, or that of an earlier run, by a key that is known before it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..observe import GraphShapes
from .capture_cache import CaptureCache, KeptCapture, PendingCapture, spec_text
from .content import Unreadable
from .conversions import Weights
from .fingerprint import graph_digest
from .guards import CaptureWatch
from .serialized import NotSaveable

__all__ = ["CaseCaptures", "UnusableCapture"]


class UnusableCapture(Exception):
    """A kept capture that looked right cannot be loaded: the case starts again without it."""


@dataclass
class CaseCaptures:
    """The cache of captures as one case sees it.

    Attributes
    ----------
    model, kwargs:
        What is captured, and with which arguments.
    arguments:
        All arguments of the example, those that are baked in too.
    answer:
        What eager returns for them.
    patches:
        Those in place, by name, as objects (`patches.reach.parts_of`); ``None``: they cannot be told.
    paths:
        Of the tensors in `kwargs`.
    renew:
        Read no entry: a case failed with one.
    aside:
        Around what is done for the cache: no part of the export (`patches.engine.uncounted`).
    facts, notes:
        For the record.
    """

    cache: CaptureCache
    model: torch.nn.Module
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    answer: Any
    patches: Mapping[str, Any] | None
    watch: CaptureWatch
    shapes: GraphShapes
    paths: Sequence[str]
    settings: Mapping[str, Any]
    renew: bool = False
    aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _key: dict[str, Any] | None = None
    _make: Callable[[], torch.export.ExportedProgram] | None = None
    _pending: PendingCapture | None = None

    def obtain(
        self, make: Callable[[], torch.export.ExportedProgram], settings: Mapping[str, Any]
    ) -> torch.export.ExportedProgram | KeptCapture:
        """What `make` captures, or the same of an earlier run, which is to be given to `use` or `anew`."""
        self._make = make
        with self.aside():
            found = self._found(settings)
        return self.anew() if found is None else found

    def _found(self, settings: Mapping[str, Any]) -> KeptCapture | None:
        try:
            if self.patches is None:
                raise Unreadable("the patch mode does not tell its patches")
            specs = spec_text(((), dict(self.kwargs))), spec_text(self.answer)
            given = {**self.settings, **settings, "specs": specs}
            self._key = self.cache.key(self.model, self.arguments, self.shapes, self.patches, given)
        except Unreadable as reason:
            self.facts["capture_not_kept"] = str(reason)
            return None
        if self.renew:
            return None
        found, notes = self.cache.read(self._key, self.model, (self.kwargs, *specs))
        self.notes += notes
        return found

    def anew(self) -> torch.export.ExportedProgram:
        """Capture; what can be kept of it is held until `write`."""
        assert self._make is not None
        program = self._make()
        self.facts["capture"] = "new"
        if self._key is None:
            return program
        try:
            with self.aside():
                self._pending = self.cache.remember(
                    self._key, program, self.model, self.kwargs, self.paths, self.watch, self.shapes
                )
        except NotSaveable as reason:
            self.facts["capture_not_kept"] = str(reason)
        return program

    def use(self, kept: KeptCapture) -> None:
        """The case goes on with `kept`: what was seen while it was made counts as seen."""
        self.watch.restore(kept.facts.comparisons)
        self.facts["capture"] = "cached"

    def converted(self, program: torch.export.ExportedProgram) -> None:
        """`program` is about to be converted, with the fixes of the patch mode."""
        pending = self._pending
        with self.aside():
            if pending is not None and pending.weights.equal(Weights.of(program)):
                pending.facts.converted = graph_digest(program, self.watch, self.shapes)

    def write(self, patches: Mapping[str, Any]) -> None:
        """The case passed: keep its capture, if it is a new one, with what the record says of `patches`."""
        if self._pending is not None:
            self._pending.facts.patch_calls = dict(patches.get("called", {}))
            self._pending.facts.patch_nodes = dict(patches.get("nodes", {}))
            self.notes += self.cache.write(self._pending)
            self._pending = None
