"""What an upgrade broke: two reports, case by case."""

from __future__ import annotations

import json

import pytest

from pytest_exportcheck.reports.compare import compare
from pytest_exportcheck.reports.comparison import as_json, as_markdown, as_text
from pytest_exportcheck.reports.read import Report

from .made_reports import command, effects, output, report, selected, write
from .test_matrix import record


def judged(by, ok=True, max_abs=0.0):
    return {**output(max_abs), "by": by, "ok": ok}


@pytest.mark.parametrize(
    ("was", "now", "effect"),
    [
        ("pass", "fail export", "worse"),
        ("pass", "xfail compare", "worse"),
        ("fail compare", "fail export", "worse"),
        ("fail export", "fail compare", "better"),
        ("fail export", "pass", "better"),
        ("xfail export", "xpass", "better"),
        ("xfail export", "fail export", "worse"),
        ("fail export", "xfail export", "better"),
        ("pass", "crash convert", "worse"),
        ("crash convert", "timeout convert", "other"),
        ("pass", "skip", "worse"),
        ("skip", "fail export", "other"),
        ("fail export", "skip", "other"),
    ],
)
def test_a_verdict_is_ranked_by_the_stage_that_was_reached(was, now, effect):
    assert effects([record("a", "onnx-dynamo", was)], [record("a", "onnx-dynamo", now)]) == [
        ("verdict", effect)
    ]


def test_what_rounding_explains_is_no_change():
    def case(error, ok=True):
        return record("a", "onnx-dynamo", outputs=[{**output(error), "ok": ok, "eager_moves": 1e-2}])

    assert effects([case(1e-4)], [case(9e-3)]) == []
    assert effects([case(1e-4)], [case(9e-2)]) == [("error", "worse")]
    assert effects([case(1e-4)], [case(9e-3, ok=False)]) == [("error", "worse")]


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        (1e-6, 3e-6, []),  # another order of a sum
        (1e-6, 6e-6, [("error", "worse")]),
        (6e-6, 1e-6, [("error", "better")]),
        (0.0, 5e-8, []),  # below a hundredth of what is allowed
        (0.0, 5e-6, [("error", "worse")]),
        (1e-9, 9e-8, []),
        ("inf", 1e-6, [("error", "better")]),
        (1e-6, "inf", [("error", "worse")]),
        ("inf", "inf", []),
        # Nobody knows how far off it is, or was.
        *((1e-6, odd, [("error", "worse")]) for odd in ("nan", float("nan"), None)),
        *((odd, 1e-6, [("error", "other")]) for odd in ("nan", float("nan"), None)),
        ("nan", "nan", []),
        ("inf", "nan", [("error", "worse")]),
    ],
)
def test_an_error_counts_beyond_noise(was, now, expected):
    before = record("a", "onnx-dynamo", outputs=[output(was)])
    assert effects([before], [record("a", "onnx-dynamo", outputs=[output(now)])]) == expected


@pytest.mark.parametrize(
    ("field", "was", "now", "expected"),
    [
        ("nodes", 100, 104, []),
        ("nodes", 0, 5, [("nodes", "other")]),
        ("nodes", 5, 0, [("nodes", "other")]),
        ("nodes", 0, 0, []),
        ("nodes", None, 5, []),  # a program of torch has none
        ("nodes", 100, 110, [("nodes", "other")]),
        ("model_bytes", 1000, 900, [("size", "other")]),
        ("durations", {"export": {"cpu_s": 4.0}}, {"export": {"cpu_s": 5.0}}, []),
        ("durations", {"export": {"cpu_s": 4.0}}, {"export": {"cpu_s": 9.5}}, [("time", "other")]),
        ("durations", {"export": {"cpu_s": 9.5}}, {"export": {"cpu_s": 4.0}}, [("time", "other")]),
        # What the first case of a process pays for, which is another one in another order.
        ("durations", {"load": {"cpu_s": 0.02}}, {"load": {"cpu_s": 2.05}}, []),
        ("durations", {"load": {"cpu_s": 2.1}, "export": {"cpu_s": 2.8}}, {"export": {"cpu_s": 0.1}}, []),
        ("durations", {"export": {"cpu_s": 0.02}}, {"export": {"cpu_s": 5.6}}, [("time", "other")]),
        ("durations", {"export": {"cpu_s": 60.0}}, {"export": {"cpu_s": 70.0}}, []),
        ("shapes", {"": {"x": "float32[batch, 4]"}}, {"": {"x": "float32[2, 4]"}}, [("shapes", "other")]),
        ("shapes", {"g": {"x": "int64[2]"}}, {"g": {"y": "int64[2]"}}, [("shapes", "other")] * 2),
    ],
)
def test_ratios_and_shapes_are_shown_and_are_no_regression(field, was, now, expected):
    before, after = (record("a", "onnx-dynamo", **{field: value}) for value in (was, now))
    found = compare(report(before), report(after))
    assert [(change.kind, change.effect) for change in found.changes] == expected
    assert not found.worse
    assert found.unchanged == (not expected)


