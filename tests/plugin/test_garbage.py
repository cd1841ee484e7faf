"""What is set aside from the search for garbage, and that none of it is lost."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator

import pytest

import pytest_exportcheck.garbage as garbage_module
from pytest_exportcheck.garbage import Garbage


class Node:
    """In a cycle: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Garbage]:
    """In a process where nobody has set anything aside; whatever was imported, it is enough."""
    monkeypatch.setattr(garbage_module, "_MANY_MODULES", 1)
    gc.unfreeze()
    try:
        yield Garbage()
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # As the fixture of all tests does.


def dropped() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_what_a_spec_leaves_is_freed_though_it_was_set_aside(garbage: Garbage) -> None:
    node = Node()
    found = weakref.ref(node)
    garbage.after_case()
    assert gc.get_freeze_count() > 1000
    del node
    gc.collect()
    assert found() is not None  # set aside: nobody looks at it
    garbage.after_spec()
    assert found() is None
    assert gc.get_freeze_count() > 1000


def test_what_the_next_specs_leave_is_freed_too(garbage: Garbage) -> None:
    garbage.after_case()
    garbage.after_spec()
    for _ in range(2):
        found = dropped()
        garbage.after_case()
        garbage.after_spec()
        assert found() is None


def test_no_more_is_set_aside_before_more_is_imported(
    garbage: Garbage, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage.after_case()
    before = gc.get_freeze_count()
    kept = [Node() for _ in range(1000)]
    garbage.after_case()
    assert gc.get_freeze_count() <= before
    monkeypatch.setitem(sys.modules, "another_module", types.ModuleType("another_module"))
    garbage.after_case()
    assert gc.get_freeze_count() > before
    assert len(kept) == 1000


def test_the_collector_is_left_as_it_was_found(garbage: Garbage) -> None:
    garbage.bring_back()
    assert gc.get_freeze_count() == 0
    garbage.after_case()
    garbage.after_spec()
    garbage.bring_back()
    assert gc.get_freeze_count() == 0
    found = dropped()
    garbage.after_case()
    assert found() is None


def test_a_collector_that_is_switched_off_sets_nothing_aside(garbage: Garbage) -> None:
    gc.disable()
    found = dropped()
    garbage.after_case()
    assert found() is not None
    garbage.after_spec()
    assert found() is None
    assert gc.get_freeze_count() == 0
    assert not gc.isenabled()


def test_what_somebody_else_set_aside_stays_so(garbage: Garbage) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    found = dropped()
    garbage.after_case()
    garbage.after_spec()
    assert found() is None
    garbage.bring_back()
    # Fewer by those that were freed by their counts of references.
    assert before - 100 < gc.get_freeze_count() <= before
