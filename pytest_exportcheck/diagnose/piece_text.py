"""A tree of pieces as text."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any, cast

from ..pytrees.string_type import string_type
from .status import StatusExport, StatusExportCode

if TYPE_CHECKING:
    from .pieces import ModelDiagnoseOutput

__all__ = ["PieceText", "short_dims"]

#: How torch shows ``Dim.DYNAMIC``, in this version and in earlier ones.
_DYNAMIC = re.compile(r"<?_?DimHint[.(]DYNAMIC(?:\)|: \d+>)")


def short_dims(text: str) -> str:
    """`text` with ``DYN`` for ``Dim.DYNAMIC``."""
    return _DYNAMIC.sub("DYN", text)


class PieceText:
    """What `ModelDiagnoseOutput` shows; its attributes are documented there."""

    parent: ModelDiagnoseOutput | None
    children: list[ModelDiagnoseOutput]
    name: str
    level: int
    model: Any
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    outputs: list[tuple[Any, ...]]

    def get_export_report(self, exported_program: bool = False, fx: bool = False) -> str:
        """One line for each piece: name, class, result.

        Parameters
        ----------
        exported_program, fx:
            Add the exported program, or its graph, below each line.
        """
        rows = [
            (f"{'..' * p.level}{p.name}", type(p.model).__name__, p._status_text(), p)
            for p in cast("ModelDiagnoseOutput", self)
        ]
        first = max(len(row[0]) for row in rows) + 3
        second = max(len(row[1]) for row in rows) + 3
        lines = []
        for name, kind, text, piece in rows:
            lines.append(f"{name:{first}}{kind:{second}}{text}".rstrip())
            program = getattr(piece, "fx", None)
            indent = " " * (first + second)
            for wanted, prefix in ((exported_program, "ep"), (fx, "fx")):
                if wanted:
                    shown = program if prefix == "ep" or program is None else program.graph
                    content = str(shown) if program is not None else "-"
                    lines.append(textwrap.indent(content, f"{indent}{prefix}: "))
        return "\n".join(lines)

    def _status_text(self) -> str:
        status: StatusExport | None = getattr(self, "exporter_status", None)
        if status is not None:
            return status.pretty_text()
        owner = self.parent
        while owner is not None:
            above: StatusExport | None = getattr(owner, "exporter_status", None)
            if above is not None:
                whole = above.is_ok() and StatusExportCode.CHILDC not in above.status
                return "OK as part of its owner" if whole else "not tried"
            owner = owner.parent
        return "not tried"

    def pretty_text(
        self,
        with_dynamic_shape: bool = False,
        with_shape: bool = True,
        with_min_max: bool = True,
        with_device: bool = True,
        with_inputs: bool = True,
    ) -> str:
        """The tree with the inputs (``>``) and outputs (``<``) of every piece."""
        style = {"with_shape": with_shape, "with_min_max": with_min_max, "with_device": with_device}
        indent = "    " * self.level
        shapes = f"DS={self._shapes_text()}" if with_dynamic_shape else ""
        if not self.children and not with_inputs:
            middle = f": {shapes}" if shapes else ""
            return f"{indent}>>> {self.name}: {type(self.model).__name__}{middle} <<<"
        lines = [f"{indent}>>> {self.name}: {type(self.model).__name__}"]
        if shapes:
            lines.append(f"{indent}  {shapes}")
        if with_inputs:
            lines += [f"{indent}  > {string_type(given, **style)}" for given in self.inputs]
        for child in self.children:
            lines.append(child.pretty_text(with_dynamic_shape, with_inputs=with_inputs, **style))
        if with_inputs:
            lines += [f"{indent}  < {string_type(result, **style)}" for result in self.outputs]
        return "\n".join([*lines, f"{indent}<<<"])

    def _shapes_text(self) -> str:
        try:
            return short_dims(str(cast("ModelDiagnoseOutput", self).guess_dynamic_shapes()))
        except ValueError as error:
            return f"none: {error}"