def test_the_texts_say_what_changed_where_and_between_which_packages():
    before = report(
        record("a", "onnx-dynamo"), record("b", "onnx-dynamo"), record("c", "torch-export"), torch="2.12.0"
    )
    after = report(
        record("a", "onnx-dynamo", "fail compare", message="1 of 2 outputs | outside"),
        record("b", "onnx-dynamo"),
        record("d", "torch-export"),
        name="after.json",
        torch="2.13.0",
        onnx="1.23",
    )
    found = compare(before, after)
    text = as_text(found)
    assert text.splitlines()[:3] == [
        "exportcheck compare: before.json -> after.json",
        "  torch 2.12.0 -> 2.13.0",
        "  onnx none -> 1.23",
    ]
    assert (
        "Got worse (2):\n  specs/a.yaml [cpu-float32-onnx-dynamo-none]\n    pass -> fail compare: 1 of 2"
        in text
    )
    gone = "pass -> not in after.json: nobody checks it any more"
    assert f"  specs/c.yaml [cpu-float32-torch-export-none]\n    {gone}" in text
    assert text.count("specs/c.yaml") == as_markdown(found).count("specs/c.yaml") == 1
    assert "Only in before.json" not in text
    assert "Only in after.json (1):\n  specs/d.yaml" in text
    assert "2 worse, 0 better, 0 neither, 1 case unchanged, 1 gone" in text
    shown = as_markdown(found)
    assert "## exportcheck compare: something got worse" in shown
    assert "2 cases got worse, for 2 reasons, 1 unchanged" in text.splitlines()
    case, change = "specs/a.yaml \\[cpu-float32-onnx-dynamo-none\\]", "pass -\\> fail compare: 1 of 2 outputs"
    assert f"- {case}: {change} \\| outside" in shown
    assert "2 cases got worse, for 2 reasons, 1 unchanged." in shown
    data = json.loads(as_json(found))
    assert data["worse"] is True
    assert data["changes"][0]["before"] == "pass"


def test_cases_of_which_the_same_is_said_are_told_together():
    names = ("a", "b", "c")
    before = report(*(record(name, "onnx-dynamo") for name in names))
    failed = [record(name, "onnx-dynamo", "fail run", message="no `cache`") for name in ("a", "c")]
    after = report(*failed, record("b", "onnx-dynamo", "fail run", message="other"), name="after.json")
    text = as_text(compare(before, after))
    assert text.splitlines()[3:] == [
        "3 cases got worse, for 2 reasons, 0 unchanged",
        "",
        "Got worse (3, 2 kinds):",
        "  2 cases: pass -> fail run: no `cache`",
        "    specs/a.yaml, specs/c.yaml [cpu-float32-onnx-dynamo-none]",
        "  specs/b.yaml [cpu-float32-onnx-dynamo-none]",
        "    pass -> fail run: other",
        "",
        *text.splitlines()[-1:],
    ]


def test_a_case_is_told_once_with_all_that_changed():
    before = report(*(record(name, "onnx-dynamo", nodes=10, model_bytes=100) for name in "abc"))
    after = report(
        record("a", "onnx-dynamo", "fail run", message="no kernel", nodes=20, model_bytes=300),
        record("b", "onnx-dynamo", "fail run", message="no kernel", nodes=20),
        record("c", "onnx-dynamo", nodes=20, model_bytes=300),
        name="after.json",
    )
    found = compare(before, after)
    text = as_text(found)
    case = "specs/{}.yaml [cpu-float32-onnx-dynamo-none]"
    assert text.splitlines()[3:-1] == [
        "2 cases got worse, for 1 reason, 0 unchanged",
        "",
        "Got worse (2):",
        "  2 cases: pass -> fail run: no kernel",
        "    specs/a.yaml, specs/b.yaml [cpu-float32-onnx-dynamo-none]",
        "    also: nodes 10 -> 20 (2.00x)",
        f"    also, {case.format('a')}: size 100 -> 300 bytes (3.00x)",
        "",
        "Changed otherwise (1):",
        f"  {case.format('c')}",
        "    nodes 10 -> 20 (2.00x)",
        "    size 100 -> 300 bytes (3.00x)",
        "",
    ]
    assert text.splitlines()[-1].startswith("changes: 2 worse, 0 better, 5 neither")
    shown = as_markdown(found).splitlines()
    assert "  - also: nodes 10 -\\> 20 (2.00x)" in shown
    assert "  - size 100 -\\> 300 bytes (3.00x)" in shown
    assert sum("c.yaml" in line for line in shown) == 1


