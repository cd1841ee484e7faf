"""What torch, onnxscript and the like have to say while something is tried again and again."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quietly"]


@contextlib.contextmanager
def quietly(upto: int = logging.ERROR) -> Iterator[None]:
    """No warnings, log records up to a level, and nothing on stdout and stderr of Python inside the block.

    A diagnosis repeats what failed, many times, and so does an ablation: what is raised is theirs to tell,
    and the case itself has shown the rest. What a crash writes goes to the descriptor and stays.
    """
    before = logging.root.manager.disable
    logging.disable(max(upto, before))
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
