"""The process that has imported everything and forks one process for each case.

Started by `client.py`, which talks to it over its standard input and output. Where a fork is not possible or
not safe, it serves one case itself and ends, and the next case gets a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ..reports.record import to_plain
from .messages import (
    LOST_CLIENT,
    Failure,
    Work,
    apply_warning_filters,
    decode,
    encode,
    lines_of,
    write_all,
)

__all__ = ["main"]

_POLL_SECONDS = 0.02
_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Serve the parent process until it closes the channel."""
    source, sink = _take_channel()
    _die_with_parent(signal.SIGTERM)
    lines = lines_of(source)
    setup = _next(lines)
    try:
        before = _native_threads()
        restore = _set_up(setup)
        why = _why_no_fork(setup, before)
    except BaseException as error:
        shown = traceback.format_exception(error)
        details = [line for text in shown for line in text.rstrip().splitlines()][-30:]
        _send(sink, {"event": "failed", "why": f"{type(error).__name__}: {error}", "details": details})
        os._exit(1)
    _send(sink, {"event": "ready", "why_no_fork": why})
    if why is None:
        _fork_for_each(lines, source, sink, restore)
    _serve_here(lines, source, sink, restore)


def _take_channel() -> tuple[int, int]:
    """Standard input and output for ourselves: what user code prints must not get into the channel."""
    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return source, sink


def _next(lines: Iterator[bytes]) -> dict[str, Any]:
    """The next message; ends the process if there is none."""
    for line in lines:
        message = decode(line)
        if message is not None:
            return message
    os._exit(0)


def _send(sink: int, message: Mapping[str, Any]) -> None:
    try:
        write_all(sink, encode(message))
    except OSError as error:
        _say_last(f"the channel to the pytest process is closed: {error}")
        os._exit(LOST_CLIENT)


def _say_last(text: str) -> None:
    """Write to the descriptor of standard error: ``sys.stderr`` may be anything by now."""
    with contextlib.suppress(OSError):
        write_all(2, f"{text}\n".encode("utf-8", "backslashreplace"))


def _die_with_parent(number: int) -> None:
    """Have Linux send us a signal when the parent dies, by SIGKILL for instance."""
    if _LINUX:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _native_threads() -> int:
    """Threads of this process, those of libraries included; numpy's, which take care of forks, are there."""
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _set_up(setup: Mapping[str, Any]) -> Callable[[], None]:
    """Read the configuration and the conftest files as the pytest process did; import what exports need."""
    from ..session import register_added

    os.chdir(setup["directory"])
    config = pytest.Config.fromdictargs(setup["options"], setup["args"])
    _configure_conftests(config)
    register_added(config)
    # By name: the tests of the plugin put another engine, and another warm-up, in place.
    restore: Callable[[], None] = import_module("pytest_exportcheck.fresh.warm").warm_up()
    return restore


def _configure_conftests(config: pytest.Config) -> None:
    """Call `pytest_configure` of the conftest files. Other plugins would open reports and start workers."""
    for hook in reversed(config.hook.pytest_configure.get_hookimpls()):
        file = getattr(hook.plugin, "__file__", None)
        if file and Path(file).name == "conftest.py" and not (hook.hookwrapper or hook.wrapper):
            hook.function(*[config for _ in hook.argnames])


def _why_no_fork(setup: Mapping[str, Any], threads: int) -> str | None:
    if not setup["fork"]:
        return "not asked for"
    if not _LINUX:
        return f"fork is not safe on {sys.platform}"
    if threading.active_count() > 1 or _native_threads() > threads:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:]) or "of a library"
        return f"threads run after the conftest files were read: {names}"
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "cuda", None) is not None and _cuda_is_used(torch):
        return "a conftest file uses CUDA"
    return None


def _cuda_is_used(torch: Any) -> bool:
    is_initialized = getattr(torch.cuda, "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


# A process for each case.


def _fork_for_each(lines: Iterator[bytes], source: int, sink: int, restore: Callable[[], None]) -> NoReturn:
    children: list[int] = []

    def end(*_: object) -> NoReturn:
        for child in children:
            _kill_group(child)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    gc.freeze()  # The collector of a child would otherwise copy every page that it looks at.
    me = os.getpid()
    while True:
        request = _next(lines)
        if "work" not in request:
            continue  # A late "kill": its case has just ended.
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _die_with_parent(signal.SIGKILL)
            if os.getppid() != me:
                os._exit(0)  # It died before that.
            os.close(source)
            _serve(request, sink, restore)
        children.append(child)
        _await(child, source)
        _kill_group(child)  # What the case left running. Not reaped yet, so that the number is still ours.
        _, status = os.waitpid(child, 0)
        children.remove(child)
        # A line of its own, also if the child died in the middle of one.
        write_all(sink, b"\n")
        _send(sink, {"event": "exit", "status": os.waitstatus_to_exitcode(status)})


def _await(child: int, source: int) -> None:
    """Until the child has ended. Anything that the client says meanwhile, or its end, means: kill it."""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        readable, _, _ = select.select([source], [], [], _POLL_SECONDS)
        if not readable:
            continue
        _kill_group(child)
        if not os.read(source, 1 << 16):
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


def _kill_group(leader: int) -> None:
    # Both: a child that has not yet come to `setsid` leads no group.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


# One case.


def _serve_here(lines: Iterator[bytes], source: int, sink: int, restore: Callable[[], None]) -> NoReturn:
    request = _next(lines)

    def watch() -> None:
        # The client closes the channel when it ends, or wants us to.
        with contextlib.suppress(OSError):
            while os.read(source, 1 << 16):
                pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="exportcheck-watch").start()
    _serve(request, sink, restore)


def _serve(request: Mapping[str, Any], sink: int, restore: Callable[[], None]) -> NoReturn:
    """Run one case, send its stages and its result, and end the process whatever happens."""
    stage = "load"
    try:
        for descriptor, key in ((1, "stdout"), (2, "stderr")):
            file = os.open(request[key], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        # Fresh objects: the old ones may be replaced, closed or hold text of somebody else.
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file=2)
        limit = request["limit"]

        def enter(name: str) -> None:
            nonlocal stage
            stage = name
            if limit:
                # Tells where it hangs; the client ends it a moment later.
                faulthandler.dump_traceback_later(limit, file=2)
            _send(sink, {"event": "stage", "stage": name})

        record: dict[str, Any] = {}
        failure = None
        try:
            restore()
            apply_warning_filters(request["filters"])
            from .work import perform_afresh

            perform_afresh(Work.from_plain(request["work"]), enter, record)
        except BaseException as error:
            failure = _failure(error, stage)
        faulthandler.cancel_dump_traceback_later()
        shown = failure.to_plain() if failure is not None else None
        _send(sink, {"event": "result", "failure": shown, "record": to_plain(record)})
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    except BaseException as error:
        _say_last("".join(traceback.format_exception(error)).rstrip())
    finally:
        # Neither exit handlers nor destructors: they belong to the process that was forked.
        os._exit(LOST_CLIENT)


def _failure(error: BaseException, stage: str) -> Failure:
    failure = Failure.of(error, stage)
    if failure.kind != "error":
        return failure
    lines = [line for text in traceback.format_exception(error) for line in text.rstrip().splitlines()]
    return Failure(failure.kind, stage, failure.error, failure.message, tuple(lines[-40:]))
