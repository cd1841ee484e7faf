"""Who runs which test: simulated workers of any speed, that die at any moment."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_exportcheck.distribution import LEAST_SECONDS, Distribution, Scope


def distribution(scopes: list[list[float]], known: bool, **options: Any) -> tuple[Distribution, list[float]]:
    """One scope for each list of seconds; every other test has another kind."""
    seconds = [each for scope in scopes for each in scope]
    numbers = iter(range(len(seconds)))
    made = [
        Scope(
            f"{name}.yaml",
            deque(next(numbers) for _ in scope),
            seconds=sum(scope) / len(scope) if known and scope else None,
        )
        for name, scope in enumerate(scopes)
    ]
    return Distribution(made, [number // 2 for number in range(len(seconds))], **options), seconds


class Run:
    """Workers that behave as xdist's do: one runs a test when it knows what follows, or that nothing does."""

    def __init__(self, plan: Distribution, seconds: list[float], workers: int, deaths: set[int]) -> None:
        self.plan, self.seconds, self.deaths = plan, seconds, deaths
        self.clock = 0.0
        self.ran: list[int] = []
        self.lost: list[int] = []
        self.idle_since: dict[str, float] = {}
        self.events: list[tuple[float, int, str]] = []
        self.ticket = itertools.count()
        self.names = itertools.count()
        self.running: dict[str, int] = {}
        self.told_to_end: set[str] = set()
        self.by: dict[int, str] = {}
        for _ in range(workers):
            self.start()
        self.feed()

    def start(self) -> None:
        number = next(self.names)
        self.plan.join(f"w{number}", number)
        self.idle_since[f"w{number}"] = self.clock

    def feed(self) -> None:
        for count in (1, 2):
            for name in list(self.idle_since):
                if name in self.told_to_end or len(self.plan.given(name)) >= count:
                    continue
                if not self.plan.take(name):
                    self.told_to_end.add(name)
                    assert not self.holds_a_second_spec()
        for name in self.idle_since:
            given = self.plan.given(name)
            if name not in self.running and given and (len(given) > 1 or name in self.told_to_end):
                self.running[name] = given[0]
                heapq.heappush(self.events, (self.clock + self.seconds[given[0]], next(self.ticket), name))

    def holds_a_second_spec(self) -> bool:
        """Whether a worker has a spec that others could begin behind the one that it runs."""
        home, seconds_of = self.plan._home, self.plan._seconds_of
        return any(
            each.scope is not None
            and each.scope.tests
            and not each.scope.gpu
            and (seconds_of(each.scope.tests) or LEAST_SECONDS) >= LEAST_SECONDS
            and each.given
            and home[each.given[0]] is not each.scope
            for each in self.plan._workers.values()
        )

    def go(self) -> Run:
        while self.events:
            self.clock, _, name = heapq.heappop(self.events)
            test = self.running.pop(name)
            if test in self.deaths:
                assert self.plan.leave(name) == test
                del self.idle_since[name]
                self.lost.append(test)
                self.start()
            else:
                self.ran.append(test)
                self.by[test] = name
                self.plan.end(name, test, self.seconds[test])
            self.feed()
        return self


lengths = st.lists(st.lists(st.floats(0.1, 50), max_size=12), max_size=8)


@settings(deadline=None, max_examples=300)
@given(lengths, st.integers(1, 8), st.booleans(), st.data())
def test_every_test_runs_once_whoever_dies(
    scopes: list[list[float]], workers: int, known: bool, data: st.DataObject
) -> None:
    plan, seconds = distribution(scopes, known)
    everything = list(range(len(seconds)))
    deaths = data.draw(st.sets(st.sampled_from(everything))) if everything else set()
    run = Run(plan, seconds, workers, deaths).go()
    assert sorted(run.ran + run.lost) == everything
    assert set(run.lost) == deaths
    assert not plan.waiting
    assert not any(plan.given(name) for name in run.idle_since)


