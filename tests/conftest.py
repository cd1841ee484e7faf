"""What all tests of the project share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pytest_exportcheck.runtest import _quiet_torch_trace
from tests.warm_python import SELDOM


@pytest.fixture(autouse=True, scope="session")
def _few_full_collections() -> Iterator[None]:
    """Garbage in cycles waits longer; a test that is about it collects by itself."""
    was = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    yield
    gc.set_threshold(*was)


@pytest.fixture(autouse=True, scope="module")
def _collector_of_this_file_only() -> None:
    """Set aside what there is before a file.

    torch and transformers are half a million objects. pytest collects garbage several times at the end of
    each run inside a test, and what the tests make would have all of them looked at again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """As in the tests of specs: pytest's handlers would make torch compute the trace of every export."""
    _quiet_torch_trace()
