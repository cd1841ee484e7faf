"""State that one call leaves for the next: each recorded call again, on a model that has seen no other.

A replay on the model that was observed finds what the calls left there, and agrees. An exported program has
it inside as a constant and agrees too: only a newly built model shows that an answer depends on the calls
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..errors import ObserveError
from ..observe.observation import GraphObservation
from ..observe.records import RecordedCall
from ..observe.targets import Target
from ..pytrees import flatten_with_paths
from ..spec.seeding import seeded
from ..tracebacks import user_lines
from .compare import LeafComparison, Tolerances, compare_leaves, table
from .held import StateWatch
from .state import tensors_of

__all__ = ["Build", "check_carried_state"]

#: How many changes a message lists.
_MOST = 4

#: A model of more bytes of weights is not built a second time.
_MOST_BYTES = 8 * 2**30

_ADVICE = (
    "an exported program holds what the calls left as a constant: compute it in every call, make it an input "
    "and an output, or make those calls where the model is built"
)

#: Makes a model as the observed one was made; the block is what has to be active while it is called.
Build = Callable[[], AbstractContextManager[torch.nn.Module]]


class _CannotTell(Exception):
    """No model can be built that would show anything; the message says why."""


def check_carried_state(
    graph: GraphObservation,
    before: Sequence[RecordedCall],
    watch: StateWatch,
    build: Build,
    tolerances: Tolerances,
    seed: int,
) -> None:
    """Run each call on a newly built model, if the calls changed anything that `watch` sees.

    What gives equal results (a table that is made on first use) is no news.

    Parameters
    ----------
    before:
        Recorded calls of the same target, those of other graphs too.

    Raises
    ------
    ObserveError
        A new model answers a call otherwise, or refuses it, and not after the calls before; the message names
        what these left.
    """
    changes = list(watch.changes().values())
    if not changes:
        return
    path = next((name for name, part in watch.module.named_modules() if part is graph.target.module), None)
    try:
        if path is None:
            raise _CannotTell("the target is no part of the model any more")
        with _FreshModels(graph.target, path, watch, build, tolerances, seed) as fresh:
            for call in graph.calls:
                found = fresh.answer(call)
                if isinstance(found, list) and all(result.ok for result in found):
                    continue
                # Else something else sets them apart: a factory that makes another model each time, or what
                # was done to the model between its calls.
                if not fresh.answers_after([each for each in before if each.index <= call.index], call):
                    raise _CannotTell(
                        f"a newly built model answers call {call.index} otherwise, after the calls before it "
                        "too (it is another model each time, or is changed between the calls)"
                    )
                raise _depends(graph, call, found, changes)
    except _CannotTell as error:
        note = f"{changes[0]} by the calls, and whether an answer depends on it cannot be told: {error}"
        graph.shapes.warnings.append(note)


def _depends(
    graph: GraphObservation,
    call: RecordedCall,
    found: list[LeafComparison] | Exception,
    changes: Sequence[str],
) -> ObserveError:
    what = f"call {call.index}" + (f" ({graph.name})" if graph.name else "")
    left = [*changes[:_MOST], *([f"... and {len(changes) - _MOST} more"] if len(changes) > _MOST else [])]
    if isinstance(found, Exception):
        said = f"refuses it ({type(found).__name__}: {_first_line(found)})"
        details = user_lines(found)
    else:
        worst = max((result for result in found if not result.ok), key=lambda result: result.max_abs)
        said = f"answers it otherwise (`{worst.path}`: {worst.reason or f'max abs {worst.max_abs:.1e}'})"
        details = table(found)
    return ObserveError(
        f"eager's answer to {what} depends on the calls before it: a newly built model {said}; "
        f"what they left: {left[0]}; no exporter is blamed",
        details=[*left[1:], _ADVICE, *details],
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


class _FreshModels(contextlib.ExitStack):
    """Models that have seen no call; one is used again while a call leaves nothing in it."""

    def __init__(
        self,
        target: Target,
        path: str,
        watch: StateWatch,
        build: Build,
        tolerances: Tolerances,
        seed: int,
    ) -> None:
        super().__init__()
        self._target, self._path, self._watch, self._build = target, path, watch, build
        self._tolerances, self._seed = tolerances, seed
        self._now: tuple[Target, StateWatch] | None = None

    def answer(self, call: RecordedCall) -> list[LeafComparison] | Exception:
        """What a new model answers, compared with what was recorded; or what it raises."""
        if self._now is None or self._now[1].changes():
            self._now = self._made()
        return self._compared(self._now, call)

    def answers_after(self, before: Sequence[RecordedCall], call: RecordedCall) -> bool:
        """Whether a new model that was called as recorded answers `call` as recorded."""
        now = self._now = self._made()
        for earlier in before:
            self._compared(now, earlier)
        # Weights that a call draws are others each time.
        drawn = now[1].new_tensors()
        _give_weights(
            now[1].module, {label: t for label, t in tensors_of(self._watch.module) if label in drawn}
        )
        found = self._compared(now, call)
        return isinstance(found, list) and all(result.ok for result in found)

    def _compared(
        self, model: tuple[Target, StateWatch], call: RecordedCall
    ) -> list[LeafComparison] | Exception:
        target, watch = model
        device = next((tensor.device for _, tensor in tensors_of(watch.module)), torch.device("cpu"))
        try:
            with seeded(self._seed, device):
                outputs = flatten_with_paths(target.eager(call.arguments))
        except Exception as error:
            return error
        return compare_leaves(call.output_leaves(), outputs, self._tolerances)

    def _made(self) -> tuple[Target, StateWatch]:
        self.close()
        self._now = None
        model = self._watch.module
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(model))
        if size > _MOST_BYTES:
            raise _CannotTell(f"a second model of {size / 2**30:.0f} GiB is not built")
        weights = self._watch.unchanged_tensors()
        self.enter_context(self._watch.code_as_it_was())
        try:
            fresh = self.enter_context(self._build())
            target = replace(self._target, module=fresh.get_submodule(self._path))
            if {id(part) for part in fresh.modules()} & {id(part) for part in model.modules()}:
                raise _CannotTell("what builds the model returns the same one again")
            _give_weights(fresh, weights)
            return target, StateWatch(fresh)
        except _CannotTell:
            raise
        except Exception as error:
            raise _CannotTell(
                f"the model cannot be built again: {type(error).__name__}: {_first_line(error)}"
            ) from error


def _give_weights(fresh: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Let `fresh` have the values of what no call changed: not every factory draws the same ones again."""
    for label, tensor in tensors_of(fresh):
        old = weights.get(label)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            with torch.no_grad():
                tensor.data.copy_(old)
