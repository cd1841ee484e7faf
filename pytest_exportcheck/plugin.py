"""Entry point of the pytest plugin: hooks that delegate, nothing else.

pytest imports this module in every run, also in those that check no export, so that it (and `options`,
`newhooks`, `fixtures`) may import the standard library and pytest only. Everything else is imported inside
the hook that needs it.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .session import Session

#: What this process knows of the run; set by `session_of` on first use.
SESSION_KEY: pytest.StashKey[Session] = pytest.StashKey()


def session_of(config: pytest.Config) -> Session:
    """The `Session` of this run, made on first use (a marked test needs one without `--exportcheck`)."""
    if SESSION_KEY not in config.stash:
        from .session import start

        config.stash[SESSION_KEY] = start(config)
    return config.stash[SESSION_KEY]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from . import newhooks

    pluginmanager.add_hookspecs(newhooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    from .options import add_options

    add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    # A wrapper, because xdist turns "no --dist" into "load" in its own tryfirst implementation.
    if config.getoption("exportcheck"):
        from .xdist_support import choose_distribution

        choose_distribution(config)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    from . import fixtures

    config.addinivalue_line(
        "markers",
        "exportcheck(path, ...): give this test the cases of the named spec files through the fixtures "
        "export_case, observed_inputs and model_spec (paths are relative to the rootdir or to the test file)",
    )
    config.pluginmanager.register(fixtures, "exportcheck-fixtures")
    if not config.getoption("exportcheck"):
        from .options import refuse_options_without_flag

        refuse_options_without_flag(config)
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(_LateStart(config), "exportcheck-late-start")
            if config.getoption("exportcheck_baseline"):
                # A run that checks nothing is worse than the baseline too.
                session_of(config)
        return
    session_of(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    # Without the flag pytest says of a spec that is named that it is not found; xdist says nothing.
    if exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        from .options import forgotten_flag

        hint = forgotten_flag(config)
        if hint is not None:
            terminalreporter.write_line(hint, red=True)


class _LateStart:
    """Starts the session of an xdist controller for records of marked tests, in a run without the flag.

    The controller collects nothing, so that the first it sees of a marked test is its report.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "exportcheck") and SESSION_KEY not in self._config.stash:
            session_of(self._config)
            controller = self._config.pluginmanager.getplugin("exportcheck-controller")
            controller.pytest_runtest_logreport(report)  # Registered too late for this call.


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix not in (".yaml", ".yml") or not parent.config.getoption("exportcheck"):
        return None
    from .collection import collect_yaml

    return collect_yaml(file_path, parent)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from .fixtures import PARAMETRIZED

    if not PARAMETRIZED.isdisjoint(metafunc.fixturenames):
        from .collection import parametrize

        parametrize(metafunc)
