"""What all tests of the project share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collector_of_this_file_only() -> None:
    """Set aside what there is before a file.

    torch and transformers are half a million objects. pytest collects garbage several times at the end of
    each run inside a test, and what the tests make would have all of them looked at again and again.
    """
    gc.collect()
    gc.freeze()
