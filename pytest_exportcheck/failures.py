"""How a failed case reads: the location in the spec, then `E` lines, no Python traceback.

Built from pytest's own representation classes, because only those survive xdist's serialization and give
the short summary, the JUnit message and GitHub's annotations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest._code.code import (
    ReprEntry,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)

from .errors import ExportCheckError
from .filepaths import relative_text
from .reports.record import plain_text
from .reports.torch_advice import left_out, without_advice
from .user_files import with_user_files

__all__ = [
    "accept_command",
    "error_lines",
    "from_here",
    "representation",
    "reproduce_command",
    "reproduce_line",
    "update_command",
]


def representation(
    file: str, line: int, kind: str, lines: Sequence[str], traceback: Any = None, one_line: bool = False
) -> ReprExceptionInfo:
    """A failure at `file`:`line` that shows `lines`; the first one is also the summary's and JUnit's message.

    `traceback` is an existing representation whose entries are shown before, for ``-vv``. With `one_line`
    nothing is left but the message, which pytest prints itself, for ``--tb=line``.
    """
    shown = [plain_text(with_user_files(text)) for whole in lines for text in (whole.splitlines() or [""])]
    entries: list[Any] = list(getattr(getattr(traceback, "reprtraceback", None), "reprentries", ()))
    entries.append(
        ReprEntry(
            lines=[f"E   {text}".rstrip() for text in shown],
            reprfuncargs=None,
            reprlocals=None,
            reprfileloc=ReprFileLocation(path=file, lineno=line, message=kind),
            style="short",
        )
    )
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback(reprentries=[] if one_line else entries, extraline=None, style="short"),
        reprcrash=ReprFileLocation(path=file, lineno=line, message=shown[0] if shown else kind),
    )


def error_lines(error: ExportCheckError, advice: bool = True) -> list[str]:
    """``stage compare: ...`` and the details, indented; `advice`: torch's own too."""
    details = [line for detail in error.details for line in (detail.splitlines() or [""])]
    shown = details if advice else without_advice(details)
    return [error.headline, *(f"  {line}" for line in (*shown, *left_out(len(details) - len(shown))))]


def update_command(config: pytest.Config, nodeid: str) -> str:
    """The command that accepts the shapes of the test's spec."""
    path = _quote(from_here(config, nodeid.split("::")[0]))
    return f"pytest --exportcheck {_configuration(config, [nodeid])}{path} --update-shapes"


def accept_command(config: pytest.Config, specs: Sequence[str], given: Sequence[str] | None) -> str:
    """The command that accepts the shapes of several specs, which are ids of nodes.

    `given`: paths of the command line that hold these specs and no other whose shapes would change.
    """
    where = [from_here(config, spec) for spec in specs] if given is None else given
    paths = "".join(f"{_quote(path)} " for path in where)
    return f"pytest --exportcheck {_configuration(config, specs)}{paths}--update-shapes"


def reproduce_line(config: pytest.Config, nodeid: str, before: Sequence[str] = ()) -> str:
    """The line of a failure with `reproduce_command`."""
    return f"reproduce:  {reproduce_command(config, nodeid, before)}"


def reproduce_command(config: pytest.Config, nodeid: str, before: Sequence[str] = ()) -> str:
    """The command that runs this one test again, after the tests `before`."""
    flag = "--exportcheck " if config.getoption("exportcheck") else ""
    if config.getoption("exportcheck_stage_timeout"):
        flag += f"--stage-timeout={config.getoption('exportcheck_stage_timeout'):g} "
    elif config.getoption("exportcheck_isolate"):
        flag += "--isolate "
    if config.getoption("exportcheck_no_share"):
        flag += "--no-share "
    flag += _configuration(config, [*before, nodeid])
    tests = " ".join(f'"{from_here(config, each)}"' for each in (*before, nodeid))
    return f"pytest {flag}{tests}"


def _configuration(config: pytest.Config, nodeids: Sequence[str]) -> str:
    """Options without which pytest would find another configuration: one was named, or tests are outside."""
    paths = [nodeid.partition("::")[0] for nodeid in nodeids]
    outside = any(path.startswith("../") or os.path.isabs(path) for path in paths)
    if not outside and config.getoption("inifilename", None) is None:
        return ""
    here = config.invocation_params.dir
    shown = [f"--rootdir={_quote(relative_text(config.rootpath, here))} "]
    if config.inipath is not None:
        file = str(config.inipath)
        shown.append(f"-c {file if file == os.devnull else _quote(relative_text(config.inipath, here))} ")
    return "".join(shown)


def from_here(config: pytest.Config, nodeid: str) -> str:
    """`nodeid` relative to where pytest was started, so that the command can be pasted there."""
    path, separator, rest = nodeid.partition("::")
    here = config.invocation_params.dir
    if here != config.rootpath:
        path = relative_text(config.rootpath / path, here)
    return path + separator + rest


def _quote(path: str) -> str:
    return f'"{path}"' if " " in path else path
