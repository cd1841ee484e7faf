"""pytest over the real engine, in processes that are forked from one that has imported it and done nothing.

A new interpreter takes some six seconds to import torch and transformers. What was imported is all that the
processes share, as with `pytest_exportcheck.fresh`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = ["WarmPytest"]


class WarmPytest:
    """Runs pytest; the process to fork from is started when it is needed first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, args: Sequence[str], timeout: float) -> pytest.RunResult:
        """``python -m pytest ARGS`` with the environment and the folder of this process."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process, began = self._process, time.perf_counter()
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            request = {
                "args": list(args),
                "folder": os.getcwd(),
                "environment": dict(os.environ),
                "files": list(map(str, files)),
                "timeout": timeout,
            }
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the process to fork from has ended"
            outlines, errlines = [file.read_text(errors="replace").splitlines() for file in files]
        print(*outlines, *errlines, sep="\n")
        status = json.loads(answer)["status"]
        assert status is not None, f"pytest had not ended after {timeout} s"
        return pytest.RunResult(status, outlines, errlines, time.perf_counter() - began)

    def close(self) -> None:
        """End the process to fork from."""
        if self._process is not None:
            self._process.communicate()


def _serve() -> None:
    from pytest_exportcheck.fresh.warm import warm_up

    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        status, deadline = None, time.monotonic() + request["timeout"]
        while status is None and time.monotonic() < deadline:
            ended, raw = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if ended else None
            time.sleep(0.02)
        if status is None:
            os.killpg(child, 9)
            os.waitpid(child, 0)
        print(json.dumps({"status": status}), flush=True)


def _run(request: dict[str, Any]) -> NoReturn:
    status = 70
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        wanted = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        known = {*wanted, os.path.dirname(__file__)}
        sys.path[:] = [*wanted, *(path for path in sys.path if path not in known)]
        for descriptor, name in ((0, os.devnull), *zip((1, 2), request["files"], strict=True)):
            file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["pytest", *request["args"]]
        # What is imported already cannot be rewritten, and pytest would warn of it.
        status = int(pytest.main(["--assert=plain", "-p", "no:hypothesispytest", *request["args"]]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    _serve()
