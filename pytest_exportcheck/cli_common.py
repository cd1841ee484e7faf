"""What the commands of `exportcheck` share: wrong input is said in one line, files are written whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

__all__ = ["File", "Wrong", "normal", "write_file"]


class Wrong(click.ClickException):
    """Wrong input: the exit status of wrong usage."""

    exit_code = 2


class File(click.Path):
    """A path of the command line, without the detours in it (``./specs/../a.yaml``)."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return normal(Path(os.fsdecode(super().convert(value, param, ctx))))


def normal(path: Path) -> Path:
    """`path` without ``.`` and ``..``, unless a symbolic link makes another file of it."""
    shorter = Path(os.path.normpath(path))
    return shorter if os.path.realpath(shorter) == os.path.realpath(path) else path


def write_file(path: Path, text: str) -> None:
    """Write a file, or leave the old one as it is.

    Raises
    ------
    Wrong
        It cannot be written, or its folder is not there: that is a slip of the pen sooner than a wish.
    """
    from .goldens import write_atomically

    try:
        path.parent.stat()
        write_atomically(path, text)
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror or error}") from None
