"""The page of a report: what it says, that nothing becomes markup, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from pytest_exportcheck.cli import main
from pytest_exportcheck.reports.html import html_page, plots

from .test_matrix import record

EVIL = "<script>alert(1)</script>"
#: A name as long as those of real patches and outputs.
LONG = "onnx:torch.onnx._internal.exporter._core._prepare_exported_program_for_export"
ATTRIBUTE = '"><img src=x onerror=alert(2)>'


def output(path, max_abs=1e-6, ok=True, atol=1e-5):
    return {
        "path": path, "ok": ok, "shape": [2, 3], "dtype": "float32", "reason": "", "max_abs": max_abs,
        "max_rel": max_abs, "at": [0, 1], "outside": 0.0 if ok else 0.5, "would_need": None, "atol": atol,
        "rtol": 1e-4, "note": "",
    }  # fmt: skip


DURATIONS = {"load": {"wall_s": 0.5, "cpu_s": 0.4}, "export": {"wall_s": 2.0, "cpu_s": 1.5}}
DIAGNOSIS = {
    "guilty": "conversion: %add_3 in model.mlp (model.py:7)",
    "rungs": [{"name": "captured", "status": "ok", "max_abs": 1e-7, "max_rel": 1e-6, "worst": "y"},
              {"name": "ONNX", "status": "differs", "max_abs": 0.5, "max_rel": 1.0, "worst": "y"}],
    "nodes": {"kind": "jump", "kernel": False, "compared": 3, "nodes": 4, "note": "",
              "first": {"name": "add_3", "operator": "aten.add.Tensor", "onnx_nodes": "Add -> Relu",
                        "module": "model.mlp (MLP)", "source": "model.py:7: x + y", "shape": [2, 3],
                        "dtype": "float32", "max_abs": 0.5, "error": 0.25, "own_error": 0.125, "reason": ""},
              "profile": [["add_1", 1e-7, 1e-7], ["add_3", 0.5, 0.5], ["mul", 0.6, None]]},
    "pieces": {"culprits": [{"path": "mlp", "kind": "MLP", "site": "mlp (call 1)", "step": "DISC",
                             "reason": "1 of 1 output differ", "line": "model.py:7 in forward: x + y",
                             "inputs": ["x: float32[2, 3]"], "parent": "the model", "parent_exports": True}],
               "note": "2 modules were not searched"},
    "causes": [{"name": "masked rows", "sentence": "rows have no right value", "remedy": "mask them",
                "link": "https://example.org/why"}],
    "reproduction": ["repro.py fails the same way"],
    "notes": ["one step was left out"],
    "seconds": 3.2,
    "of_another_tool": {"extra": 1},
}  # fmt: skip
SHAPES = {"": {"x": "int64[batch, seq]", "mask": "int64[batch, past + seq]"}}

CASES = [
    record("llama", None, "fail shapes", accepted=SHAPES,
           shapes={"": {**SHAPES[""], "mask": "int64[batch, 30]"}}, message="shapes differ"),
    record("llama", "onnx-dynamo", outputs=[output("logits"), output("cache.layers.0.keys")],
           durations=DURATIONS, nodes=70, operators={"Add": 3}, exported_shapes={"x": "[batch, seq]"}),
    record("llama", "onnx-dynamo", "skip", device="cuda", message="no CUDA"),
    record("vit", "onnx-dynamo", "fail compare", stage="compare", message="1 of 2 outputs outside",
           details=["logits  FAIL"], outputs=[output("logits", 0.5, False), output("y", "nan", False)],
           durations=DURATIONS, diagnosis=DIAGNOSIS, reproduce="pytest --exportcheck vit",
           patches={"active": 2, "called": {"patched_mask": 4, LONG: 1}}, nodes=90,
           rewritten={"m.forward": "-    if x.sum() > 0:\n+    y = torch.where("},
           resize={"passed": ["batch=1, seq=9", "batch=2, seq=19"], "refused_by_eager": []}),
    record("vit", "torch-export", mode="hf"),
    record("bart", "torch-export", "xfail export", mode="hf", message="a bug of theirs"),
    record(EVIL, EVIL, "fail export", mode=ATTRIBUTE, message=EVIL, details=[EVIL, "$x^2$"], graph=EVIL,
           outputs=[output(EVIL), output(ATTRIBUTE), output("a$b$")], durations=DURATIONS, nodes=3,
           reproduce=EVIL, operators={EVIL: 1}, diagnosis={"guilty": EVIL, EVIL: [EVIL, {EVIL: None}]}),
]  # fmt: skip


def data(*cases):
    return {"schema": 1, "environment": {"packages": {"torch": "2.13"}, EVIL: EVIL}, "cases": list(cases)}


@pytest.fixture(scope="module")
def page():
    return html_page(data(*CASES))


def test_who_judged_an_output_stands_in_the_place_of_numbers():
    outputs = [{**output("boxes", 0.0), "by": "f.py:own"}, output("scores"), output("labels")]
    shown = html_page(data(record("net", "onnx-dynamo", outputs=outputs)))
    assert re.search(
        r'<th scope="row">boxes</th><td>2x3</td><td>float32</td><td colspan="5">by f.py:own</td>', shown
    )
    assert ">scores<" in str(plots.errors_by_output(outputs)), "the others have their plot"
    assert ">boxes<" not in str(plots.errors_by_output(outputs))


def test_a_diagnosis_is_shown_part_by_part(page):
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for words in (
        "captured ok 1.0e-07", "ONNX differs 5.0e-01", "%add_3 = aten.add.Tensor",
        "jump: this node alone computes something else", "in ONNX Add -&gt; Relu", "float32[2, 3]",
        "relative to its size 2.5e-01", "its own error 1.2e-01", "to blame the conversion", "3 of 4 values",
        "mlp (call 1) (MLP)", "model.py:7 in forward: x + y", "x: float32[2, 3]",
        "the model exports with it replaced by a custom op", "2 modules were not searched",
        "masked rows : rows have no right value. Remedy: mask them https://example.org/why",
        "repro.py fails the same way", "one step was left out", "It took 3.2 s.",
        "More of the diagnosis of_another_tool extra 1",
    ):  # fmt: skip
        assert words in text, words
    # No part of it as a dump of keys.
    for key in ("own_outside", "parent_exports", "only_alone", "kernel_note", "onnx_nodes"):
        assert f"<dt>{key}</dt>" not in page


@pytest.mark.parametrize(
    "diagnosis",
    [{}, {"verdict": "not diagnosed: it depends on history"}, {"ladder": 3, "nodes": [], "pieces": "no"},
     {"rungs": "none", "profile": [[1]], "culprits": {"a": 1}, "causes": "why", "reproduction": "text"},
     {"nodes": {"first": {"name": "n"}}, "causes": [{"name": "n"}], "culprits": [{"path": "p"}]}],
)  # fmt: skip
def test_a_diagnosis_of_another_tool_does_not_break_the_page(diagnosis):
    failed = record("net", "onnx-dynamo", "fail compare", message="off", diagnosis=diagnosis)
    assert "FAIL compare" in html_page(data(failed))


def test_a_known_cause_is_shown_without_a_diagnosis():
    cause = {"name": "fixed axis", "sentence": "a plain number", "remedy": "look for int()", "link": ""}
    failed = record("net", "onnx-dynamo", "fail export", message="no", causes=[cause])
    assert "<strong>fixed axis</strong>: a plain number. Remedy: look for int()" in html_page(data(failed))


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
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


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


def test_identifiers_are_unique_also_across_plots(page):
    identifiers = [attributes["id"] for _, attributes in Parsed(page).tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for target in re.findall(r'(?:url\(|xlink:href=")#([\w-]+)', page):
        assert target in identifiers


def test_every_plot_is_there_and_has_the_colours_of_the_page(page):
    for title in ("Errors of all outputs", "Time by stage, all cases", "Node counts", "Error by node"):
        assert page.count(f"<figcaption>{title}</figcaption>") == 1
    assert page.count("<figcaption>Error by output</figcaption>") == 2
    assert page.count("<figcaption>Time by stage</figcaption>") == 3
    for stand_in in plots._STANDS_FOR:
        assert stand_in not in page
    # Text is text, and no mathematics.
    assert ">a$b$</text>" in page
    assert "mathdefault" not in page


def test_a_case_tells_what_the_record_knows(page):
    articles = page.split("<article")
    (case,) = [text for text in articles if "vit.yaml [cpu-float32-onnx-dynamo-none] <span" in text]
    for text in (
        ">1 of 2 outputs outside</pre>",
        ">logits  FAIL</span></pre>",
        "conversion: %add_3 in model.mlp (model.py:7)",
        "pytest --exportcheck vit",
        '<td class="number">nan</td>',
        "patched_mask",
        "-    if x.sum() &gt; 0:\n+    y = torch.where(",
    ):
        assert text in case
    (shapes,) = [text for text in articles if "llama.yaml [cpu-float32-shapes] <span" in text]
    assert "int64[batch, past + seq]</td><td>int64[batch, 30]</td>" in shapes
    (exported,) = [text for text in articles if "llama.yaml [cpu-float32-onnx-dynamo-none] <span" in text]
    assert "int64[batch, seq]</td><td>int64[batch, seq]</td><td>[batch, seq]</td>" in exported


def test_plots_of_cases_are_limited_and_failed_ones_come_first(monkeypatch):
    monkeypatch.setattr("pytest_exportcheck.reports.html.page.MOST_PLOTS", 1)
    text = html_page(
        data(record("a", "x", durations=DURATIONS), record("b", "x", "fail run", durations=DURATIONS))
    )
    passed, failed = text[text.index('id="case-0"') :].split('id="case-1"')
    assert "No plots: only the first cases have them" in passed
    assert "<figcaption>Time by stage</figcaption>" in failed


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


# In a browser.


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(params=["light", "dark"])
def opened(browser, page, tmp_path, request):
    """The page in a browser; fails if it complains, asks for anything, or opens a dialog."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1300, "height": 900})
    tab = context.new_page()
    wrong = []
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    tab.on("request", lambda asked: wrong.append(asked.url) if asked.url != file.as_uri() else None)
    tab.goto(file.as_uri())
    tab.scheme = request.param
    yield tab
    context.close()
    assert not [text for text in wrong if not text.startswith("data:")]