def test_a_case_that_is_worse_and_better_is_worse():
    before, after = (
        report(record("a", "onnx-dynamo", outputs=[output(one, "x"), output(two, "y")]), name=name)
        for one, two, name in ((1e-6, 1e-3, "before.json"), (1e-3, 1e-6, "after.json"))
    )
    text = as_text(compare(before, after))
    assert "1 case got worse, for 1 reason, 0 unchanged" in text
    assert "Got better" not in text
    lines = text[text.index("Got worse (1):") :].splitlines()
    assert [line.split(":")[0].strip() for line in lines[2:4]] == ["x", "y"]


def test_a_reason_that_names_the_spec_is_told_once_and_the_most_cases_come_first():
    def fails(name, exporter, message):
        return record(name, exporter, "fail shapes", message=message)

    names, exporters = "abcdefg", ("onnx-dynamo", "torch-export", "transformers-onnx")
    before = report(*(record(name, exporter) for name in names for exporter in exporters))
    differ = "shapes differ from specs/__shapes__/{0}.yaml"
    after = [fails(name, "onnx-dynamo", differ.format(name)) for name in names[1:]]
    after += [fails("a", exporter, "specs/a.yaml:3: no output") for exporter in exporters]
    after += [record(name, exporter) for name in names[1:] for exporter in exporters[1:]]
    lines = as_text(compare(before, report(*after, name="after.json"))).splitlines()
    begin = lines.index("Got worse (9, 2 kinds):")
    listed = ", ".join(f"specs/{name}.yaml" for name in "bcdefg")
    assert lines[begin + 1] == (
        "  6 cases: pass -> fail shapes: shapes differ from specs/__shapes__/NAME.yaml"
    )
    told = " ".join(line.strip() for line in lines[begin + 2 :]).partition(" 3 cases: ")
    assert told[0] == f"{listed} [cpu-float32-onnx-dynamo-none]"
    # One spec keeps its own name and line; no case is left out of what got worse.
    assert told[2].startswith("pass -> fail shapes: specs/a.yaml:3: no output specs/a.yaml [")
    assert all(f"[cpu-float32-{exporter}-none]" in told[2] for exporter in exporters)
    assert max(map(len, lines[begin:-1])) <= 110


def test_what_got_better_is_told_in_a_line_and_behind_a_click():
    names = [f"model_{k}" for k in range(40)]
    long = "no function found " * 20
    before = report(*(record(name, "onnx-dynamo", "fail run", message=long) for name in names))
    found = compare(before, report(*(record(name, "onnx-dynamo") for name in names), name="after.json"))
    lines = as_text(found).splitlines()
    assert "Nothing got worse, 40 got better, 0 unchanged" in lines
    begin = lines.index("Got better (40):")
    assert lines[begin + 1].startswith("  40 cases: fail run -> pass; it was: no function")
    assert lines[begin + 1].endswith(" ...")
    assert lines[begin + 5 : begin + 7] == ["    ...", ""]
    shown = as_markdown(found)
    assert "<details><summary>40 cases</summary>" in shown
    assert "specs/model\\_39.yaml" in shown


@pytest.mark.parametrize(
    ("was", "expected"),
    [
        ("pass", [("verdict", "worse")]),
        ("xpass", [("verdict", "worse")]),
        ("fail export", [("verdict", "worse")]),
        ("xfail run", [("verdict", "worse")]),
        ("crash run", [("verdict", "worse")]),
        ("skip", []),
    ],
)
def test_a_case_that_is_gone_is_a_loss_if_it_ran(was, expected):
    assert effects([record("a", "onnx-dynamo", was)], []) == expected


def test_a_case_that_is_gone_and_is_no_loss_is_listed_by_its_name():
    found = compare(report(record("a", "onnx-dynamo", "skip")), report(name="after.json"))
    assert "Only in before.json (1):\n  specs/a.yaml [cpu-float32-onnx-dynamo-none]" in as_text(found)
    assert "### Only in before.json\n\n- specs/a.yaml" in as_markdown(found)


