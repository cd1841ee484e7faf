"""The reports of shards put together."""

from __future__ import annotations

import pytest

from pytest_exportcheck.reports.compare import compare
from pytest_exportcheck.reports.read import Report, merge

from .made_reports import command, report, selected, write
from .test_matrix import record


def test_of_merged_shards_a_case_is_left_out_where_all_were_told_so():
    before = report(*(record(name, "onnx-dynamo") for name in "abc"))

    def gone(*environments):
        shards = [Report(f"{at}.json", facts, []) for at, facts in enumerate(environments)]
        data, _ = merge(shards)
        return sorted(compare(before, Report("all.json", data["environment"], [])).not_run)

    others = [[("b", "onnx-dynamo"), ("c", "onnx-dynamo")], [("a", "onnx-dynamo"), ("c", "onnx-dynamo")]]
    # The third shard, which should have run c, is missing.
    assert gone(*(selected("specs", deselected=each) for each in others)) == []
    options = ["-k 'not c'"]
    filtered = [selected("specs", options=options, deselected=each) for each in others]
    assert gone(*filtered) == ["specs/c.yaml [cpu-float32-onnx-dynamo-none]"]
    assert gone(filtered[0], {"left_out": None}) == []


def test_merge_is_a_union_that_keeps_the_worse_verdict_and_says_so():
    one = report(record("a", "onnx-dynamo"), record("b", "onnx-dynamo"), name="1.json", torch="2.13.0")
    two = report(
        record("b", "onnx-dynamo", "fail run"), record("c", "onnx-dynamo"), name="2.json", torch="2.12"
    )
    data, notes = merge([one, two])
    assert [(case["spec"], case["verdict"]) for case in data["cases"]] == [
        ("specs/a.yaml", "pass"), ("specs/b.yaml", "fail run"), ("specs/c.yaml", "pass"),
    ]  # fmt: skip
    assert notes == [
        "2.json ran with other packages than 1.json: torch 2.13.0 -> 2.12",
        "specs/b.yaml [cpu-float32-onnx-dynamo-none]: pass in 1.json, fail run in 2.json; the worse is kept",
    ]
    assert len(data["environment"]["shards"]) == 2


@pytest.mark.parametrize("verdict", ["pass", "fail run"])
def test_of_merged_shards_the_one_that_ran_a_case_counts(verdict):
    """The machine without a GPU skips what the other runs."""
    skipped = report(record("a", "onnx-dynamo", "skip"), name="cpu.json")
    ran = report(record("a", "onnx-dynamo", verdict), name="gpu.json")
    for shards in ([skipped, ran], [ran, skipped]):
        data, notes = merge(shards)
        assert [case["verdict"] for case in data["cases"]] == [verdict]
        assert notes == []


def test_merged_shards_are_whole_unless_one_was_cut_short():
    def shard(name, left_out, seed):
        return Report(name, {"left_out": left_out, "seeds": [seed]}, [])

    data, _ = merge([shard("1.json", "5 deselected", 0), shard("2.json", "3 deselected", 7)])
    assert data["environment"]["left_out"] is None
    assert data["environment"]["seeds"] == [0, 7]
    data, _ = merge([shard("1.json", None, 0), shard("2.json", "interrupted", 0)])
    assert data["environment"]["left_out"] == "2.json: interrupted"


def shard(name, left_out, *ran, **selection):
    facts = {**selected(*selection.pop("paths", ["specs"]), **selection), "left_out": left_out}
    return Report(name, facts, [record(each, "onnx-dynamo") for each in ran])


def cases_of(names):
    return [(name, "onnx-dynamo") for name in names]


