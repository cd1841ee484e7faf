"""Configuration of the project's own tests and of its own main job."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
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
        # In the order of the collection, and not the file with the most tests first.
        config.option.loadscopereorder = False
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Imports torch and transformers: the collector finds nothing there, again and again.
    was = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was:
            gc.enable()


#: Files that take the longest, half a minute of a CPU and more; the others are short.
_LONG = (
    "docs/test_snippets.py",
    "diagnose/test_other_faults.py",
    "engine/test_exporters.py",
    "cases/test_cases.py",
    "engine/test_ablation.py",
    "diagnose/test_reproduction.py",
    "mutations/test_mutations.py",
    "engine/test_leaks.py",
    "authoring/test_new.py",
    "acceptance/test_fresh_processes.py",
    "diagnose/test_faults.py",
    "rewrite/test_forms.py",
    "engine/test_conversion_cache.py",
    "engine/test_capture_cache.py",
    "plugin/test_sharing.py",
    "authoring/test_commands.py",
    "rewrite/test_modes.py",
    "engine/test_conversions.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In workers of xdist the longest files come first, so that none is begun when the others have ended."""
    if not hasattr(config, "workerinput") or config.getoption("exportcheck"):
        return
    tests = Counter(item.path for item in items)
    ranks = {config.rootpath / "tests" / file: rank for rank, file in enumerate(_LONG)}
    items.sort(key=lambda item: (ranks.get(item.path, len(_LONG)), -tests[item.path]))


#: Packages that a process can import once: their operators, or those of a module of theirs, cannot be
#: registered again.
_ONCE = {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "torchvision", "transformers"}


class _ModulesOnce(_pytest.pytester.SysModulesSnapshot):
    """pytester forgets what a test, or a run inside it, imported: but for what cannot be imported again."""

    def __init__(self, preserve: Callable[[str], bool]) -> None:
        before = set(sys.modules)

        def is_kept(name: str) -> bool:
            # What was there already comes back as it was, whatever a test put in its place.
            new = name not in before and isinstance(sys.modules[name], ModuleType)
            return (new and name.partition(".")[0] in _ONCE) or preserve(name)

        super().__init__(is_kept)


def pytest_configure(config: pytest.Config) -> None:
    # Before any fixture: the one of pytester takes its first snapshot when it is made.
    patch = pytest.MonkeyPatch()
    patch.setattr(_pytest.pytester, "SysModulesSnapshot", _ModulesOnce)
    config.add_cleanup(patch.undo)


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