def test_a_time_that_was_too_short_has_no_ratio():
    before, after = (
        record("a", "onnx-dynamo", durations={"export": {"cpu_s": seconds}}) for seconds in (0.02, 5.6)
    )
    (change,) = compare(report(before), report(after)).changes
    assert change.text == "time 0.0 -> 5.6 CPU s"


def test_two_equal_runs():
    found = compare(report(record("a", "onnx-dynamo")), report(record("a", "onnx-dynamo")))
    assert not found.changes
    assert "the same packages" in as_text(found)
    assert "nothing got worse" in as_markdown(found)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (selected("."), None),
        (selected("specs"), None),
        (selected("specs", options=["-k c"]), None),
        (selected("specs", deselected=[("c", "onnx-dynamo")]), None),
        (selected("spec"), "not among spec"),
        (selected("specs/b.yaml", "tests"), "not among specs/b.yaml, tests"),
        (selected("specs/a.yaml::test_export[x]"), "not among specs/a.yaml::test_export[x]"),
        (selected("specs", options=["--lf"]), "--lf"),
        (selected("specs", unfinished="interrupted"), "interrupted"),
        (
            selected("specs", options=["-k c"], deselected=[("a", "onnx-dynamo")]),
            "deselected by -k c",
        ),
        # Reports of an earlier version.
        ({"left_out": None}, None),
        ({"left_out": "-k"}, "-k"),
    ],
)
def test_a_case_that_is_gone_was_left_out_or_is_lost(environment, why):
    after = Report("after.json", environment, [record("b", "onnx-dynamo")])
    found = compare(report(record("a", "onnx-dynamo"), record("b", "onnx-dynamo")), after)
    assert found.worse is (why is None)
    assert list(found.not_run.values()) == ([why] if why else [])
    heading = f"Not run in after.json, neither better nor worse: {why} (1):"
    assert (heading in as_text(found)) is (why is not None)
    gone = "pass -> not in after.json: nobody checks it any more"
    assert (gone in as_text(found)) is (why is None)
    assert "Only in before.json" not in as_text(found)
    assert ("1 not run" in as_text(found), "1 gone" in as_text(found)) == (why is not None, why is None)


def test_the_commands(tmp_path, warm_plugin):
    python = warm_plugin.executable
    write(tmp_path / "a.json", record("a", "onnx-dynamo"))
    write(tmp_path / "b.json", record("b", "onnx-dynamo"))
    done = command(python, tmp_path, "merge", "a.json", "b.json", "-o", "all.json")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "all.json, of 2 reports: 2 cases: 2 pass\n"
    write(tmp_path / "now.json", record("a", "onnx-dynamo", "fail run"), record("b", "onnx-dynamo"))
    done = command(python, tmp_path, "compare", "all.json", "now.json")
    assert done.returncode == 1
    assert "pass -> fail run" in done.stdout
    done = command(python, tmp_path, "compare", "all.json", "all.json", "--format", "markdown", "-o", "c.md")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "nothing got worse" in (tmp_path / "c.md").read_text()
    done = command(python, tmp_path, "compare", "all.json", "nowhere.json")
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "exportcheck: nowhere.json: No such file or directory\n",
    )  # fmt: skip


def test_reports_without_a_common_case_are_not_compared(tmp_path, warm_plugin):
    python = warm_plugin.executable
    write(tmp_path / "a.json", record("a", "onnx-dynamo", "skip"))
    write(tmp_path / "b.json", record("b", "onnx-dynamo"))
    done = command(python, tmp_path, "compare", "a.json", "b.json")
    assert done.returncode == 2
    assert "No case in common: nothing was compared" in done.stdout
    assert "Nothing got worse" not in done.stdout
    assert done.stderr == "exportcheck: a.json and b.json have no case in common\n"
    done = command(python, tmp_path, "compare", "a.json", "b.json", "--format", "markdown")
    assert done.returncode == 2
    assert done.stdout.startswith("## exportcheck compare: no case in common\n")
    # What ran and is gone is worse, whatever else there is.
    done = command(python, tmp_path, "compare", "b.json", "a.json")
    assert done.returncode == 1
    assert "1 case got worse" in done.stdout


def _with(shapes=None, outputs=(), **more):
    return record("a", "onnx-dynamo", "pass", shapes={None: shapes or {}}, outputs=list(outputs), **more)