@settings(deadline=None, max_examples=300)
@given(lengths, st.integers(1, 6))
def test_no_run_is_much_longer_than_it_must_be(scopes: list[list[float]], workers: int) -> None:
    scopes.sort(key=sum, reverse=True)
    plan, seconds = distribution(scopes, known=True)
    run = Run(plan, seconds, workers, set()).go()
    longest = max(seconds, default=0.0)
    # Never worse than a worker that is given whole specs, plus what a worker holds.
    spec = max(map(sum, scopes), default=0.0)
    assert run.clock <= sum(seconds) / workers + spec + 2 * longest


@pytest.mark.parametrize("known", [False, True])
def test_a_spec_stays_in_one_worker_while_there_are_others(known: bool) -> None:
    plan, seconds = distribution([[5.0] * 4] * 6, known)
    run = Run(plan, seconds, 2, set()).go()
    for spec in range(4):
        assert len({run.by[test] for test in range(4 * spec, 4 * spec + 4)}) <= 2
    whole = [len({run.by[test] for test in range(4 * spec, 4 * spec + 4)}) == 1 for spec in range(6)]
    assert sum(whole) >= 4
    assert run.clock <= 5.0 * 12 + 10


def test_no_worker_idles_while_another_has_two_specs_left() -> None:
    # The first worker's last case is long; the spec it would hold behind it goes to the second.
    plan, seconds = distribution([[1.0, 100.0], [30.0, 30.0], [40.0] * 2], known=True)
    run = Run(plan, seconds, 2, set()).go()
    assert run.clock <= 141


def test_the_end_of_a_large_spec_goes_to_a_worker_that_would_idle() -> None:
    plan, seconds = distribution([[10.0] * 12, [10.0] * 2], known=True)
    run = Run(plan, seconds, 2, set()).go()
    assert run.clock <= 90
    # It is cut where the kind changes.
    cut = [test for test in range(1, 12) if run.by[test] != run.by[test - 1]]
    assert len(cut) == 1
    assert cut[0] % 2 == 0


def test_a_spec_is_not_divided_for_little() -> None:
    plan, seconds = distribution([[0.2] * 10, [0.2]], known=True)
    run = Run(plan, seconds, 2, set()).go()
    assert len({run.by[test] for test in range(10)}) == 1


def test_tests_of_a_module_stay_together() -> None:
    scopes = [Scope("test_a.py", deque(range(6)), whole=True), Scope("b.yaml", deque([6]))]
    plan = Distribution(scopes, [0] * 7)
    run = Run(plan, [10.0] * 7, 3, set()).go()
    assert len({run.by[test] for test in range(6)}) == 1


def gpu_run(workers: int, deaths: set[int] = frozenset(), **options: Any) -> tuple[Run, list[set[str]]]:  # type: ignore[assignment]
    scopes = [
        Scope(
            f"{spec}.yaml", deque(range(8 * spec + first, 8 * spec + first + 4)), gpu=first == 4, seconds=5.0
        )
        for spec in range(4)
        for first in (0, 4)
    ]
    plan = Distribution(scopes, [test // 4 for test in range(32)], **options)
    seen: list[set[str]] = []
    run = Run(plan, [5.0] * 32, workers, set(deaths))
    feed = run.feed

    def watched() -> None:
        feed()
        seen.append({name for name, test in run.running.items() if test % 8 >= 4})

    run.feed = watched  # type: ignore[method-assign]
    return run.go(), seen


@pytest.mark.parametrize("deaths", [set(), {4}, {6, 13, 30}, {4, 5, 6, 7}])
def test_one_worker_uses_the_gpu(deaths: set[int]) -> None:
    run, seen = gpu_run(3, deaths)
    assert sorted(run.ran + run.lost) == list(range(32))
    assert max(map(len, seen)) == 1


def test_more_workers_for_a_gpu_and_more_gpus() -> None:
    _, seen = gpu_run(4, per_device=2)
    assert max(map(len, seen)) == 2
    _, seen = gpu_run(4, devices=2)
    for workers in seen:
        assert len({int(name[1:]) % 2 for name in workers}) == len(workers)
    assert max(map(len, seen)) == 2
