"""xdist's `loadscope` with a distribution of our own. Imports xdist."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

from .distribution import Distribution, Scope
from .xdist_support import worker_number

__all__ = ["SpecScheduling"]

#: A worker with fewer tests runs none of them: it keeps its last one until it knows what follows.
_HELD = 2

_SPEC = (".yaml", ".yml")


class SpecScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A spec in one worker, test by test; what is left of the last ones is divided (see `Distribution`).

    In xdist's `loadscope` a worker holds two files, one while others idle, and a test that kills its worker
    kills the replacements too, as its file is handed out again with that test still in it. A replacement that
    is given the one test that is left would wait for ever. None of that happens here, because a worker is
    never given more than it needs to go on, and is told to end as soon as there is nothing more for it.

    Parameters
    ----------
    remembered:
        Spec file -> [seconds, tests] of an earlier run.
    exporters:
        Names of exporters: the cases of one exporter share work.
    per_device:
        How many workers use one CUDA device at a time.
    """

    def __init__(
        self,
        config: Any,
        log: Any,
        remembered: Mapping[str, Sequence[float]],
        exporters: Sequence[str],
        per_device: int = 1,
    ) -> None:
        super().__init__(config, log)
        self._remembered = remembered
        self._exporters = sorted(exporters, key=len, reverse=True)
        self._per_device = per_device
        self._distribution: Distribution | None = None
        self._joined: set[Any] = set()

    collection: list[str] | None

    @property
    def tests_finished(self) -> bool:
        """Whether every test has been given to a worker, and none waits to know what follows."""
        if not self.collection_is_completed or self._distribution is None:
            # Workers that collected different tests are given none.
            return bool(self.collection_is_completed)
        if self._distribution.waiting:
            return False
        return all(len(self._distribution.given(node)) < _HELD for node in self._joined)

    @property
    def has_pending(self) -> bool:
        """Whether tests are waiting or running."""
        distribution = self._distribution
        if distribution is None:
            return False
        return distribution.waiting or any(distribution.given(node) for node in self._joined)

    def remove_node(self, node: Any) -> str | None:
        """Remove the worker; return the node id of the test it died in, ``None`` if it was idle."""
        self.assigned_work.pop(node)
        if node not in self._joined:
            return None
        self._joined.discard(node)
        assert self._distribution is not None
        assert self.collection is not None
        lost = self._distribution.leave(node)
        self._feed()
        return None if lost is None else self.collection[lost]

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """A worker ended a test; it may need more."""
        assert self._distribution is not None
        self._distribution.end(node, item_index, duration)
        self._feed()

    def schedule(self) -> None:
        """Give every worker what it needs; called again when a replacement has collected."""
        assert self.collection_is_completed
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                self.log("**Different tests collected, aborting run**")
                return
            self.collection = list(next(iter(self.registered_collections.values())))
            self._distribution = self._planned(self.collection)
        self._feed()

    def _feed(self) -> None:
        distribution = self._distribution
        assert distribution is not None
        for node in self.assigned_work:
            if node not in self._joined and node in self.registered_collections:
                distribution.join(node, worker_number(str(node.gateway.id)))
                self._joined.add(node)
        # Each gets one before any gets two: the second may be the last that there is.
        for count in range(1, _HELD + 1):
            for node in [node for node in self.assigned_work if node in self._joined]:
                if node.shutting_down or len(distribution.given(node)) >= count:
                    continue
                tests = distribution.take(node)
                if tests:
                    node.send_runtest_some(tests)
                else:
                    node.shutdown()

    def _planned(self, collection: Sequence[str]) -> Distribution:
        scopes: dict[tuple[str, bool], Scope] = {}
        for number, nodeid in enumerate(collection):
            name = self._split_scope(nodeid)
            gpu = name.endswith(_SPEC) and _label(nodeid).startswith("cuda")
            scope = scopes.get((name, gpu))
            if scope is None:
                seconds, tests = self._remembered.get(name, (0.0, 0.0))
                scope = scopes[name, gpu] = Scope(
                    name, deque(), not name.endswith(_SPEC), gpu, seconds / tests if tests else None
                )
            scope.tests.append(number)
        kinds = [self._kind(nodeid) for nodeid in collection]
        return Distribution(scopes.values(), kinds, devices=_cuda_devices(), per_device=self._per_device)

    def _kind(self, nodeid: str) -> tuple[str, str]:
        """Device, dtype and exporter of a case; two cases of one kind may share a conversion."""
        label = _label(nodeid)
        for name in self._exporters:
            before, found, _ = label.partition(f"-{name}-")
            if found:
                return before, name
        return label, ""


def _label(nodeid: str) -> str:
    return nodeid.partition("[")[2]


def _cuda_devices() -> int:
    """How many CUDA devices workers can use, without torch, which the controller does not import."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip()])
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 1