def test_a_renamed_argument_is_one_line():
    leaves = {f"layers.{layer}.{name}": "float32[batch, 2, past, 16]" for layer in (0, 1) for name in "kv"}
    before = {"x": "int64[batch]", **{f"past.{rest}": text for rest, text in leaves.items()}}
    after = {"x": "int64[batch]", **{f"cache.{rest}": text for rest, text in leaves.items()}}
    changes = compare(report(_with(before)), report(_with(after))).changes
    assert [change.text for change in changes] == ["input past is now cache (the same shapes in 4 places)"]
    # Another shape below the new name: no mere renaming, every line is shown.
    after["cache.layers.0.k"] = "float32[batch, 4, past, 16]"
    assert len(compare(report(_with(before)), report(_with(after))).changes) == 8


def test_a_name_is_not_guessed_where_two_could_be_meant():
    before, after = ({f"{root}.{k}": "int64[2]" for root in roots for k in (0, 1)} for roots in ("a", "bc"))
    for was, now in ((before, after), (after, before)):
        texts = [change.text for change in compare(report(_with(was)), report(_with(now))).changes]
        assert texts == [f"{path}: int64[2] -> absent" for path in was] + [
            f"{path}: absent -> int64[2]" for path in now
        ]


def test_errors_of_a_renamed_output_are_compared_and_others_are_told():
    def cache(root, error):
        return [{**output(error, f"{root}.{k}"), "dtype": "float32", "shape": [2, 2, k + 1]} for k in (0, 1)]

    before = [*cache("past", 1e-7), {**output(1e-7, "gone"), "dtype": "int64", "shape": [2]}]
    after = [*cache("cache", 1e-4), {**output(1e-7, "came"), "dtype": "bool", "shape": []}]
    changes = compare(report(_with(outputs=before)), report(_with(outputs=after))).changes
    kinds = [(change.kind, change.effect) for change in changes]
    assert kinds == [("outputs", "other")] * 3 + [("error", "worse")] * 2
    texts = [change.text for change in changes]
    assert texts[:3] == [
        "output past is now cache (the same leaves, 2)",
        "gone: output gone",
        "new: output came",
    ]
    assert texts[3].startswith("cache.0: max abs 1.0e-07 -> 1.0e-04")


def test_outputs_of_a_case_that_compared_nothing_are_not_told():
    assert effects([_with(outputs=[output(1e-7)])], [record("a", "onnx-dynamo", "fail export")]) == [
        ("verdict", "worse")
    ]


def test_a_pass_that_compares_nothing_any_more_is_worse():
    before = _with(outputs=[output(1e-7), output(1e-7, "cache")])
    for nothing in ({}, {"outputs": []}, {"outputs": None}):
        (change,) = compare(report(before), report(record("a", "onnx-dynamo", **nothing))).changes
        assert (change.effect, change.text) == ("worse", "no output is compared, 2 outputs before")
    assert effects([_with()], [before]) == []


def test_operators_explain_a_node_count():
    before = _with(nodes=100, operators={"Add": 10, "Cast": 5, "Mul": 1})
    after = _with(nodes=120, operators={"Add": 25, "Mul": 6, "Concat": 2, "Exp": 1, "Tanh": 1})
    (change,) = compare(report(before), report(after)).changes
    assert (
        change.text == "nodes 100 -> 120 (1.20x): +15 Add, -5 Cast, +5 Mul, +2 Concat, and 2 other operators"
    )


def test_what_was_wrong_is_told_where_it_is_cured():
    before = record("a", "onnx-dynamo", "fail export", message="no operator\nmore")
    (change,) = compare(report(before), report(record("a", "onnx-dynamo"))).changes
    assert change.text == "fail export -> pass; it was: no operator"


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        (judged("f.py:own"), judged("f.py:own"), []),
        (output(1e-6), judged("f.py:own"), [("outputs", "other")]),
        (judged("f.py:own"), output(9e-6), [("outputs", "other")]),  # and no error that grew from nothing
        (judged("f.py:own"), judged("f.py:other"), [("outputs", "other")]),
        (judged("f.py:own"), judged("", ok=False), []),  # the verdict tells
        (output(1e-6), judged("", max_abs=9e-6), [("error", "worse")]),
    ],
)
def test_who_judged_an_output(was, now, expected):
    before, after = (record("a", "onnx-dynamo", "pass", outputs=[side]) for side in (was, now))
    assert effects([before], [after]) == expected
    if expected == [("outputs", "other")]:
        found = compare(report(before), report(after, name="after.json"))
        names = [side.get("by") or "exportcheck" for side in (now, was)]
        assert found.changes[0].text == f"logits: compared by {names[0]}, was by {names[1]}"
