"""SIGTERM ends a run as Ctrl-C does: what was found so far is still reported.

Python's default would end the process at once, with no report of the cases that ran: a CI job that is
cancelled, or whose time is up, is sent SIGTERM first.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest

__all__ = ["Terminated", "interrupt_on_sigterm"]

#: A process and its group are often signalled one after the other: the second is no request to hurry.
_SAME_REQUEST_S = 2.0


class Terminated(KeyboardInterrupt):
    """The process was asked to end. Not an `Exception`: code under test must not take it for its own."""


class _Handler:
    def __init__(self) -> None:
        self.finishing = False
        self._first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > _SAME_REQUEST_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if self._first is None:
            self._first = now
            if not self.finishing:
                raise Terminated("SIGTERM")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        # The reports are being written: the first request is being answered already.
        self.finishing = True


def _default() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def interrupt_on_sigterm(config: pytest.Config) -> None:
    """Do so until the end of the run, unless somebody else handles the signal."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    handler = _Handler()
    signal.signal(signal.SIGTERM, handler)
    config.add_cleanup(_default)
    config.pluginmanager.register(handler, "exportcheck-sigterm")
