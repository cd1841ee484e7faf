"""What the cases of one spec share in one process: models, observations, and modes made for a graph."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from .cache_settings import CacheSettings
from .cases import CaseId
from .checks.held import StateWatch
from .checks.numbers import refuse_unused_rules
from .checks.remains import TraceRemains
from .checks.sizes import refuse_unknown_sizes
from .checks.state import differences, model_state
from .errors import (
    ExportCheckError,
    LoadError,
    ObserveError,
    PatchError,
)
from .exporters.base import (
    dynamic_arguments,
    flat_forward,
)
from .exporters.capture_cache import CaptureCache
from .exporters.conversion_cache import ConversionCache
from .exporters.conversions import Conversions
from .exporters.leftovers import release_leftovers
from .exporters.rnn import fresh_dispatch
from .foreign_errors import refusal
from .observe.observation import GraphObservation, observe
from .outcomes import Outcomes
from .patches.base import PatchMode
from .patches.observed import Observed
from .patches.registry import load_patch_mode
from .pytrees import register_flattening_functions
from .shapes_check import CheckedObservation
from .spec import ModelSpec, build_calls, build_model
from .spec.imports import sibling_imports
from .tracebacks import one_line, user_lines

__all__ = ["OWN", "SpecRun"]

#: What ``CaseId.patch_mode`` is for an exporter that brings its own patches.
OWN = "own"


def _device_index(device: str) -> str:
    """``cuda`` on the device of this worker: worker k takes cuda:(k mod count)."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return device
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return f"cuda:{int(worker) % torch.cuda.device_count()}" if worker.isdigit() else device


