"""The clock of a case: which stage runs, and what each of them took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from .errors import ExportCheckError
from .foreign_errors import refusal

__all__ = ["Stages"]


class Stages:
    """Tells the caller which stage runs, and adds up wall and CPU seconds per stage."""

    def __init__(self, enter: Callable[[str], None], record: dict[str, Any]) -> None:
        self._enter = enter
        self._durations: dict[str, dict[str, float]] = record.setdefault("durations", {})
        self.current = ""
        self._began = (0.0, 0.0)

    def __call__(self, name: str) -> None:
        self.stop()
        self.current = name
        self._began = (time.perf_counter(), time.process_time())
        self._enter(name)

    def stop(self) -> None:
        """Close the running stage."""
        if self.current:
            spent = self._durations.setdefault(self.current, {"wall_s": 0.0, "cpu_s": 0.0})
            spent["wall_s"] += time.perf_counter() - self._began[0]
            spent["cpu_s"] += time.process_time() - self._began[1]
            self.current = ""

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """A stage within a call of foreign code; an exception that leaves the block belongs to it."""
        outer = self.current
        self(name)
        try:
            yield
        except ExportCheckError:
            raise
        except (Exception, SystemExit) as error:
            raise refusal(error, name, "the captured program cannot be converted") from error
        self(outer)
