"""What the commands of `exportcheck` share: wrong input is said in one line, files are written whole."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["Wrong", "write_file"]


class Wrong(click.ClickException):
    """Wrong input: the exit status of wrong usage."""

    exit_code = 2


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
