"""Configuration of the project's own tests and of its own main job."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

# Before torch is imported anywhere: one thread per worker, and no network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["pytester"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    # The tests of a file share what is expensive: with xdist they belong to one worker. Specs are distributed
    # by the plugin.
    workers = getattr(config.option, "numprocesses", None)
    if workers and config.option.dist == "no" and not config.getoption("exportcheck"):
        config.option.dist = "loadfile"
    return (yield)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs pytest over the real engine without importing it again each time."""
    from warm_python import WarmPython

    warm = WarmPython()
    yield warm
    warm.close()
