"""Units of fresh processes: messages, the comparison of two failures, how a process ended."""

from __future__ import annotations

import math
import os
import sys
import warnings

import pytest

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import (
    STAGES,
    CompareError,
    CrashError,
    ExportError,
    HistoryError,
    StageTimeoutError,
    error_class,
)
from pytest_exportcheck.fresh.client import _last_lines, _read_end, _without_frames, describe_exit
from pytest_exportcheck.fresh.messages import (
    Failure,
    UnexpectedError,
    Work,
    apply_warning_filters,
    decode,
    encode,
    lines_of,
    warning_filters,
    write_all,
)
from pytest_exportcheck.judge import confirmation_of


def test_messages_survive_the_channel():
    message = {"event": "result", "text": "two\nlines, a \udc80 surrogate, ünïcode", "error": math.inf}
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message
    assert math.isnan(decode(encode({"x": math.nan}))["x"])


@pytest.mark.parametrize("line", [b"", b"{", encode({"event": "result"})[:-4], b"[1]", b"\xff\x00", b"7"])
def test_what_is_no_message_is_recognised(line):
    assert decode(line) is None


def test_lines_arrive_whole_whatever_the_pieces():
    source, sink = os.pipe()
    pieces = [b"one\ntw", b"o", b"\n\n", b"three\n", b"cut off"]
    for piece in pieces:
        write_all(sink, piece)
    os.close(sink)
    assert list(lines_of(source)) == [b"one", b"two", b"", b"three"]
    os.close(source)


def test_work_and_failures_travel_as_plain_values():
    work = Work(
        "/specs/a.yaml", "/", CaseId("a.yaml", "torch-export", "none", "cpu", "float32", "decode"), "x", "g"
    )
    assert Work.from_plain(decode(encode(work.to_plain()))) == work
    error = CompareError("off", details=["a", "b"], facts={"max": math.inf})
    failure = Failure.of(error, "run")
    assert failure.stage == "compare"
    again = Failure.from_plain(decode(encode(failure.to_plain())))
    assert again == failure
    raised = again.exception()
    assert type(raised) is CompareError
    assert str(raised) == str(error)
    assert raised.facts == {"max": math.inf}


def test_every_failure_is_raised_as_what_it_was():
    for stage in STAGES:
        assert type(Failure.of(error_class(stage)("x"), stage).exception()) is error_class(stage)
    for cls, kind in ((CrashError, "crash"), (StageTimeoutError, "timeout"), (HistoryError, "fail")):
        failure = Failure.of(cls("x", stage="convert"), "load")
        assert (failure.kind, failure.stage) == (kind, "convert")
        raised = failure.exception()
        assert type(raised) is cls
        assert raised.stage == "convert"
        # No expectation of a stage covers it.
        assert not isinstance(raised, error_class("convert"))
    defect = Failure.of(KeyError("x"), "run")
    assert (defect.kind, defect.stage) == ("error", "run")
    assert type(defect.exception()) is UnexpectedError
    assert str(defect.exception()) == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("second", "agrees", "same_message"),
    [
        (None, False, False),
        (ExportError("cannot export <M at 0x7fabc> after 3.5 s, s27 != 4"), True, True),
        (ExportError("another reason"), True, False),
        (CompareError("cannot export <M at 0x7f001> after 12 s, s0 != 4"), False, True),
        (CrashError("cannot export <M at 0x7f001> after 12 s, s0 != 4", stage="export"), False, True),
        (KeyError("x"), False, False),
    ],
)
def test_what_confirms_a_failure(second, agrees, same_message):
    first = Failure.of(ExportError("cannot export <M at 0x7f001> after 12 s, s0 != 4"), "export")
    told = confirmation_of(first, None if second is None else Failure.of(second, "export"))
    assert (told.agrees, told.same_message) == (agrees, same_message)


def test_warning_filters_are_the_same_again():
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("error", "odd.*things", UserWarning, "some.module", 7)
        warnings.simplefilter("ignore", pytest.PytestWarning)
        before = list(warnings.filters)
        plain = decode(encode({"filters": warning_filters()}))["filters"]
        warnings.resetwarnings()
        apply_warning_filters([["error", "", "no.such.module:Gone", "", 0], *plain])
        assert list(warnings.filters) == before


def test_how_a_process_ended():
    assert describe_exit(3) == "the process ended with status 3 and without a verdict"
    assert describe_exit(-9) == "killed by SIGKILL (the kernel does that when memory is out)"
    assert describe_exit(-11) == "killed by SIGSEGV (segmentation fault)"
    assert describe_exit(-250) == "killed by signal 250"
    assert describe_exit(None) == "the process could not be ended"


def test_the_lines_that_say_where_a_process_died():
    fault = ["Fatal Python error: Aborted", "", "Thread 1:", *(f'  File "m.py", line {n}' for n in range(40))]
    shown = _last_lines("\n".join(["chatter"] * 30 + fault + ["Extension modules: a, b (total: 2)"]))
    assert shown[:3] == ["Fatal Python error: Aborted", "Thread 1:", '  File "m.py", line 0']
    assert len(shown) == 20
    # The frames are in the failure: of the rest nothing is lost.
    assert _without_frames("\n".join(["chatter"] * 2 + fault)) == "chatter\nchatter\n"
    assert _without_frames("chatter\nmore") == "chatter\nmore"
    assert _last_lines("\n".join(f"line {n}" for n in range(30))) == [f"line {n}" for n in range(10, 30)]


def test_only_the_end_of_what_a_case_prints_is_read(tmp_path):
    file = tmp_path / "stdout"
    file.write_bytes(b"x" * 150_000 + b"\xffend")
    text = _read_end(file)
    assert text.startswith("[50004 bytes before this are not shown]\nx")
    assert text.endswith("x\\xffend")
    assert _read_end(tmp_path / "absent") == ""


def test_importing_the_plugin_side_imports_no_torch(pytester):
    script = (
        "import sys, pytest_exportcheck.judge, pytest_exportcheck.fresh.client; print('torch' in sys.modules)"
    )
    result = pytester.run(sys.executable, "-c", script)
    result.stdout.fnmatch_lines(["False"])
