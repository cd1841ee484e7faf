"""What a try to export one piece gave."""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CustomOpStrategy", "StatusExport", "StatusExportCode"]


class CustomOpStrategy(enum.IntEnum):
    """When submodules are replaced by custom ops, so that a piece can be judged apart from them.

    * ``NONE``: never; a piece that fails is followed by its children.
    * ``ONLY_IF_FAILING``: a piece that fails is tried again with its children replaced.
    * ``ALWAYS``: every piece becomes a custom op itself; its status still says whether it can be exported.
    * ``LOCAL``: every piece is exported with its children replaced.
    """

    NONE = 0
    ONLY_IF_FAILING = 1
    ALWAYS = 2
    LOCAL = 3


class StatusExportCode(enum.IntFlag):
    """A set of what is true of an export; combine with ``|``, ask with ``in`` or ``&``.

    * ``OK``: the exporter took the piece and the program gives eager's numbers.
    * ``FAIL``: it did not.
    * ``CHILDC``: with the children replaced by custom ops.
    * ``CUSTOM``: with the piece itself replaced by a custom op.
    * ``DISC``: the program gives other numbers.
    """

    NONE = 0
    OK = 1
    FAIL = 2
    CHILDC = 4
    CUSTOM = 8
    DISC = 16

    @types.DynamicClassAttribute
    def name(self) -> str:
        """``OK_CHILDC``; ``NONE`` for the empty set."""
        members = type(self).__members__.items()
        return "_".join(name for name, member in members if member._value_ & self._value_) or "NONE"

    def remove(self, other: StatusExportCode) -> StatusExportCode:
        """The set without `other`; nothing happens where it is not in it."""
        return StatusExportCode(self._value_ & ~other._value_)


@dataclass
class StatusExport:
    """The result for one piece.

    Attributes
    ----------
    status:
        What is true of it.
    step:
        Where it failed: ``SHAPES`` (one graph cannot serve the calls), ``CUSTOM`` (the exporter takes no
        custom ops), ``EXPORT``, ``EVAL`` (the program does not run), ``DISC``; empty if it did not.
    reason:
        The message; for ``DISC`` the worst error.
    exported:
        What the exporter made: an ExportedProgram, an ONNX program.
    note:
        What a reader should know of a result that is no failure.
    """

    status: StatusExportCode
    step: str = ""
    reason: str = ""
    exported: Any = field(default=None, repr=False)
    note: str = ""
    error: BaseException | None = None

    def is_ok(self) -> bool:
        """Whether the export succeeded."""
        return StatusExportCode.OK in self.status and StatusExportCode.FAIL not in self.status

    def pretty_text(self) -> str:
        """One line."""
        note = f" ({self.note})" if self.note else ""
        if self.is_ok():
            return f"{self.status.name} -- {type(self.exported).__name__}{note}"
        reason = self.reason.partition("\n")[0]
        if len(reason) > 100:
            reason = f"{reason[:100]}..."
        return f"{self.status.name} -- step={self.step}, reason={reason!r}{note}"
