"""The matrix, in the terminal and as Markdown."""

from __future__ import annotations

import pytest

from pytest_exportcheck.reports.markdown import markdown
from pytest_exportcheck.reports.matrix import Matrix, counts
from pytest_exportcheck.reports.record import sort_key
from pytest_exportcheck.reports.refusals import memory_lines, refusal_lines
from pytest_exportcheck.reports.rounding import rounding_lines
from pytest_exportcheck.reports.terminal import matrix_lines


def record(spec, exporter, verdict="pass", *, mode="none", device="cpu", dtype="float32", graph=None, **more):
    return {
        "spec": f"specs/{spec}.yaml",
        "exporter": exporter,
        "patch_mode": mode if exporter else None,
        "device": device,
        "dtype": dtype,
        "graph": graph,
        "verdict": verdict,
        "nodeid": f"specs/{spec}.yaml::test_export[{exporter}]",
        "message": None,
        **more,
    }


def lines(records, width=200, every_row=False):
    matrix = Matrix.of(sorted(records, key=sort_key))
    return ["".join(piece.text for piece in line).rstrip() for line in matrix_lines(matrix, width, every_row)]


RECORDS = [
    record("llama", "onnx-dynamo"),
    record("llama", "onnx-dynamo", mode="hf"),
    record("llama", "transformers-onnx", mode="own"),
    record("llama", "onnx-dynamo", "skip", device="cuda"),
    record("vit", "onnx-dynamo", "fail compare"),
    record("vit", "onnx-dynamo", "crash export", mode="hf"),
    record("bart", "onnx-dynamo", "xfail export"),
    record("bart", "onnx-dynamo", "xpass", mode="hf"),
    record("bart", "transformers-onnx", "timeout run", mode="own"),
    record("llama", None),
    record("vit", None, "fail shapes"),
]


def test_rows_columns_and_groups():
    assert lines(RECORDS) == [
        "       cpu                                                           cuda",
        "spec   shapes       onnx-dynamo   onnx-dynamo+hf  transformers-onnx  onnx-dynamo",
        "bart   ·            xfail export  XPASS           TIMEOUT run        ·",
        "llama  pass         pass          pass            pass               skip",
        "vit    FAIL shapes  FAIL compare  CRASH export    ·                  ·",
    ]


def test_several_dtypes_are_groups():
    records = [record("a", "x"), record("a", "x", "fail run", dtype="float16")]
    assert lines(records) == [
        "      cpu float16  cpu float32",
        "spec  x            x",
        "a     FAIL run     pass",
    ]


def test_graphs_are_rows_and_share_the_shapes_check():
    records = [
        record("whisper", None),
        record("whisper", "x", "fail export", graph="decode"),
        record("whisper", "x", graph="prefill"),
    ]
    assert lines(records) == [
        "                   cpu",
        "spec               shapes  x",
        "whisper (decode)   pass    FAIL export",
        "whisper (prefill)  pass    pass",
    ]


def test_specs_with_the_same_stem_are_told_apart():
    records = [record("a/m", "x"), record("b/m", "x"), record("n", "x")]
    assert [line.split()[0] for line in lines(records)[2:]] == ["specs/a/m", "specs/b/m", "n"]


def test_of_two_records_of_a_cell_the_worse_shows():
    records = [record("a", "x", "fail run"), record("a", "x", "pass"), record("a", "x", "xfail export")]
    assert lines(records)[-1] == "a     FAIL run"


def test_columns_wrap_and_a_wide_one_stands_alone():
    records = [record("a", exporter) for exporter in ("one", "two", "a-very-wide-exporter-name")]
    assert lines(records, width=16) == [
        "      cpu",
        "spec  a-very-wide-exporter-name",
        "a     pass",
        "",
        "      cpu",
        "spec  one   two",
        "a     pass  pass",
    ]


def test_many_rows_show_what_needs_attention():
    records = [record(f"s{number:03}", "x") for number in range(100)] + [record("t", "x", "fail run")]
    assert lines(records)[2:] == ["t     FAIL run", "100 more rows: everything passes (-v shows them)"]
    assert len(lines(records, every_row=True)) == 103
    assert lines(records[:100]) == ["100 more rows: everything passes (-v shows them)"]