class SpecRun:
    """Everything of one spec in one process: its models and observations, made once, kept until `close`.

    Attributes
    ----------
    modes:
        Patch modes under names of the caller's own (a part of a mode), beside those that are registered.
    share:
        What two cases have in common is made once.
    conversions:
        Those that were made, and the cache of those of other runs.
    captures:
        The cache of captures of other runs.
    outcomes:
        What programs that passed have shown.
    """

    def __init__(self, spec: ModelSpec, share: bool = True, cache: CacheSettings | None = None) -> None:
        self.spec = spec
        self.share = share
        several = share and len(spec.matrix.patch_modes) > 1
        kept = ConversionCache(cache.folder, cache.limit, cache.salt) if share and cache else None
        self.conversions = Conversions(keep=several, cache=kept)
        self.captures = (
            CaptureCache(cache.folder, cache.limit, cache.salt, spec.folder, spec.document.text or None)
            if share and cache
            else None
        )
        self.outcomes = Outcomes(keep=several)
        self.modes: dict[str, PatchMode] = {}
        self._models: dict[tuple[str, str], torch.nn.Module | ExportCheckError] = {}
        self._watches: dict[tuple[str, str], StateWatch] = {}
        self._first_watch: StateWatch | None = None
        self._observations: dict[tuple[str, str, str], CheckedObservation | ExportCheckError] = {}
        self._prepared: dict[tuple[str | None, ...], PatchMode | ExportCheckError] = {}

    def close(self) -> None:
        """Let go of the models and of what was recorded; the garbage collector finds what is in cycles."""
        self._models.clear()
        self._watches.clear()
        self._first_watch = None
        self._observations.clear()
        self._prepared.clear()
        self._drop_programs()
        release_leftovers()

    def forget(self, device: str, dtype: str) -> None:
        """Build the model and observe it again for the next case: this one was changed."""
        self._drop_programs()
        self._models.pop((device, dtype), None)
        self._watches.pop((device, dtype), None)
        for key in [key for key in self._observations if key[:2] == (device, dtype)]:
            del self._observations[key]
        for made in [key for key in self._prepared if key[:2] == (device, dtype)]:
            del self._prepared[made]

    def _drop_programs(self) -> None:
        self.conversions.clear()
        self.outcomes.clear()
        if self.captures is not None:
            self.captures.clear()

    def mode(self, name: str) -> PatchMode:
        """The patch mode of a case; `PatchError` if there is none of that name."""
        if name in self.modes:
            return self.modes[name]
        try:
            return cast(PatchMode, load_patch_mode("none" if name == OWN else name, self.spec.folder))
        except LookupError as error:
            raise PatchError(str(error)) from None

    def share_observation(self, device: str, dtype: str, mode: str, other: str) -> None:
        """Let cases under `other` have what was observed under `mode`."""
        self._observations[device, dtype, other] = self._observations[device, dtype, mode]

    def drop_mode(self, name: str) -> None:
        """Forget a mode of `modes`, and what was observed under it."""
        self.modes.pop(name, None)
        for key in [key for key in self._observations if key[2] == name]:
            del self._observations[key]

    def model(self, device: str, dtype: str) -> torch.nn.Module:
        """The model; raises `LoadError`, the same one again if it failed before."""
        key = (device, dtype)
        if key not in self._models:
            try:
                self._models[key] = made = build_model(self.spec, _device_index(device), dtype)
                self._watches[key] = StateWatch(made, self._first_watch)
                self._first_watch = self._first_watch or self._watches[key]
            except ExportCheckError as error:
                self._models[key] = error
            except (Exception, SystemExit) as error:
                self._models[key] = LoadError(one_line(error), details=user_lines(error))
        model: torch.nn.Module = _value(self._models[key])
        return model

    def observe(
        self, device: str, dtype: str, mode: str = "none", enter: Callable[[str], None] = lambda stage: None
    ) -> CheckedObservation:
        """The observation under a patch mode; `LoadError` or `ObserveError`, again if it failed before."""
        key = (device, dtype, mode)
        if key not in self._observations:
            enter("load")
            model = self.model(device, dtype)
            enter("observe")
            try:
                with sibling_imports(self.spec.folder):
                    self._observations[key] = self._observe(model, device, dtype, mode)
            except ExportCheckError as error:
                self._observations[key] = error
            except (Exception, SystemExit) as error:
                self._observations[key] = ObserveError(one_line(error), details=user_lines(error))
        checked: CheckedObservation = _value(self._observations[key])
        return checked

    def prepared(
        self, case: CaseId, mode: PatchMode, observation: CheckedObservation, target: str
    ) -> PatchMode:
        """The mode made for the case's graph, where it is one that wants to see the calls.

        Raises
        ------
        PatchError
            It cannot be made; again, if it failed before.
        """
        prepare = getattr(mode, "prepared", None)
        if prepare is None:
            return mode
        # The runtime decides which other patches are in place; without any, torch and onnx are the same.
        runtime = "torch" if target == "onnx" and not getattr(mode, "sources", True) else target
        key = (case.device, case.dtype, observation.patch_mode, case.graph, mode.name, runtime)
        if key not in self._prepared:
            state = model_state(observation.model, attributes=False)
            try:
                with (
                    sibling_imports(self.spec.folder),
                    register_flattening_functions(None),
                    self.mode(observation.patch_mode).apply(observation.model, "eager"),
                ):
                    self._prepared[key] = prepare(_observed(observation.graph(case.graph), target))
            except ExportCheckError as error:
                self._prepared[key] = error
            except (Exception, SystemExit) as error:
                self._prepared[key] = refusal(error, "patch", f"patch mode {mode.name} cannot be made")
            changed = list(differences(state, model_state(observation.model, attributes=False)).values())
            if changed:
                # Nothing that was made of this model may reach the next case.
                self.forget(case.device, case.dtype)
                raise PatchError(f"rewriting for patch mode {mode.name} changed the model: {changed[0]}")
        made: PatchMode = _value(self._prepared[key])
        return made

    def _observe(self, model: torch.nn.Module, device: str, dtype: str, mode: str) -> CheckedObservation:
        where = _device_index(device)
        watch = self._watches[device, dtype]

        @contextlib.contextmanager
        def build() -> Iterator[torch.nn.Module]:
            fresh = build_model(self.spec, where, dtype)
            with self.mode(mode).apply(fresh, "eager"):
                yield fresh

        with register_flattening_functions(None), self.mode(mode).apply(model, "eager"):
            plans = build_calls(self.spec, where, dtype)
            seen = observe(self.spec, model, plans, where, dtype, mode)
            checked = CheckedObservation(**vars(seen))
            if not checked.failures:
                # A name may be a symbol of a broken graph.
                refuse_unknown_sizes(self.spec, list(checked.graphs.values()))
            for graph in list(checked.graphs.values()):
                checked.check(graph, watch, build)
            if not checked.failures:
                # A rule may be about the outputs of a broken graph.
                refuse_unused_rules(self.spec, list(checked.graphs.values()))
        return checked


def _value(kept: Any) -> Any:
    if isinstance(kept, ExportCheckError):
        # A new one each time: pytest writes the traceback of this test into the exception it is given.
        raise type(kept)(kept.message, details=kept.details, facts=kept.facts)
    return kept


def _observed(graph: GraphObservation, target: str) -> Observed:
    """The graph as a patch mode sees it."""

    def export() -> Any:
        where = graph.target
        arguments = graph.example.arguments
        remains = TraceRemains(where.module)
        try:
            with (
                fresh_dispatch(),
                flat_forward(where.module, where.method, where.signature, arguments) as kwargs,
                torch.no_grad(),
            ):
                shapes = dynamic_arguments(kwargs, graph.shapes)
                return torch.export.export(where.module, (), kwargs, dynamic_shapes=shapes, strict=False)
        finally:
            remains.take_out()

    def run() -> list[Any]:
        return [graph.eager(call.arguments) for call in graph.calls]

    return Observed(graph.target.module, run, export, target)
