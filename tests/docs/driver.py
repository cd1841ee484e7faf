"""Runs commands and snippets of the documentation with the real engine, in one process.

``python driver.py STEPS RESULTS``: STEPS is a JSON list; RESULTS becomes a JSON mapping of ids to
``{"status": ..., "output": ...}``. One process for all, because importing torch and the exporters takes
longer than most of the steps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_exportcheck import cli, cli_validate


def command(line: str) -> int:
    """`pytest ...` or `exportcheck ...`; their exit status."""
    name, *arguments = shlex.split(line)
    if name == "exportcheck":
        return cli.main(arguments)
    if name == "pytest":
        return int(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *arguments]))
    raise ValueError(f"no such command here: {line}")


def _pytest_of_validate(arguments: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
    """For `subprocess.run` in `exportcheck validate`, which starts pytest."""
    assert arguments[1:3] == ["-m", "pytest"]
    known = dict(os.environ)
    os.environ.update(env)
    try:
        return SimpleNamespace(
            returncode=int(pytest.main(["-p", "no:xdist", "--no-confirm", *arguments[3:]]))
        )
    finally:
        os.environ.clear()
        os.environ.update(known)


def run(step: dict[str, Any]) -> int:
    """One step; raises what a snippet raises."""
    os.chdir(step["folder"])
    if step["kind"] == "file":
        path = Path(step["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step["text"], encoding="utf-8")
        return 0
    if step["kind"] == "sh":
        return command(step["text"])
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for part in ("before", "text", "after"):
        exec(compile(step[part], f"{step['id']} ({part})", "exec"), namespace)
    return 0


def main(steps: str, results: str) -> None:
    """All steps, in their order; one that fails does not stop the others."""
    cli_validate.subprocess = SimpleNamespace(run=_pytest_of_validate)
    done = {}
    written_to = Path(results).resolve()
    for step in json.loads(Path(steps).read_text(encoding="utf-8")):
        written = io.StringIO()
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            try:
                status = run(step)
            except BaseException:
                traceback.print_exc(file=written)
                status = -1
        done[step["id"]] = {"status": status, "output": written.getvalue()}
        written_to.write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    sys.path.pop(0)
    main(*sys.argv[1:])