def cells(tab):
    return tab.locator("#matrix a:visible").all_inner_texts()


def shown(tab):
    return tab.locator("#shown").inner_text()


def opened_case(tab):
    return tab.locator("article:visible h2").all_inner_texts()


def test_browser_filters(opened):
    assert len(cells(opened)) == 7
    assert shown(opened) == "7 of 7 tests shown"
    opened.fill("#search", "VIT")
    assert cells(opened) == ["FAIL compare", "pass"]
    assert opened.locator("#matrix thead th:visible").all_inner_texts() == [
        "cpu", "spec", "onnx-dynamo", "torch-export+hf",
    ]  # fmt: skip
    opened.select_option("select[data-filter=exporter]", "torch-export")
    assert cells(opened) == ["pass"]
    opened.click("button[type=reset]")
    # A polled function is text that the page evaluates, and its content policy refuses that.
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(opened.locator("#shown")).to_have_text("7 of 7 tests shown")
    opened.select_option("select[data-filter=device]", "cuda")
    assert cells(opened) == ["skip"]
    opened.select_option("select[data-filter=device]", "")
    opened.select_option("select[data-filter=patch_mode]", "hf")
    assert sorted(cells(opened)) == ["pass", "xfail export"]
    opened.select_option("select[data-filter=patch_mode]", "")
    for kind in ("pass", "skip", "xfail"):
        opened.uncheck(f"input[value={kind}]")
    assert sorted(cells(opened)) == ["FAIL compare", "FAIL export", "FAIL shapes"]
    opened.fill("#search", "nothing has this")
    assert shown(opened) == "0 of 7 tests shown"


