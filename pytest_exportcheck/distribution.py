"""Which worker runs which test next: specs whole and longest first, and no worker idle while it could help.

Knows nothing of xdist. Tests are numbers; a *scope* is the tests of one file. The scopes of spec files are
handed out test by test, so that what is left of one can still go to another worker; a scope of other tests
goes to one worker as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Distribution", "Scope"]

#: A spec is divided only if the run then ends that many seconds, and that share of what is left, earlier.
LEAST_SECONDS = 2.0
LEAST_SHARE = 0.1


@dataclass(eq=False)
class Scope:
    """Tests that share a model.

    Attributes
    ----------
    name:
        The file.
    tests:
        What no worker has yet, in order.
    whole:
        Given to a worker at once, and never divided.
    gpu:
        The tests run on a CUDA device.
    seconds:
        Of one test, from an earlier run; ``None`` if it is not known.
    """

    name: str
    tests: deque[int]
    whole: bool = False
    gpu: bool = False
    seconds: float | None = None


@dataclass(eq=False)
class _Worker:
    device: int
    scope: Scope | None = None
    given: list[int] = field(default_factory=list)
    on_gpu: bool = False


class Distribution:
    """Hands out tests.

    Parameters
    ----------
    scopes:
        In the order in which they should start.
    kinds:
        Of each test, what it shares work with: a spec is better divided where the kind changes.
    devices, per_device:
        How many CUDA devices there are, and how many workers may use one of them at a time.
    """

    def __init__(
        self, scopes: Iterable[Scope], kinds: Sequence[Hashable], *, devices: int = 1, per_device: int = 1
    ) -> None:
        self._queue = [scope for scope in scopes if scope.tests]
        self._kinds = kinds
        self._home = {test: scope for scope in self._queue for test in scope.tests}
        self._workers: dict[Hashable, _Worker] = {}
        self._devices = max(devices, 1)
        self._per_device = max(per_device, 1)
        #: Seconds of the tests that ended, by file, in order.
        self._took: dict[str, list[float]] = {}

    @property
    def waiting(self) -> bool:
        """Whether there are tests that no worker has been given."""
        owned = [worker.scope for worker in self._workers.values() if worker.scope is not None]
        return any(scope.tests for scope in (*self._queue, *owned))

    def given(self, worker: Hashable) -> list[int]:
        """What the worker has been given and has not ended, in its order."""
        return list(self._workers[worker].given)

    def join(self, worker: Hashable, number: int) -> None:
        """A worker that may be given tests; `number` decides which CUDA device it uses."""
        self._workers[worker] = _Worker(number % self._devices)

    def end(self, worker: Hashable, test: int, seconds: float) -> None:
        """The worker ended a test."""
        each = self._workers[worker]
        each.given.remove(test)
        self._took.setdefault(self._home[test].name, []).append(seconds)
        held = [*(self._home[test] for test in each.given), *([each.scope] if each.scope else [])]
        each.on_gpu = each.on_gpu and any(scope.gpu for scope in held)

    def leave(self, worker: Hashable) -> int | None:
        """The worker is gone: the test it died in, which is lost. What it had beside it is for the others."""
        gone = self._workers.pop(worker)
        lost = gone.given.pop(0) if gone.given else None
        back = list(dict.fromkeys(self._home[test] for test in gone.given))
        if gone.scope is not None and gone.scope not in back:
            back.append(gone.scope)
        for test in reversed(gone.given):
            self._home[test].tests.appendleft(test)
        self._queue[:0] = [scope for scope in back if scope.tests]
        return lost

    def take(self, worker: Hashable) -> list[int]:
        """The next test for a worker, or all tests of a scope that stays whole; empty if there is none."""
        each = self._workers[worker]
        if each.scope is None or not each.scope.tests:
            each.scope = self._next_scope(each) or self._second_spec(each) or self._divided(each)
        scope = each.scope
        if scope is None:
            return []
        each.on_gpu = each.on_gpu or scope.gpu
        taken = [scope.tests.popleft() for _ in range(len(scope.tests) if scope.whole else 1)]
        each.given += taken
        return taken

    def _next_scope(self, worker: _Worker) -> Scope | None:
        allowed = [scope for scope in self._queue if self._may_have(worker, scope)]
        # Nobody else may run what is for the device of this worker.
        chosen = next((scope for scope in allowed if scope.gpu and worker.on_gpu), None)
        if chosen is None and allowed:
            chosen = allowed[0]
        if chosen is not None:
            self._queue.remove(chosen)
        return chosen

    def _may_have(self, worker: _Worker, scope: Scope) -> bool:
        if not scope.gpu or worker.on_gpu:
            return True
        using = [each for each in self._workers.values() if each.on_gpu and each.device == worker.device]
        return len(using) < self._per_device

    def _second_spec(self, worker: _Worker) -> Scope | None:
        """What another worker has not begun of the spec after the one that it runs.

        It holds the first test of that spec already, which cannot be taken back.
        """
        for other in self._workers.values():
            scope = other.scope
            if other is worker or scope is None or not scope.tests or scope.whole:
                continue
            seconds = self._seconds_of(scope.tests)
            if seconds is not None and seconds < LEAST_SECONDS:
                continue  # The model would be built and observed twice for it.
            if other.given and self._home[other.given[0]] is not scope and self._may_have(worker, scope):
                return self._cut(scope, 0)
        return None

    # Dividing a spec.

    def _divided(self, worker: _Worker) -> Scope | None:
        """The end of what is left of another worker's spec, if the run is shorter by that."""
        mine = self._seconds_of(worker.given)
        busiest, left = None, 0.0
        for other in self._workers.values():
            scope = other.scope
            if other is worker or scope is None or scope.whole or not scope.tests:
                continue
            seconds = self._seconds_of([*other.given, *scope.tests])
            if seconds is not None and seconds > left and self._may_have(worker, scope):
                busiest, left = other, seconds
        if busiest is None or mine is None:
            return None
        scope = busiest.scope
        assert scope is not None
        ends, cut = min((self._ends(busiest, scope, mine, cut), -cut) for cut in range(len(scope.tests)))
        if left - ends < max(LEAST_SECONDS, LEAST_SHARE * left):
            return None
        return self._cut(scope, -cut)

    def _cut(self, scope: Scope, cut: int) -> Scope:
        """The tests from `cut` on, as a scope of their own."""
        tests = list(scope.tests)
        part = Scope(scope.name, deque(tests[cut:]), gpu=scope.gpu, seconds=scope.seconds)
        scope.tests = deque(tests[:cut])
        self._home.update(dict.fromkeys(part.tests, part))
        return part

    def _ends(self, other: _Worker, scope: Scope, mine: float, cut: int) -> float:
        """When both are done if the tests from `cut` on go to the worker that has `mine` seconds to do."""
        tests = list(scope.tests)
        before = [*other.given, *tests[:cut]]
        stays, goes = self._seconds_of(before), self._seconds_of(tests[cut:])
        assert stays is not None
        assert goes is not None
        # The model is built and observed anew, which is what the first test of a spec waits for.
        took = self._took.get(scope.name)
        one = self._seconds_of(tests[:1])
        assert one is not None
        price = max(took[0], one) if took else one
        if before and self._kinds[before[-1]] == self._kinds[tests[cut]]:
            price += one
        return max(stays, mine + price + goes)

    def _seconds_of(self, tests: Iterable[int]) -> float | None:
        """What the tests will take, ``None`` if nothing is known."""
        total = 0.0
        for test in tests:
            scope = self._home[test]
            # The tests of a spec differ: those that ended say less than all of an earlier run.
            seconds = scope.seconds or _mean(self._took.get(scope.name))
            if seconds is None:
                seconds = _mean([each for took in self._took.values() for each in took])
            if seconds is None:
                return None
            total += seconds
        return total


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
