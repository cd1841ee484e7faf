"""The pytest process's side of fresh processes: starts them, follows a case, ends it when its time is up."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .messages import LOST_CLIENT, Failure, Work, decode, encode, warning_filters

if TYPE_CHECKING:
    import pytest

__all__ = ["FreshProcesses", "Outcome", "describe_exit"]

#: For reading the configuration, the conftest files and torch.
_START_SECONDS = 600.0

#: Between the traceback that a hanging case writes about itself and its end.
_GRACE_SECONDS = 1.0

#: For a process that was killed, or has sent its result, to be gone.
_END_SECONDS = 10.0

#: Frames from here on say how a process of a case was started.
_WORK = str(Path(__file__).with_name("work.py"))

_POLL_SECONDS = 0.2
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 100_000


@dataclass(frozen=True)
class Outcome:
    """What became of a case in a fresh process.

    Attributes
    ----------
    failure:
        ``None``: it passed.
    record:
        What the engine noted about the case.
    stdout, stderr:
        The end of what it printed.
    set_up_failed:
        There was no process: the failure says why, and nothing about the case.
    """

    failure: Failure | None
    record: dict[str, Any] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""
    set_up_failed: bool = False


class SetUpError(Exception):
    """A fresh process could not be set up; the text says why."""


class FreshProcesses:
    """Runs cases in fresh processes, one at a time. Nothing is started before the first.

    Attributes
    ----------
    started:
        How many processes were started so far: one for many cases where forking is possible.
    why_no_fork:
        Why every case needs an interpreter of its own, ``None`` as long as it does not.

    Parameters
    ----------
    config:
        Its options, arguments and root directory are those of the new processes.
    environment, path:
        Environment variables and ``sys.path`` for them: as they were before any test ran.
    """

    def __init__(self, config: pytest.Config, environment: Mapping[str, str], path: list[str]) -> None:
        self._setup = _setup_of(config)
        self._environment = dict(environment)
        self._path = list(path)
        self._server: _Server | None = None
        self._folder: Path | None = None
        self._number = 0
        self._broken: SetUpError | None = None
        self.started = 0
        self.why_no_fork: str | None = None

    def run(self, work: Work, enter: Callable[[str], None], limit: float | None) -> Outcome:
        """Run `work`; `enter` hears of its stages. A stage that takes more than `limit` seconds ends it."""
        try:
            server = self._find_server(fork=work.case.device == "cpu")
        except SetUpError as error:
            what, *details = str(error).splitlines()
            failure = Failure("crash", "load", "CrashError", what, tuple(details))
            return Outcome(failure, set_up_failed=True)
        try:
            return self._follow(server, work, enter, limit)
        except BaseException:
            # Ctrl-C, or a time limit of somebody else's: the case must not go on without us.
            self._drop(server)
            raise
        finally:
            if not server.forks:
                self._drop(server)

    def close(self) -> None:
        """End every process."""
        if self._server is not None:
            self._drop(self._server)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _find_server(self, fork: bool) -> _Server:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="exportcheck-fresh-"))
        # CUDA does not survive a fork, so that a case on a GPU gets an interpreter of its own.
        if not fork or self.why_no_fork is not None:
            return self._start(fork=False)
        if self._server is not None and self._server.ended() is not None:
            self._drop(self._server)
        if self._server is None:
            server = self._start(fork=True)
            if not server.forks:
                self.why_no_fork = server.why_no_fork
                return server
            self._server = server
        return self._server

    def _start(self, fork: bool) -> _Server:
        assert self._folder is not None
        if self._broken is not None:
            raise self._broken
        self.started += 1
        server = _Server(self._environment, self._path, self._folder / f"server-{self.started}")
        try:
            server.set_up({**self._setup, "fork": fork})
        except BaseException as error:
            server.end()
            if isinstance(error, SetUpError):
                self._broken = error  # The next one would fail like it.
            raise
        return server

    def _drop(self, server: _Server) -> None:
        server.end()
        if server is self._server:
            self._server = None

    def _follow(
        self, server: _Server, work: Work, enter: Callable[[str], None], limit: float | None
    ) -> Outcome:
        assert self._folder is not None
        self._number += 1
        files = [self._folder / f"case-{self._number}-{name}" for name in ("stdout", "stderr")]
        request = {
            "work": work.to_plain(),
            "stdout": str(files[0]),
            "stderr": str(files[1]),
            "limit": limit,
            "filters": warning_filters(),
        }
        stage, result, timed_out = "load", None, False
        deadline = None if limit is None else time.monotonic() + limit + _GRACE_SECONDS
        said = server.log_size()
        server.send(request)
        while True:
            message = server.receive(deadline)
            event = "deadline" if message is None else message["event"]
            if message is None:
                if timed_out or result is not None:
                    self._drop(server)  # It did not even die.
                    status: int | None = None
                    break
                timed_out = True
                server.kill_case()
                deadline = time.monotonic() + _END_SECONDS
            elif event == "stage" and not timed_out:
                stage = str(message["stage"])
                enter(stage)
                deadline = None if limit is None else time.monotonic() + limit + _GRACE_SECONDS
            elif event == "result" and not timed_out:
                result = message
                deadline = time.monotonic() + _END_SECONDS
            elif event == "exit":
                status = message["status"]
                break
        stdout, stderr = [_read_end(file) for file in files]
        for file in files:
            # A process that does not die on Windows keeps its files; they go with the folder.
            with contextlib.suppress(OSError):
                file.unlink()
        if result is not None:
            shown = result["failure"]
            failure = Failure.from_plain(shown) if shown is not None else None
            return Outcome(failure, result["record"], stdout, stderr)
        if timed_out:
            kind, error, message_ = (
                "timeout",
                "StageTimeoutError",
                f"had not ended after {limit:g} s and was killed",
            )
        else:
            kind, error, message_ = "crash", "CrashError", describe_exit(status)
        # What it said before it had a file of its own, or where that was closed, is in the server's.
        details = tuple(_last_lines(stderr) or _last_lines(server.said_since(said)))
        stderr = _without_frames(stderr)
        if status == LOST_CLIENT and details:
            message_ += f": {details[-1].strip()}"
        return Outcome(Failure(kind, stage, error, message_, details), {}, stdout, stderr)


class _Server:
    """One process that serves cases, and the thread that reads what it says."""

    def __init__(self, environment: Mapping[str, str], path: list[str], log: Path) -> None:
        self._log = log
        code = f"import sys; sys.path[:] = {path!r}; from pytest_exportcheck.fresh.server import main; main()"
        with open(log, "wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                # A group of its own: the terminal's Ctrl-C is for us, and we end it.
                start_new_session=True,
            )
        self.forks = False
        self.why_no_fork: str | None = None
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True, name="exportcheck-fresh")
        self._reader.start()

    def _read(self) -> None:
        source: IO[bytes] | None = self._process.stdout
        assert source is not None
        with contextlib.suppress(OSError, ValueError):
            for line in source:
                message = decode(line)
                if message is not None and "event" in message:
                    self._messages.put(message)

    def set_up(self, setup: Mapping[str, Any]) -> None:
        """Have it read the configuration; `SetUpError` if it cannot."""
        self.send(setup)
        message = self.receive(time.monotonic() + _START_SECONDS)
        if message is None:
            raise SetUpError(f"a fresh process was not ready after {_START_SECONDS:g} s")
        if message["event"] == "exit":
            lines = [f"a fresh process could not be set up: {describe_exit(message['status'])}"]
            raise SetUpError("\n".join(lines + _last_lines(_read_end(self._log))))
        if message["event"] == "failed":
            lines = [f"a fresh process could not be set up: {message['why']}", *message["details"]]
            raise SetUpError("\n".join(lines))
        self.why_no_fork = message["why_no_fork"]
        self.forks = self.why_no_fork is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a process that is gone is noticed by `receive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()

    def receive(self, deadline: float | None) -> dict[str, Any] | None:
        """The next message, ``None`` at the deadline; the end of the process is one too."""
        while True:
            wait = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
            try:
                return self._messages.get(timeout=max(wait, 0.001))
            except queue.Empty:
                status = self.ended()
            if status is not None:
                # What it said last may still be in the pipe, which a process of its own may hold open.
                self._reader.join(1.0)
                try:
                    return self._messages.get_nowait()
                except queue.Empty:
                    return {"event": "exit", "status": status}
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def log_size(self) -> int:
        """Bytes that were written to its standard error so far."""
        with contextlib.suppress(OSError):
            return self._log.stat().st_size
        return 0

    def said_since(self, size: int) -> str:
        """What was written to its standard error beyond `size` bytes."""
        with contextlib.suppress(OSError), open(self._log, "rb") as source:
            source.seek(size)
            return source.read(_SHOWN_CHARACTERS).decode("utf-8", "backslashreplace")
        return ""

    def ended(self) -> int | None:
        """The exit status, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def kill_case(self) -> None:
        """End the case that runs."""
        if self.forks:
            self.send({"event": "kill"})
        else:
            self._kill_group()

    def end(self) -> None:
        """End the process and its case."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self.forks:
            # It ends its case first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self._kill_group()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._reader.join(1.0)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def _kill_group(self) -> None:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()


def _setup_of(config: pytest.Config) -> dict[str, Any]:
    """What a process needs to read the same configuration: see `pytest.Config.fromdictargs`."""
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    options["rootdir"] = str(config.rootpath)
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    # The process shows nothing, and what is printed in it goes to files.
    options["plugins"] = [*options.get("plugins", []), "no:terminal"]
    options["capture"] = "no"
    # Nothing here shows assertions; and it warns of modules that are imported already.
    options["assertmode"] = "plain"
    return {
        "directory": str(config.invocation_params.dir),
        "options": options,
        "args": [str(argument) for argument in config.args],
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _read_end(file: Path) -> str:
    """The last part of a file's text, nothing if the file is not there."""
    try:
        with open(file, "rb") as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(max(0, size - _SHOWN_CHARACTERS))
            text = source.read().decode("utf-8", "backslashreplace")
        if size > _SHOWN_CHARACTERS:
            return f"[{size - _SHOWN_CHARACTERS} bytes before this are not shown]\n{text}"
        return text
    except OSError:
        return ""


