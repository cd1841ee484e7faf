"""Specs without accepted shapes: told after what really fails, with one command that accepts them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from .failures import accept_command
from .plurals import counted
from .reports.matrix import is_case
from .reports.totals import is_absent
from .selection import NARROWING

__all__ = ["NewShapes"]

_BUILTIN = "test_dynamic_shapes"


class NewShapes:
    """Registered in the controller only. `records` is the controller's list."""

    def __init__(self, config: pytest.Config, records: Sequence[Mapping[str, Any]]) -> None:
        self._config = config
        self._records = records

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        # Before the failures are listed, and the short summary after them.
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None and "failed" in terminal.stats:
            terminal.stats["failed"].sort(key=_is_absent_report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Any:
        result = yield
        quiet = self._config.getoption("verbose") < -1 or self._config.getoption("no_summary", False)
        command = None if quiet or self._config.getoption("collectonly") else self.command()
        if command is not None:
            terminalreporter.write_line(command, yellow=True)
        return result

    def command(self) -> str | None:
        """What accepts the shapes of every spec that has none; ``None`` unless there are several."""
        absent = [record for record in self._records if is_absent(record)]
        specs = list(dict.fromkeys(record["nodeid"].split("::")[0] for record in absent))
        if len(specs) < 2 or not all(spec.endswith((".yaml", ".yml")) for spec in specs):
            return None
        others = [record for record in self._records if not is_case(record) and not is_absent(record)]
        paths = self._as_given() if all(record["verdict"] == "pass" for record in others) else None
        command = f"{accept_command(self._config, specs, paths)} -k {_BUILTIN}"
        found = f"exportcheck: {counted(len(specs), 'spec')} without accepted shapes"
        return f"{found}; read them above, then accept them all: {command}"

    def _as_given(self) -> list[str] | None:
        """The folders and files of the command line; ``None`` where some tests of them were left out."""
        config = self._config
        arguments = list(config.args) if config.args_source is config.ArgsSource.ARGS else []
        narrowed = any(config.getoption(option, None) for option in (*NARROWING, "maxfail"))
        return None if narrowed or any("::" in argument for argument in arguments) else arguments


def _is_absent_report(report: Any) -> bool:
    record = getattr(report, "exportcheck", None)
    return record is not None and is_absent(record)