def test_browser_a_case(opened):
    assert opened_case(opened) == []
    opened.click("#matrix a:has-text('FAIL compare')")
    assert opened_case(opened) == ["specs/vit.yaml [cpu-float32-onnx-dynamo-none] FAIL compare"]
    case = opened.locator("article:visible")
    assert case.locator("figure svg").count() == 2
    colour = case.locator("svg text").first.evaluate("each => getComputedStyle(each).fill")
    text = case.evaluate("each => getComputedStyle(each).color")
    assert colour == text
    dark = opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (opened.scheme == "dark")
    opened.click("article:visible .next")
    assert opened_case(opened) != []
    opened.click("article:visible .close")
    assert opened_case(opened) == []
    opened.click("#theme")
    assert (opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)") != dark


def test_browser_plots_and_prose_fit_a_narrow_screen(browser, tmp_path):
    """The bar of what is outside is at the right end of a plot; a table keeps its columns, prose wraps."""
    details = [
        "output  shape    dtype    max abs  at            max rel  outside  would need",
        "a sentence about what to write into the spec, which is longer than any narrow screen is wide",
    ]
    failed = record("net", "onnx-dynamo", "fail compare", stage="compare", message="off", details=details,
                    outputs=[output("y", 0.5, False), output("z")], durations=DURATIONS, nodes=3)  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(html_page(data(failed)), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 400, "height": 800})
    tab.goto(path.as_uri())
    assert tab.locator("main figure svg").count() >= 2
    for figure in tab.locator("main figure").all():
        assert figure.evaluate("each => each.scrollWidth <= each.clientWidth")
    tab.locator("#matrix a").first.click()
    table, prose = tab.locator("pre.details span").all()
    assert table.evaluate("each => each.scrollWidth > each.clientWidth")
    assert prose.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert prose.evaluate("each => each.clientHeight") > 1.9 * table.evaluate("each => each.clientHeight")
    tab.close()


