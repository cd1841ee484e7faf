"""Files that are no reports, or no whole ones: told in one line, with the name of the file."""

from __future__ import annotations

import json

import pytest

from pytest_exportcheck.cli import main
from pytest_exportcheck.reports.read import ReportError, read_report

from .made_reports import WHOLE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not a JSON report"),
        ("[]", "no list of cases"),
        ('{"schema": 2, "cases": []}', "report schema 2, this version reads 1"),
        ('{"schema": 1, "cases": [{"spec": "a"}]}', "case 0 is no record"),
        (b"\xff\xfe", "not a JSON report"),
    ],
)
def test_what_is_no_report_is_refused_with_its_name(tmp_path, content, message):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReportError, match=message) as error:
        read_report(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": 3}, "'spec' is 3"),
        ({"device": None}, "'device' is None"),
        ({"exporter": []}, "'exporter' is []"),
        ({"verdict": 7}, "'verdict' is 7"),
        ({"verdict": "explodes"}, "the verdict is 'explodes'"),
        ({"verdict": ""}, "the verdict is ''"),
        ({"outputs": 3}, "'outputs' is 3"),
        ({"outputs": [1]}, "'outputs' is [1]"),
        ({"durations": []}, "'durations' is []"),
        ({"durations": {"load": 3}}, "'durations' is {'load': 3}"),
        ({"shapes": {"": 1}}, "'shapes' is {'': 1}"),
        ({"details": "x"}, "'details' is 'x'"),
        ({"warnings": 5}, "'warnings' is 5"),
        ({"operators": {"Add": "x"}}, "'operators' is {'Add': 'x'}"),
        ({"outputs": [{"ok": True}]}, "an output has the path None"),
        ({"outputs": [{"path": ["a"]}]}, "an output has the path ['a']"),
        ({"outputs": [{"path": "a", "shape": 3}]}, "the shape of an output is 3"),
        ({"durations": {"load": {"cpu_s": "x"}}}, "the CPU seconds of 'load' are 'x'"),
        ({"durations": {"load": {"cpu_s": -1.0}}}, "the CPU seconds of 'load' are -1.0"),
        ({"durations": {"load": {"cpu_s": float("nan")}}}, "the CPU seconds of 'load' are nan"),
        ({"verdict": "fail nonsense"}, "the verdict is 'fail nonsense'"),
        ({"verdict": "skip load"}, "the verdict is 'skip load'"),
        ({"verdict": "xfail comparison"}, "the verdict is 'xfail comparison'"),
        ({"verdict": "crash"}, "the verdict is 'crash'"),
        ({"stage": "nonsense"}, "the stage is 'nonsense'"),
        ({"stage": 3}, "the stage is 3"),
        ({"nodes": "many"}, "'nodes' is 'many'"),
        ({"nodes": -1}, "'nodes' is -1"),
        ({"nodes": True}, "'nodes' is True"),
        ({"nodes": [1]}, "'nodes' is [1]"),
        ({"model_bytes": float("inf")}, "'model_bytes' is inf"),
        ({"operators": {"Add": -1}}, "the number of operators 'Add' is -1"),
        ({"outputs": [{"path": "a", "max_abs": "tiny"}]}, "'max_abs' of output a is 'tiny'"),
        ({"outputs": [{"path": "a", "max_abs": "1e-6"}]}, "'max_abs' of output a is '1e-6'"),
        ({"outputs": [{"path": "a", "max_abs": -1e-6}]}, "'max_abs' of output a is -1e-06"),
        ({"outputs": [{"path": "a", "max_abs": float("-inf")}]}, "'max_abs' of output a is -inf"),
        ({"outputs": [{"path": "a", "max_abs": False}]}, "'max_abs' of output a is False"),
        ({"outputs": [{"path": "a", "atol": "x"}]}, "'atol' of output a is 'x'"),
        ({"outputs": [{"path": "a", "eager_moves": {}}]}, "'eager_moves' of output a is {}"),
        ({"outputs": [{"path": "a", "ok": "yes"}]}, "'ok' of output a is 'yes'"),
        ({"outputs": [{"path": "a", "by": 3}]}, "'by' of output a is 3"),
        ({"outputs": [{"path": "a", "reason": 3}]}, "'reason' of output a is 3"),
    ],
)
@pytest.mark.parametrize(
    "command", [["markdown"], ["html", "-o", "p"], ["compare", "ok.json"], ["merge", "-o", "m"]]
)
def test_a_record_that_cannot_be_read_is_told_in_one_line(
    tmp_path, monkeypatch, capsys, change, message, command
):
    monkeypatch.chdir(tmp_path)
    good = {**WHOLE, "verdict": "pass"}
    (tmp_path / "ok.json").write_text(json.dumps({"schema": 1, "cases": []}))
    (tmp_path / "bad.json").write_text(json.dumps({"schema": 1, "cases": [good, {**good, **change}]}))
    assert main([*command, "bad.json"]) == 2
    out, err = capsys.readouterr()
    name = "" if {*change} & {*WHOLE} else " (a [cpu-f-x-n])"
    assert (out, err) == ("", f"exportcheck: bad.json: case 1{name} is no record of a case: {message}\n")


def test_what_else_is_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for text, message in (
        ("[" * 100_000, "nested too deep"),
        ('{"schema": 1, "environment": {"packages": 3}, "cases": []}', "environment.packages is no mapping"),
        ('{"schema": 1, "cases": [4]}', "case 0 is no record of a case: it is a int"),
    ):
        (tmp_path / "r.json").write_text(text)
        assert main(["markdown", "r.json"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"selection": 3}, "selection is no mapping"),
        ({"selection": {"paths": "x"}}, "selection.paths is 'x'"),
        ({"selection": {"deselected": [1]}}, "selection.deselected is [1]"),
        (
            {"selection": {"deselected": [{"spec": ["a"]}]}},
            "selection.deselected has a case whose 'spec' is ['a']",
        ),
        ({"selection": {"unfinished": 3}}, "selection.unfinished is 3"),
        ({"left_out": 3}, "left_out is 3"),
        ({"gpus": 3}, "gpus is 3"),
        ({"seeds": ["x"]}, "seeds is ['x']"),
    ],
)
@pytest.mark.parametrize("command", [["compare", "ok.json"], ["merge", "-o", "m", "ok.json"]])
def test_an_environment_that_cannot_be_read_is_told_in_one_line(
    tmp_path, monkeypatch, capsys, environment, message, command
):
    """And not by a traceback, whose exit status 1 is that of a run that got worse."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.json").write_text(json.dumps({"schema": 1, "cases": []}))
    (tmp_path / "bad.json").write_text(
        json.dumps({"schema": 1, "environment": environment, "cases": [{**WHOLE, "verdict": "pass"}]})
    )
    assert main([*command, "bad.json"]) == 2
    assert capsys.readouterr().err == (
        f"exportcheck: bad.json: not a report of --exportcheck-report: environment.{message}\n"
    )


def test_the_least_that_a_record_has_is_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text(
        json.dumps({"schema": 1, "cases": [{**WHOLE, "verdict": "fail run"}, {**WHOLE, "verdict": "pass"}]})
    )
    for command in (["markdown"], ["html", "-o", "p"], ["compare", "r.json"], ["merge", "-o", "m"]):
        assert main([*command, "r.json"]) == 0, capsys.readouterr()
