"""What is running now, and for how long, on a terminal that somebody looks at.

Written behind what pytest has written of the line, and taken away again before pytest goes on. Tests run with
their output captured, so that this has a descriptor of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, TextIO

import pytest

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Progress", "progress_file"]

#: A stage that takes less is not shown.
AFTER_S = 3.0

#: How often it is written.
EVERY_S = 1.0

#: With less room on the line nothing is shown.
_LEAST_ROOM = 16

_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"


def progress_file(config: pytest.Config) -> TextIO | None:
    """The terminal, ``None`` where progress is not wanted or cannot be shown.

    Called while pytest captures nothing: afterwards the descriptors of the process are not the terminal's.
    """
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if (
        terminal is None
        or getattr(config, "workerinput", None) is not None
        or config.getoption("verbose") < 0
        or config.getoption("capture") == "no"
        or os.environ.get("TERM", "dumb") == "dumb"
        or "CI" in os.environ
    ):
        return None
    try:
        if not sys.stdout.isatty():
            return None
        return open(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="replace")
    except (OSError, ValueError, AttributeError):
        return None


class Progress:
    """Registered in the process that the user started."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._shown = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exportcheck-progress", daemon=True)
        session.config.add_cleanup(self._close)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        self._file = progress_file(self._session.config)
        if self._file is not None:
            self._thread.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self) -> Generator[None, None, None]:
        with self._lock:
            self._erase()
            yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._ended.set()
        with self._lock:
            self._erase()

    def _close(self) -> None:
        self._stop()
        if self._thread.is_alive():
            self._thread.join()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            with self._lock:
                if not self._ended.is_set():
                    self._show()

    def _show(self) -> None:
        terminal = self._session.config.get_terminal_writer()
        room = terminal.fullwidth - terminal.width_of_current_line - 2
        text = self._text(room)
        if text is None:
            self._erase()
        else:
            self._write(f"{_SAVE} {text}{_ERASE}{_RESTORE}")
            self._shown = True

    def _text(self, room: int) -> str | None:
        """What fits: the stage and its seconds before the name of the case."""
        found = self._session.long_stages(AFTER_S)
        if not found or room < _LEAST_ROOM:
            return None
        seconds, stage, case = found[0]
        text = f"{stage} {seconds:.0f} s"
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        for each in (f" {case}", more):
            text += each if len(text) + len(each) <= room else ""
        return text[:room]

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError):
            # The terminal is gone; pytest will find out for itself.
            self._ended.set()