def test_browser_names_are_text(opened):
    assert EVIL in opened.locator("#matrix thead").inner_text()
    opened.click("#matrix a:has-text('FAIL export')")
    assert opened.locator("article:visible pre.headline").inner_text() == EVIL
    assert opened.locator("article:visible pre.details").inner_text() == f"{EVIL}\n$x^2$"


def test_browser_on_a_narrow_screen(opened):
    """Only tables, messages and plots scroll sideways, each in its own frame; no value is squeezed."""
    opened.set_viewport_size({"width": 400, "height": 800})
    too_wide = "each => each.scrollWidth - each.clientWidth"
    assert opened.locator("html").evaluate(too_wide) == 0
    opened.click("#matrix a:has-text('FAIL compare')")
    case = opened.locator("article:visible")
    assert LONG in case.inner_text()
    assert case.evaluate(too_wide) == 0
    for place in case.locator("dd > ul > li:visible").all():
        assert place.bounding_box()["width"] > 100, place.inner_text()
    for text in case.locator("figure svg text").all()[:5]:
        assert text.bounding_box()["height"] > 8, text.inner_text()


def test_browser_lines_between_rows(opened):
    """A cell that sticks covers a part of its neighbour's line where rows end between two pixels."""
    for row in opened.locator("#matrix tbody tr").all():
        assert row.bounding_box()["height"] % 1 == 0, row.inner_text()


def test_browser_legends_lie_on_nothing(opened):
    opened.click("#matrix a:has-text('FAIL compare')")
    for figure in opened.locator("article:visible figure svg").all():
        boxes = [each.bounding_box() for each in figure.locator("[id*=legend]").all()[:1]]
        axes = figure.locator("[id*=patch_2]").first.bounding_box()
        assert all(box["y"] + box["height"] <= axes["y"] + 1 for box in boxes)


def test_browser_keys_alone(opened):
    press = opened.keyboard.press
    focused = "document.activeElement.innerText"
    press("/")
    assert opened.evaluate("document.activeElement.id") == "search"
    opened.keyboard.type("vit")
    for _ in range(30):
        press("Tab")
        if opened.evaluate("document.activeElement.matches('#matrix a')"):
            break
    assert opened.evaluate(focused) == "FAIL compare"
    press("ArrowRight")
    assert opened.evaluate(focused) == "pass"
    press("ArrowLeft")
    press("Enter")
    assert len(opened_case(opened)) == 1
    # A browser opens the case of an address in a turn of its own.
    for _ in range(100):
        if opened.evaluate("document.activeElement.tagName") == "H2":
            break
        opened.wait_for_timeout(50)
    assert opened.evaluate("document.activeElement.tagName") == "H2"
    press("Escape")
    assert opened_case(opened) == []
    assert opened.evaluate(focused) == "FAIL compare"


def test_browser_without_javascript(browser, page, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(file.as_uri())
    tab.click("#matrix a:has-text('FAIL compare')")
    assert tab.locator("article:visible h2").count() == 1
    assert not tab.locator("#filters").is_visible()
    context.close()


def test_what_is_empty_is_not_listed_and_numbers_have_their_noun():
    made = record("net", "onnx-dynamo", captured={"agrees": 2, "refuses": [], "differs": []},
                  operators={"Add": 3}, diagnosis={"profile": [["add", 0.5, 0.5]]})  # fmt: skip
    environment = {
        "arguments": ["--exportcheck", "my specs", "-k", "a or b"],
        "options": {"update": True, "devices": None},
    }
    page = html_page({"schema": 1, "environment": environment, "cases": [made, record("net", None)]})
    assert "<dt>agrees</dt><dd>2" in page
    assert "<dt>refuses</dt>" not in page
    assert "<dt>devices</dt>" not in page
    assert "<summary>1 operator</summary>" in page
    assert '<p class="counts">1 case: 1 pass</p>' in page
    assert "<code>--exportcheck &#39;my specs&#39; -k &#39;a or b&#39;</code>" in page
    # One point is no plot.
    assert "Error by node" not in page
    assert plots.errors_by_node([("a", 0.5, 0.5), ("b", 0.5, None), ("c", 0.1, None)]) is not None
