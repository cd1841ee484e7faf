"""An interpreter that has imported the engine, or the plugin, for tests that need it in another process.

A new interpreter takes some six seconds to import torch and transformers, and one to import pytest and its
plugins. `WarmPython.executable` stands in for ``sys.executable``: its command runs in a fork of one process
that has imported them and done nothing. What was imported is all that the processes share, as with
`pytest_exportcheck.fresh`. What such a process starts by its own ``sys.executable``, such as workers of
xdist, is warm too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = ["SELDOM", "WarmPython"]

#: Thresholds of the collector that let it look at all objects after millions of new ones, and not a few times
#: in each export, which is a sixth of the CPU time.
SELDOM = (10_000, 10, 20)

_ALONE = "WARM_PYTHON_ALONE"

#: An interpreter's place: hands over its command and its standard streams, and ends as the command does.
_STAND_IN = """#!{python} -IS
import json, os, socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.connect({address!r})
request = {{"args": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
request = json.dumps(request).encode()
socket.send_fds(channel, [len(request).to_bytes(8, "big")], [0, 1, 2])
channel.sendall(request)
os.closerange(0, 3)
status = int(channel.recv(16) or 70)
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class WarmPython:
    """Starts the process to fork from when it is needed first.

    `kind` is what that process imports: ``"engine"``, torch and all that an export needs, or ``"plugin"``,
    pytest with its plugins and our side of pytest, and no torch.
    """

    def __init__(self, kind: str = "engine") -> None:
        self._kind = kind
        self._process: subprocess.Popen[str] | None = None
        self._folder = ""

    @property
    def executable(self) -> str:
        """To be started like ``sys.executable``: with ``-c CODE``, ``-m MODULE`` or a file."""
        path = os.path.join(self._folder, "python")
        if self._process is None:
            self._folder = tempfile.mkdtemp(prefix="warm-")
            path, address = (os.path.join(self._folder, name) for name in ("python", "channel"))
            Path(path).write_text(_STAND_IN.format(python=sys.executable, address=address))
            os.chmod(path, 0o755)
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._kind, path, address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline(), "the process to fork from has ended"
        return path

    def pytest(self, args: Sequence[str], timeout: float, *, alone: bool = False) -> pytest.RunResult:
        """``python -m pytest ARGS`` with the environment and the folder of this process.

        `alone`: what it starts by its own ``sys.executable`` is a new interpreter.
        """
        began = time.perf_counter()
        command = [self.executable, "-m", "pytest", "-p", "no:hypothesispytest", *args]
        with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+") as err:
            # Files: a process that outlives the run must not hold it up.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=timeout,
                check=False,
                env={**os.environ, _ALONE: "1"} if alone else None,
            )
            outlines, errlines = [(file.seek(0), file.read().splitlines())[1] for file in (out, err)]
        print(*outlines, *errlines, sep="\n")
        return pytest.RunResult(done.returncode, outlines, errlines, time.perf_counter() - began)

    def close(self) -> None:
        """End the process to fork from, and all that it was asked for."""
        if self._process is not None:
            self._process.communicate()
            shutil.rmtree(self._folder)


#: Our side of pytest that is imported by need, and what a worker of xdist runs.
_BY_NEED = (
    "pytest_exportcheck.collection",
    "pytest_exportcheck.controller",
    "pytest_exportcheck.fresh.client",
    "pytest_exportcheck.fresh.server",
    "pytest_exportcheck.fresh.work",
    "pytest_exportcheck.handles",
    "pytest_exportcheck.judge",
    "pytest_exportcheck.runtest",
    "pytest_exportcheck.session",
    "pytest_exportcheck.spec.load",
    "execnet.gateway_base",
    "xdist.dsession",
    "xdist.remote",
    "numpy",
)


def _import_plugin() -> None:
    for name in _BY_NEED:
        import_module(name)
    assert "torch" not in sys.modules


def _import_engine() -> None:
    from pytest_exportcheck.fresh.warm import warm_up

    _import_plugin()
    warm_up()


_IMPORT: dict[str, Callable[[], None]] = {"engine": _import_engine, "plugin": _import_plugin}


@contextlib.contextmanager
def _as_pytest_imports() -> Iterator[None]:
    """With the hook that rewrites assertions: pytest warns of modules of plugins that lack it."""
    options = {"plugins": ["no:hypothesispytest", "no:cacheprovider"], "noconftest": True}
    config = pytest.Config.fromdictargs({**options, "rootdir": os.getcwd(), "inifilename": os.devnull}, [])
    try:
        yield
    finally:
        config._ensure_unconfigure()


def _serve(kind: str, executable: str, address: str) -> None:
    os.chdir(os.path.dirname(address))  # Nothing there is to be read.
    with _as_pytest_imports():
        _IMPORT[kind]()
    gc.collect()
    gc.freeze()  # The collectors of the forks would look at all of it, and copy it.
    gc.set_threshold(*SELDOM)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    running: dict[socket.socket, int] = {}
    while True:
        wait = 0.02 if running else None
        readable, _, _ = select.select([0, listener, *running], [], [], wait)
        for channel, child in list(running.items()):
            # The stand-in says nothing more: it was killed.
            unwanted = 0 in readable or channel in readable
            if unwanted:
                _kill(child)
            ended, raw = os.waitpid(child, 0 if unwanted else os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    channel.sendall(str(os.waitstatus_to_exitcode(raw)).encode())
                del running[channel]
                channel.close()
        if 0 in readable:
            return
        if listener in readable:
            channel, _ = listener.accept()
            header, streams, _, _ = socket.recv_fds(channel, 8, 3)
            with channel.makefile("rb") as source:
                request = json.loads(source.read(int.from_bytes(header, "big")))
            child = os.fork()
            if child == 0:
                for other in (listener, channel, *running):
                    other.close()
                _run(request, streams, executable)
            for stream in streams:
                os.close(stream)
            running[channel] = child


def _kill(child: int) -> None:
    # Both: a child that has not yet come to `setsid` leads no group.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _run(request: dict[str, Any], streams: list[int], executable: str) -> NoReturn:
    status = 70
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, errors=errors, closefd=False)  # noqa: SIM115
            for number, errors in ((1, "strict"), (2, "backslashreplace"))
        )
        if os.environ.pop(_ALONE, None) is None:
            sys.executable = executable
        try:
            args = request["args"]
            _command(args[1:] if args[0] == "-u" else args)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            status = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


def _command(args: list[str]) -> None:
    """What an interpreter does with its arguments."""
    kind, rest = args[0], args[1:]
    first = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(kind)))
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = {first, *named, os.path.dirname(__file__)}
    sys.path[:] = [first, *named, *(path for path in sys.path if path not in known)]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
