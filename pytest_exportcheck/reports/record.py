"""The record of a case, and the boundary that makes it plain.

A value of any other type than None, bool, int, float, str, list and dict ends a whole xdist run, so that
everything that travels on a test report passes `to_plain`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..user_files import with_user_files

if TYPE_CHECKING:
    from ..cases import CaseId
    from ..session import RunningCase

__all__ = ["DEVICE_NAME", "case_fields", "case_record", "json_ready", "plain_text", "sort_key", "to_plain"]

#: Notes of the engine for the pytest side.
_NOT_RECORDED = ("proposed_golden", "golden_refused")

#: Travels with the record of a case to the controller, which collects it in the environment.
DEVICE_NAME = "device_name"

#: Larger arrays are described, not listed.
_MAX_ITEMS = 1000


def to_plain(value: Any) -> Any:
    """`value` as None, bool, int, float, str, list or dict with str keys, all the way down.

    Scalars of numpy and torch become Python's, small arrays lists, enums their values, dataclasses and
    mappings dicts, sets sorted lists, anything else its text. Floats that are not finite stay floats.
    """
    return _plain(value, ())


def _plain(value: Any, parents: tuple[int, ...]) -> Any:
    # Exact types first: numpy.float64 is a float, and an IntEnum an int, that xdist cannot send.
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return plain_text(with_user_files(value))
    if id(value) in parents:
        return "<cycle>"
    parents = (*parents, id(value))
    if isinstance(value, enum.Enum):
        return _plain(value.value, parents)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, parents) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, parents) for item in value]
    if isinstance(value, Set):
        return [_plain(item, parents) for item in sorted(value, key=str)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name), parents) for field in dataclasses.fields(value)
        }
    if isinstance(value, str):
        return plain_text(with_user_files(str.__str__(value)))
    for base in (int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, PurePath):
        return plain_text(value.as_posix())
    return _array(value, parents)


def _array(value: Any, parents: tuple[int, ...]) -> Any:
    """A numpy or torch array or scalar, recognised by what it can do; anything else as text."""
    try:
        if hasattr(value, "tolist") and hasattr(value, "shape"):
            if math.prod(value.shape) > _MAX_ITEMS:
                return f"<{value.dtype} {list(value.shape)}>"
            return _plain(value.tolist(), parents)
        return plain_text(with_user_files(str(value)))
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _key(key: Any) -> str:
    plain = _plain(key, ())
    return plain if isinstance(plain, str) else str(plain)


def plain_text(text: str) -> str:
    """`text` with lone surrogates escaped; they cannot be encoded, neither by xdist nor in a file."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_ready(value: Any) -> Any:
    """A plain value with ``nan``, ``inf`` and ``-inf`` as strings: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    return value


def case_fields(case: CaseId) -> dict[str, Any]:
    """The identity of a case as it stands in every record."""
    return dataclasses.asdict(case)


def case_record(
    running: RunningCase, verdict: str, message: str | None, error: BaseException | None
) -> dict[str, Any]:
    """The record of a test that ended with `verdict`: what the engine noted, then what pytest knows."""
    noted = {key: value for key, value in running.record.items() if key not in _NOT_RECORDED}
    durations = {**running.durations(), **(noted.pop("durations", None) or {})}
    facts = getattr(error, "facts", None)
    return {
        **noted,
        **({"facts": facts} if facts else {}),
        **case_fields(running.planned.case),
        "nodeid": running.nodeid,
        "verdict": verdict,
        "stage": None if verdict == "skip" else running.stage,
        "durations": durations,
        "message": message,
    }


def sort_key(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The order of records in reports: by spec, shapes check first, then axis by axis."""
    return tuple(
        str(record.get(key) or "")
        for key in ("spec", "device", "dtype", "exporter", "patch_mode", "graph", "nodeid")
    )
