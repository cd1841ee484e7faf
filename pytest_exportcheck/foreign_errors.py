"""What foreign code raises (a model, an exporter, a runtime), as the failure of a stage."""

from __future__ import annotations

import os
import re
import traceback

from .errors import ExportCheckError, error_class
from .tracebacks import OWN, frame_line, is_machinery

__all__ = ["refusal"]

#: What an adapter raises where an exporter is not what it was written for.
_OF_ADAPTERS = (AttributeError, ImportError, KeyError, NameError, TypeError)

#: torch.onnx colours its messages whether or not anybody reads them on a terminal.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def refusal(error: BaseException, stage: str, what: str) -> ExportCheckError:
    """The failure of foreign code at `stage`: its first line, then as much of it as a person reads."""
    if isinstance(error, SystemExit):
        return error_class(stage)(f"{what}: sys.exit({error.code!r}) was called", details=_places(error))
    # torch.onnx wraps the reason several times; the innermost one says what happened.
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    texts = [[line for line in _COLOURS.sub("", str(link)).splitlines() if line.strip()] for link in chain]
    first = texts[-1][0] if texts[-1] else "no message"
    error = chain[-1]
    lines = [*texts[-1][1:15], *(line for text in texts[:-1] for line in text[:15])]
    details = [*dict.fromkeys(line for line in lines if line != first), *_places(chain[0])]
    return error_class(stage)(f"{what}: {type(error).__name__}: {first}", details=details)


def _places(error: BaseException) -> list[str]:
    """Where it was raised: the last frame in the model's or the user's code, and the raising one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return []
    own = [frame for frame in frames if not is_machinery(frame.filename)]
    shown = [*own[-1:], frames[-1]] if own[-1:] != frames[-1:] else own[-1:]
    lines = [frame_line(frame) for frame in shown]
    if isinstance(error, _OF_ADAPTERS) and frames[-1].filename.startswith(f"{OWN}exporters{os.sep}"):
        lines.append(
            "this was raised in pytest-exportcheck's adapter of the exporter, which may not know the "
            "installed version: it says nothing of the model, please report it"
        )
    return lines