def test_counts():
    assert counts(RECORDS) == "4 pass, 1 xfail, 2 FAIL, 1 CRASH, 1 TIMEOUT, 1 XPASS, 1 skip"
    assert counts([]) == ""


def test_no_records():
    assert lines([]) == []


def test_markdown_escapes():
    records = [
        record("a|b_c", "x", "fail run", nodeid="a.yaml::t[`x`]", message="1 | 2\n`code`"),
        record("plain", "x"),
    ]
    text = markdown(records, ["error | one"])
    assert "| a\\|b\\_c | **FAIL run** |" in text
    assert "| plain | pass |" in text
    assert "- `` a.yaml::t[`x`] `` **FAIL run**" in text
    assert "      1 | 2\n      `code`\n" in text
    assert text.endswith("error \\| one  \n")


@pytest.mark.parametrize("of", ["message", "diagnosis"])
def test_markdown_names_the_known_cause_and_its_remedy(of):
    cause = {
        "name": "in-place",
        "sentence": "`x` is *written*\n# to",
        "remedy": "clone | copy",
        "link": "http://x",
    }
    found = {"causes": [cause]} if of == "message" else {"diagnosis": {"guilty": "export", "causes": [cause]}}
    failed = record("a", "x", "fail run", message="no", reproduce="pytest a.yaml", **found)
    lines = markdown([failed, record("b", "x", "xfail run", **found)]).splitlines()
    begin = lines.index("      known cause (in-place): `x` is *written* # to")
    # Indented, so a block of code that shows every character as it is.
    assert lines[begin + 1 : begin + 3] == ["        remedy: clone | copy", "      reproduce: pytest a.yaml"]
    assert sum("known cause" in line for line in lines) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_markdown_without_failures_has_no_section_for_them(number):
    assert "### Failures" not in markdown([record("a", "x")] * number)


# what eager refused


def test_sizes_that_eager_refuses_are_one_line_per_spec_and_graph():
    long, longer = "seq=129: IndexError: too long", "seq=130: IndexError: too long"
    found = list(
        refusal_lines(
            [
                record("bert", "torch-export", resize={"refused_by_eager": [long]}),
                record("bert", "onnx-dynamo", resize={"refused_by_eager": [long, longer]}),
                record("t5", "onnx-dynamo", graph="decode", resize={"refused_by_eager": [long]}),
                record("vit", "onnx-dynamo", resize={"refused_by_eager": []}),
                record("vit", "torch-export", resize=None),
                record("vit", None),
            ]
        )
    )
    assert found == [
        f"specs/bert.yaml: eager refuses 2 sizes, not judged: {long}",
        f"specs/t5.yaml (decode): eager refuses a size, not judged: {long}",
    ]


def test_sizes_without_memory_are_told_in_the_terminal_and_in_markdown():
    short = "seq=511: for onnxruntime CPU (it asks for 2.5 GiB at once)"
    cases = [
        record("bert", "onnx-dynamo", resize={"no_memory": [short], "passed": ["seq=260"]}),
        record("bert", "torch-export", resize={"no_memory": [short, "seq=600: for eager: MemoryError"]}),
        record("vit", "torch-export", resize={"no_memory": []}),
        record("vit", "onnx-dynamo", resize="damaged"),
        record("t5", "onnx-dynamo", resize={"no_memory": "damaged"}),
    ]
    line = f"no memory: specs/bert.yaml: 2 sizes, not judged: {short}"
    assert list(memory_lines(cases)) == [line]
    assert f"{line}  " in markdown(cases).splitlines()


# what rounding explains


def test_cases_that_agree_by_rounding_are_named():
    cases = [record(name, "onnx-dynamo", rounding=["call 1: y", "call 2: y"]) for name in "abcde"]
    first = "rounding: specs/a.yaml [cpu-float32-onnx-dynamo-none]: call 1: y (and 1 more)"
    lines = list(rounding_lines([record("plain", "onnx-dynamo"), *cases]))
    assert lines[0] == first
    assert len(lines) == 4
    assert lines[-1] == "rounding: and 2 more cases (-v names them)"
    assert len(list(rounding_lines(cases, every_case=True))) == 5
    assert list(rounding_lines([record("a", "onnx-dynamo", rounding=["call 1: y"])])) == [
        first.removesuffix(" (and 1 more)")
    ]
