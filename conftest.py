"""Configuration of the project's own tests and of its own main job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import _pytest.pytester
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


#: Packages that a process can import once: their operators, or those of a module of theirs, cannot be
#: registered again.
_ONCE = {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "torchvision", "transformers"}


class _ModulesOnce(_pytest.pytester.SysModulesSnapshot):
    """pytester forgets what a run in this process imported, but for what cannot be imported again."""

    def __init__(self, preserve: Callable[[str], bool]) -> None:
        def is_kept(name: str) -> bool:
            # What a test put in the place of torch is no module.
            once = name.partition(".")[0] in _ONCE and isinstance(sys.modules[name], ModuleType)
            return once or preserve(name)

        super().__init__(is_kept)


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """pytest's own, whose runs in this process leave what cannot be imported twice."""
    monkeypatch.setattr(_pytest.pytester, "SysModulesSnapshot", _ModulesOnce)
    return pytester


@pytest.fixture(scope="session")
def warm_plugin() -> Iterator[WarmPython]:
    """Starts pytest and its workers without importing pytest and the plugin again each time."""
    from warm_python import WarmPython

    warm = WarmPython("plugin")
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs pytest over the real engine without importing it again each time."""
    from warm_python import WarmPython

    warm = WarmPython()
    yield warm
    warm.close()