#: How the frames begin that a signal or a time limit leaves.
_FRAMES = ("Fatal Python error", "Timeout (")


def _last_lines(stderr: str) -> list[str]:
    """The last lines, or the innermost frames of the traceback that a signal or a time limit left."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith(_FRAMES):
            shown = [line for line in lines[at:] if not line.startswith("Extension modules:")]
            ours = next((i for i, line in enumerate(shown) if _WORK in line), len(shown))
            return shown[:ours][:_SHOWN_LINES]
    return lines[-_SHOWN_LINES:]


def _without_frames(stderr: str) -> str:
    """What was said before the frames at the end, which the failure shows already."""
    lines = stderr.splitlines(keepends=True)
    starts = [at for at, line in enumerate(lines) if line.startswith(_FRAMES)]
    return "".join(lines[: starts[-1]]) if starts else stderr


def describe_exit(status: int | None) -> str:
    """How a process ended: ``killed by SIGSEGV (segmentation fault)``."""
    if status is None:
        return "the process could not be ended"
    if status >= 0:
        return f"the process ended with status {status} and without a verdict"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"killed by signal {-status}"
    text = (signal.strsignal(-status) or "").lower()
    if name == "SIGKILL":
        text = "the kernel does that when memory is out"
    return f"killed by {name} ({text})"
