"""The page of a report: what it says, and that nothing becomes markup. `test_html_browser.py` opens it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from pytest_exportcheck.cli import main
from pytest_exportcheck.reports.html import html_page, plots

from .html_cases import CASES, DURATIONS, EVIL, data, details, drawn, output, script, texts
from .test_matrix import record


@pytest.fixture(scope="module")
def page():
    return html_page(data(*CASES))


def test_who_judged_an_output_stands_in_the_place_of_numbers():
    outputs = [{**output("boxes", 0.0), "by": "f.py:own"}, output("scores"), output("labels")]
    (blocks,) = details(html_page(data(record("net", "onnx-dynamo", outputs=outputs)))).values()
    ((_, _, rows, _),) = [block for block in blocks if block[0] == "table"]
    assert rows[0] == ["boxes", "2x3", "float32", ["by f.py:own", 5], "", "ok"]
    assert rows[1] == [
        "scores",
        "2x3",
        "float32",
        "1.0e-06",
        "[0, 1]",
        "1.0e-06",
        "0.0%",
        "1.0e-05 + 1.0e-04 r",
        "",
        "ok",
    ]
    assert ">scores<" in str(plots.errors_by_output(outputs)), "the others have their plot"
    assert ">boxes<" not in str(plots.errors_by_output(outputs))


def test_a_diagnosis_is_shown_part_by_part(page):
    shown = texts(details(page)["specs/vit.yaml [cpu-float32-onnx-dynamo-none]"])
    text = " ".join(" ".join(shown).split())
    for words in (
        "captured ok 1.0e-07", "ONNX differs 5.0e-01", "%add_3 = aten.add.Tensor",
        "jump: this node alone computes something else", "in ONNX Add -> Relu", "float32[2, 3]",
        "relative to its size 2.5e-01", "its own error 1.2e-01", "to blame the conversion", "3 of 4 values",
        "mlp (call 1) (MLP)", "model.py:7 in forward: x + y", "x: float32[2, 3]",
        "the model exports with it replaced by a custom op", "2 modules were not searched",
        "masked rows rows have no right value. Remedy: mask them https://example.org/why",
        "repro.py fails the same way", "one step was left out", "It took 3.2 s.",
        "of_another_tool extra 1",
    ):  # fmt: skip
        assert words in text, words
    # No part of it as a dump of keys.
    for key in ("own_outside", "parent_exports", "only_alone", "kernel_note", "onnx_nodes"):
        assert key not in shown


@pytest.mark.parametrize(
    "diagnosis",
    [{}, {"verdict": "not diagnosed: it depends on history"}, {"ladder": 3, "nodes": [], "pieces": "no"},
     {"rungs": "none", "profile": [[1]], "culprits": {"a": 1}, "causes": "why", "reproduction": "text"},
     {"nodes": {"first": {"name": "n"}}, "causes": [{"name": "n"}], "culprits": [{"path": "p"}]}],
)  # fmt: skip
def test_a_diagnosis_of_another_tool_does_not_break_the_page(diagnosis):
    failed = record("net", "onnx-dynamo", "fail compare", message="off", diagnosis=diagnosis)
    assert "FAIL compare" in html_page(data(failed))


@pytest.mark.parametrize("diagnosed", [False, True], ids=["message", "diagnosis"])
def test_a_known_cause_stands_right_below_the_headline(diagnosed):
    cause = {"name": "fixed axis", "sentence": "a plain number", "remedy": "look for int()", "link": ""}
    more = {"diagnosis": {"guilty": "capture", "causes": [cause]}} if diagnosed else {"causes": [cause]}
    failed = record("net", "onnx-dynamo", "fail export", message="no", details=["at line 3"], **more)
    (blocks,) = details(html_page(data(failed))).values()
    assert blocks[:3] == [
        ["headline", "no"],
        ["cause", "fixed axis", "a plain number. Remedy: look for int()", ""],
        ["lines", ["at line 3"]],
    ]
    assert sum(block[0] == "cause" for block in blocks) == 1


class Parsed(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_nothing_of_a_report_becomes_markup(page):
    parsed = Parsed(page)
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert [attributes.get("type") for attributes in scripts] == ["application/json"] * 3 + [None]
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("\\u003cscript\\u003ealert(1)\\u003c/script\\u003e") > 10
    (evil,) = [blocks for name, blocks in details(page).items() if EVIL in name]
    assert ["headline", EVIL] in evil


@pytest.mark.parametrize(
    "text", ["</script><!-- <script>", "]]>", "\u2028 & \ud800", "a\nb\\n", '"\\u003c"', ""]
)
def test_no_text_ends_the_element_of_the_data(text):
    shown = html_page(
        data(record("net", "onnx-dynamo", "fail export", message=text, details=[text], patches={text: text}))
    )
    shown.encode()
    assert [tag for tag, _ in Parsed(shown).tags].count("script") == 4
    (blocks,) = details(shown).values()
    assert (["headline", text] in blocks) == bool(text)
    assert (["facts", [[text, text]], ""] in blocks) == bool(text)


def test_nothing_is_fetched(page):
    for _, attributes in Parsed(page).tags:
        for name in ("src", "href", "xlink:href", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    (policy,) = [
        attributes["content"]
        for tag, attributes in Parsed(page).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")


def every_plot(page):
    """(title, SVG) of all plots: of the run, then of the cases."""
    found = [tuple(plot) for plot in json.loads(script(page, "rest"))["plots"]]
    return found + [plot for blocks in details(page).values() for plot in drawn(blocks)]


def test_plots_are_xml_and_identifiers_are_unique_across_them(page):
    identifiers = [attributes["id"] for _, attributes in Parsed(page).tags if "id" in attributes]
    for _, svg in every_plot(page):
        root = ElementTree.fromstring(svg)
        own = [each.get("id") for each in root.iter() if each.get("id")]
        identifiers += own
        for target in re.findall(r'(?:url\(|xlink:href=")#([\w-]+)', svg):
            assert target in own
        assert {each.tag.rpartition("}")[2] for each in root.iter()} <= {
            "svg", "g", "defs", "path", "use", "text", "clipPath", "rect",
        }  # fmt: skip
    assert len(identifiers) == len(set(identifiers))


def test_every_plot_is_there_and_has_the_colours_of_the_page(page):
    plots_drawn = every_plot(page)
    titles = [title for title, _ in plots_drawn]
    for title in ("Errors of all outputs", "Time by stage, all cases", "Node counts", "Error by node"):
        assert titles.count(title) == 1
    assert titles.count("Error by output") == 2
    assert titles.count("Time by stage") == 3
    everything = "".join(svg for _, svg in plots_drawn)
    for stand_in in plots._STANDS_FOR:
        assert stand_in not in everything
    # Text is text, and no mathematics.
    assert ">a$b$</text>" in everything
    assert "mathdefault" not in everything


def test_a_case_tells_what_the_record_knows(page):
    cases = details(page)
    told = texts(cases["specs/vit.yaml [cpu-float32-onnx-dynamo-none]"])
    for text in (
        "1 of 2 outputs outside",
        "logits  FAIL",
        "conversion: %add_3 in model.mlp (model.py:7)",
        "pytest --exportcheck vit",
        "nan",
        "patched_mask",
        "-    if x.sum() > 0:\n+    y = torch.where(",
    ):
        assert text in told, text
    table = SHAPES_TABLE
    mask = ["mask", "int64[batch, past + seq]", "int64[batch, 30]", "\N{EN DASH}", "differs"]
    x = ["x", "int64[batch, seq]", "int64[batch, seq]", "\N{EN DASH}", ""]
    assert [*table, [x, mask], [1]] in cases["specs/llama.yaml [cpu-float32-shapes]"]
    exported = [["x", *x[1:3], "[batch, seq]", ""], mask]
    assert [*table, exported, [1]] in cases["specs/llama.yaml [cpu-float32-onnx-dynamo-none]"]


SHAPES_TABLE = [
    "table",
    [*([title, ""] for title in ("input", "golden", "inferred", "exported")), ["", "wide"]],
]


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (None, ["accepted in this run", "accepted in this run", None]),
        (
            {"x": "int64[batch]", "mask": "int64[2]", "gone": "int64[batch]"},
            ["", "accepted in this run, was int64[2]", "given up in this run, was int64[batch]"],
        ),
    ],
    ids=["first", "changed"],
)
def test_shapes_that_the_run_accepted_are_shown_as_accepted(before, told):
    """Right after ``--update-shapes``: what was inferred is in the file now."""
    inferred = {"x": "int64[batch]", "mask": "int64[batch]"}
    golden = {"path": "specs/__shapes__/net.yaml", "text": "new", "changed": True}
    check = record("net", None, shapes={"": inferred}, accepted=before and {"": before}, golden=golden)
    exported = {"x": "[batch]", "mask": "[batch]"}
    case = record("net", "onnx-dynamo", exported_shapes=exported)
    rows = {
        path: [path, *([inferred.get(path, "\N{EN DASH}")] * 2), "\N{EN DASH}", note]
        for path, note in zip((*inferred, "gone"), told, strict=True)
        if note is not None
    }
    page = details(html_page(data(check, case)))
    for found, program in (("specs/net.yaml [cpu-float32-shapes]", {}),
                           ("specs/net.yaml [cpu-float32-onnx-dynamo-none]", exported)):  # fmt: skip
        ((*table, shown, marked),) = [block for block in page[found] if block[:2] == SHAPES_TABLE]
        assert table == SHAPES_TABLE
        wanted = [[*row[:3], program.get(path, "\N{EN DASH}"), row[4]] for path, row in rows.items()]
        assert (sorted(shown), marked) == (sorted(wanted), [])


def test_shapes_on_which_the_checks_of_a_run_do_not_agree_are_not_accepted():
    """Nothing was written: the golden is what it was."""
    checks = [
        record("net", None, dtype=dtype, shapes={"": {"x": shape}}, accepted={"": {"x": "int64[2]"}},
               golden={"path": "specs/__shapes__/net.yaml", "text": shape, "changed": True})
        for dtype, shape in (("float32", "int64[batch]"), ("float16", "int64[batch, 3]"))
    ]  # fmt: skip
    cases = details(html_page(data(*checks)))
    row = ["x", "int64[2]", "int64[batch]", "\N{EN DASH}", "differs"]
    assert [*SHAPES_TABLE, [row], [0]] in cases["specs/net.yaml [cpu-float32-shapes]"]


def test_fields_that_the_page_does_not_know_are_shown_by_their_name():
    more = {
        "advice": "more memory",
        "of_mine": {"10": True, "2": [0.5, None]},
        "empty": {},
        "none": None,
    }
    (blocks,) = details(html_page(data(record("net", "onnx-dynamo", **more)))).values()
    (told,) = [block[1] for block in blocks if block[0] == "facts"]
    assert ["advice", "more memory"] in told
    # Keys keep their order, which those of an object would not.
    assert ["of_mine", {"facts": [["10", "yes"], ["2", ["0.5", "\N{EN DASH}"]]]}] in told
    assert not {"empty", "none"} & {label for label, _ in told}


def test_the_command_that_accepts_shapes_is_said_to_do_so():
    failed = record("net", None, "fail shapes", message="no", accept="pytest -U net", reproduce="pytest net")
    page = html_page(data(failed))
    (blocks,) = details(page).values()
    commands = [["command", "pytest -U net", "accept these shapes:"], ["command", "pytest net", "reproduce:"]]
    assert [block for block in blocks if block[0] == "command"] == commands
    assert '<p class="command">accept these shapes: <code>pytest -U net</code></p>' in page
    # In its place, and not once more among the rest.
    assert texts(blocks).count("pytest -U net") == 1


def test_what_is_searched_beside_names(page):
    entries = {entry[0]: entry for entry in json.loads(script(page, "index"))}
    _name, verdict, kind, fields, words = entries["specs/vit.yaml [cpu-float32-onnx-dynamo-none]"]
    assert (verdict, kind, fields) == (
        "FAIL compare",
        "fail",
        ["onnx-dynamo", "none", "cpu", "float32", "none"],
    )
    for word in (
        "1 of 2 outputs outside",
        "logits  FAIL",
        "conversion: %add_3",
        "masked rows",
        "mlp MLP",
        "aten.add.Tensor",
    ):
        assert word in words, word


def test_the_matrix_and_the_failures_stand_without_a_script(page):
    markup = page[: page.index("<script")]
    inside = markup[markup.index("<noscript>") : markup.index("</noscript>")]
    for text in (
        "1 of 2 outputs outside",
        "pytest --exportcheck vit",
        '<article id="case-',
        "FAIL compare",
        "&lt;script&gt;",
    ):
        assert text in inside, text
    assert "a bug of theirs" not in inside, "what is expected needs no attention"
    assert re.search('<td><a href="#case-[0-9]" class="pass">pass</a></td><td>·</td>', markup)


def test_plots_of_cases_are_limited_and_failed_ones_come_first(monkeypatch):
    monkeypatch.setattr("pytest_exportcheck.reports.html.page.MOST_PLOTS", 1)
    text = html_page(
        data(record("a", "x", durations=DURATIONS), record("b", "x", "fail run", durations=DURATIONS))
    )
    passed, failed = details(text).values()
    assert ["hint", "No plots: only the first cases have them, failed ones before others."] in passed
    assert drawn(passed) == []
    assert [title for title, _ in drawn(failed)] == ["Time by stage"]


@pytest.mark.parametrize("cases", [[], [record("a", "x", "skip")], [record("a", None, outputs=None)]])
def test_a_report_that_says_little(cases):
    assert "<h2" in html_page(data(*cases))


def test_the_commands(tmp_path, capsys, monkeypatch):
    report = tmp_path / "r.json"
    report.write_text(json.dumps(data(*CASES)))
    assert main(["html", str(report), "-o", str(tmp_path / "p.html")]) == 0
    assert "FAIL compare" in (tmp_path / "p.html").read_text()
    assert main(["markdown", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "| vit | **FAIL compare** |" in shown.replace(" · |", "")
    assert "diagnosis: conversion: %add_3" in shown
    assert main(["markdown", str(report), "--limit", "700", "-o", str(tmp_path / "m.md")]) == 0
    assert len((tmp_path / "m.md").read_bytes()) <= 700
    assert main(["html", str(tmp_path / "gone.json"), "-o", "p"]) == 2
    monkeypatch.setattr("pytest_exportcheck.reports.html.find_spec", lambda name: None)
    assert main(["html", str(report), "-o", "p"]) == 2
    assert "pip install 'pytest-exportcheck[html]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([], "no case ran"),
        ([record("a", "onnx-dynamo", "fail run")], "1 case: 1 FAIL"),
        (
            [record("a", None), record("b", None, "fail shapes", golden_exists=False)],
            "shapes: 1 ok, 1 missing",
        ),
        (
            [
                record("a", "onnx-dynamo"),
                *(record(n, None, "fail shapes", golden_exists=False) for n in "abc"),
            ],
            "1 case: 1 pass, shapes: 3 missing",
        ),
    ],
)
def test_the_head_counts_cases_and_shapes_checks_as_the_terminal_does(records, told):
    page = html_page(data(*records))
    assert f'<p class="counts">{told}</p>' in page
    assert f"<title>exportcheck: {told}</title>" in page


def test_what_is_empty_is_not_listed_and_numbers_have_their_noun():
    made = record("net", "onnx-dynamo", captured={"agrees": 2, "refuses": [], "differs": []},
                  operators={"Add": 3}, diagnosis={"profile": [["add", 0.5, 0.5]]})  # fmt: skip
    environment = {
        "arguments": ["--exportcheck", "my specs", "-k", "a or b"],
        "options": {"update": True, "devices": None},
    }
    page = html_page({"schema": 1, "environment": environment, "cases": [made, record("net", None)]})
    told = details(page)["specs/net.yaml [cpu-float32-onnx-dynamo-none]"]
    (more,) = [block[1] for block in told if block[0] == "facts"]
    assert ["captured program", {"facts": [["agrees", "2"]]}] in more
    assert [
        "folded",
        "1 operator",
        [["table", [["operator", ""], ["nodes", "number"]], [["Add", "3"]], []]],
    ] in told
    assert json.loads(script(page, "rest"))["environment"] == [
        ["arguments", "--exportcheck 'my specs' -k 'a or b'"],
        ["options", {"facts": [["update", "yes"]]}],
    ]
    assert '<p class="counts">1 case: 1 pass, shapes: 1 ok</p>' in page
    # One point is no plot.
    assert not drawn(told)
    assert plots.errors_by_node([("a", 0.5, 0.5), ("b", 0.5, None), ("c", 0.1, None)]) is not None


def colours(theme):
    """Name -> (red, green, blue) from 0 to 1, of a theme in the stylesheet."""
    text = (files("pytest_exportcheck.reports.html") / "page.css").read_text(encoding="utf-8")
    (block,) = set(re.findall(rf"color-scheme: {theme};(.*?)\}}", text, re.DOTALL))
    found = re.findall(r"--([\w-]+): #(..)(..)(..);", block)
    return {name: tuple(int(part, 16) / 255 for part in parts) for name, *parts in found}


def contrast(first, second):
    """Of WCAG 2.2: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    bright, dark = sorted(map(luminance, (first, second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(theme):
    found = colours(theme)
    pairs = [(name, f"{name}-bg") for name in ("pass", "fail", "warn", "skip")]
    pairs += [(name, below) for name in ("text", "quiet", "accent") for below in ("page", "raised")]
    for text, below in pairs:
        assert contrast(found[text], found[below]) >= 4.5, (text, below)
    for name in ("series-1", "series-2"):
        assert contrast(found[name], found["page"]) >= 3, name