@pytest.mark.parametrize(
    ("first", "second", "left_out"),
    [
        # What one leaves out, the other runs: by a plugin that splits, by -k, by exporters.
        (("2 deselected", "a", {"deselected": "bc"}), ("1 deselected", "bc", {"deselected": "a"}), None),
        (("-k", "a", {"deselected": "bc", "options": ["-k a"]}), (None, "abc", {}), None),
        (
            ("-k", "a", {"deselected": "bc", "options": ["-k a"]}),
            ("-k", "bc", {"deselected": "a", "options": ["-k 'not a'"]}),
            None,
        ),
        (
            ("an axis is restricted", "a", {"deselected": "bc"}),
            ("an axis is restricted", "bc", {"deselected": "a"}),
            None,
        ),
        (
            ("-k", "a", {"deselected": "bc", "options": ["-k a"]}),
            ("-k", "b", {"deselected": "ac", "options": ["-k b"]}),
            "1.json: -k; 2.json: -k",
        ),
        # A file is whole beside a run of its folder.
        (
            ("a file is named, and not its folder", "a", {"paths": ["specs/a.yaml"]}),
            ("1 deselected", "bc", {"deselected": "a"}),
            None,
        ),
        (
            ("a file is named, and not its folder", "a", {"paths": ["specs/a.yaml"]}),
            ("a file is named, and not its folder", "b", {"paths": ["specs/b.yaml"]}),
            "1.json: a file is named, and not its folder; 2.json: a file is named, and not its folder",
        ),
        (
            ("a file is named, and not its folder", "a", {"paths": ["other/a.yaml"]}),
            (None, "bc", {}),
            "1.json: a file is named, and not its folder",
        ),
        # Files that were not collected: nobody knows what is in them, but a run that collected all.
        (
            ("--lf", "a", {"options": ["--lf"]}),
            ("--lf", "b", {"options": ["--lf"]}),
            "1.json: --lf; 2.json: --lf",
        ),
        # What ended early is not made up for.
        (
            ("interrupted", "a", {"unfinished": "interrupted"}),
            (None, "abc", {}),
            "1.json: interrupted",
        ),
        (("collection errors", "a", {}), (None, "abc", {}), "1.json: collection errors"),
    ],
)
def test_shards_that_are_all_cases_together_are_a_full_run(first, second, left_out):
    def made(name, reason, ran, selection):
        more = {**selection, "deselected": cases_of(selection.get("deselected", ""))}
        return shard(name, reason, *ran, **more)

    shards = [made("1.json", *first), made("2.json", *second)]
    for order in (shards, shards[::-1]):
        data, _ = merge(order)
        found = data["environment"]["left_out"]
        assert (found and set(found.split("; "))) == (left_out and set(left_out.split("; ")))
    # A case that is in no shard of a full run is gone; of any other nobody knows.
    before = report(*(record(name, "onnx-dynamo") for name in "abcx"))
    lost = compare(before, Report("all.json", data["environment"], data["cases"])).worse
    assert lost or left_out is not None


def test_missing_shapes_are_counted_alike_everywhere(tmp_path, warm_plugin):
    python = warm_plugin.executable
    absent = {**record("a", None, "fail shapes"), "golden_exists": False}
    differs = {**record("b", None, "fail shapes"), "golden_exists": True}
    fine = {**record("c", None), "golden": {"path": "g", "text": "t", "changed": False}}
    cases = [absent, differs, fine, record("a", "onnx-dynamo"), record("b", "onnx-dynamo", "fail export")]
    write(tmp_path / "a.json", *cases[:3])
    write(tmp_path / "b.json", *cases[3:])
    done = command(python, tmp_path, "merge", "a.json", "b.json", "-o", "all.json")
    totals = "2 cases: 1 pass, 1 FAIL   shapes: 1 ok, 1 missing, 1 FAIL"
    assert done.stderr == f"all.json, of 2 reports: {totals}\n"
    assert totals in command(python, tmp_path, "show", "all.json").stdout.splitlines()
    markdown = command(python, tmp_path, "markdown", "all.json").stdout.splitlines()
    assert totals.replace("   ", ", ") in markdown
