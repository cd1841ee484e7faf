"""How the page of a report behaves in a browser."""

from __future__ import annotations

import shutil

import pytest

from pytest_exportcheck.reports.html import html_page

from .html_cases import CASES, DURATIONS, EVIL, LONG, data, details, output, texts
from .test_matrix import record


@pytest.fixture(scope="module")
def page():
    return html_page(data(*CASES))


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
    for place in tab.locator("main figure").all():
        place.scroll_into_view_if_needed()
    tab.locator("main figure svg").nth(2).wait_for()
    assert tab.locator("main figure").count() == 3
    for figure in tab.locator("main figure").all():
        assert figure.evaluate("each => each.scrollWidth <= each.clientWidth")
    tab.locator("#matrix a").first.click()
    tab.locator("pre.details span").nth(1).wait_for()  # The case is built after the click.
    table, prose = tab.locator("pre.details span").all()
    assert table.evaluate("each => each.scrollWidth > each.clientWidth")
    assert prose.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert prose.evaluate("each => each.clientHeight") > 1.9 * table.evaluate("each => each.clientHeight")
    tab.close()


def test_browser_a_known_cause_is_seen_without_scrolling(opened):
    opened.click("#matrix a:has-text('FAIL compare')")
    cause = opened.locator("article:visible .cause")
    assert cause.inner_text().startswith("Known cause (masked rows): rows have no right value. Remedy: mask")
    assert cause.evaluate("each => each.previousElementSibling.matches('pre.headline')")
    assert cause.bounding_box()["y"] < opened.viewport_size["height"] / 2


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
    """The matrix, and what failed, with a word about the rest."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(file.as_uri())
    assert tab.locator("#matrix a").count() == 7
    tab.click("#matrix a:has-text('FAIL compare')")
    failed = tab.locator("article:target")
    assert "specs/vit.yaml [cpu-float32-onnx-dynamo-none] FAIL compare" in failed.inner_text()
    assert "1 of 2 outputs outside" in failed.inner_text()
    assert "need JavaScript" in tab.locator("main").inner_text()
    assert not tab.locator("#filters").is_visible()
    assert not tab.locator("#case").is_visible()
    context.close()


def test_browser_an_address_opens_its_case(opened):
    link = opened.locator("#matrix a:has-text('FAIL compare')").get_attribute("href")
    for address in ("#case-999", "#case-", "#case-1x", "#%zz", "#case-toString"):
        opened.goto(opened.url.partition("#")[0] + address)
        assert opened_case(opened) == []
    opened.goto(opened.url.partition("#")[0] + link)
    opened.reload()
    assert opened_case(opened) == ["specs/vit.yaml [cpu-float32-onnx-dynamo-none] FAIL compare"]
    assert opened.locator("#matrix a[aria-current]").all_inner_texts() == ["FAIL compare"]
    opened.go_back()
    assert opened_case(opened) == []
    assert opened.locator("#matrix a[aria-current]").count() == 0


def test_browser_every_case_says_what_its_data_says(opened, page):
    """Each text of each block stands on the page as it is, and only while its case is open."""
    closed = opened.evaluate("document.querySelectorAll('*').length")
    for number, (name, blocks) in enumerate(details(page).items()):
        opened.evaluate("(number) => { location.hash = `case-${number}`; }", number)
        opened.locator("#case-title", has_text=name).wait_for()
        # Not the kinds of the blocks, and not what is in the classes.
        shown = opened.locator("article").evaluate("each => each.textContent")
        for text in told(blocks):
            assert text in shown, text
        assert opened.locator("article script, article img, article iframe").count() == 0
    assert opened.evaluate("document.scripts.length") == 4
    opened.keyboard.press("Escape")
    # But for the name of the last case, and plots that were seen.
    figures = opened.locator("main figure, main figure *").count()
    assert opened.evaluate("document.querySelectorAll('*').length") <= closed + 1 + figures


def told(blocks):
    """The texts of a report in blocks, and none of ours."""
    found = []
    for kind, *rest in blocks:
        if kind in ("beside", "figures", "folded"):
            found += told(rest[-1])
        elif kind == "plot":
            found.append(rest[0])
        elif kind in ("facts", "table"):
            found += texts(rest[0] if kind == "facts" else rest[1])
        else:
            found += texts(rest)
    return found


def test_browser_many_cases_are_few_elements(browser, tmp_path):
    """Three for a cell of the matrix at most, whatever is to be said of its case."""
    more = {"outputs": [output(f"y.{number}") for number in range(9)], "operators": {"Add": 3}, "nodes": 3}
    many = [record(f"net-{spec}", f"exporter-{column}", details=["a"] * 9, **more)
            for spec in range(40) for column in range(5)]  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(html_page(data(*many)), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    assert tab.evaluate("document.querySelectorAll('#matrix *').length") < 3 * len(many)
    assert tab.evaluate("document.querySelectorAll('body *:not(#matrix *)').length") < 400
    tab.fill("#search", "net-17 exporter-3")
    assert cells(tab) == ["pass"]
    tab.close()


def test_browser_search_covers_what_is_closed(opened):
    """The browser's own search finds nothing in a case that is not open."""
    for words in ("logits  FAIL", "rows have no right value", "aten.add.tensor", "MLP", "FAIL COMPARE"):
        opened.fill("#search", words)
        assert "FAIL compare" in cells(opened), words
        assert len(cells(opened)) == 1, words
    opened.fill("#search", "zebra")
    assert cells(opened) == []
    assert opened.locator("#nothing").is_visible()
    assert not opened.locator("#matrix").is_visible()
    opened.fill("#search", "")
    assert len(cells(opened)) == 7
    assert not opened.locator("#nothing").is_visible()


def test_browser_plots_are_drawn_when_seen(opened):
    opened.set_viewport_size({"width": 1300, "height": 200})
    opened.reload()
    assert opened.locator("main figure").count() == 3
    last = opened.locator("main figure").last
    assert last.locator("svg").count() == 0
    room = last.bounding_box()["height"]
    last.scroll_into_view_if_needed()
    last.locator("svg").wait_for()
    assert abs(last.bounding_box()["height"] - room) < 12, "the page would jump"
    opened.locator("#environment").scroll_into_view_if_needed()
    opened.locator("#environment dt", has_text="torch").wait_for()
    assert EVIL in opened.locator("#environment").inner_text()


@pytest.mark.parametrize("width", [400, 320])
def test_browser_nothing_is_cut_off_a_narrow_screen(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    assert opened.locator("html").evaluate("each => each.scrollWidth <= each.clientWidth")
    for place in opened.locator("header > *, #filters > *, #matrix-title, .hint").all():
        box = place.bounding_box()
        if box:
            assert 0 <= box["x"] <= width - box["width"], place.inner_text()
    # The matrix scrolls in its box, and the names of the specs stay.
    frame = opened.locator("main .scroll")
    assert frame.evaluate("each => each.scrollWidth > each.clientWidth")
    name = opened.locator("#matrix tbody th", has_text="vit")
    before = name.bounding_box()
    frame.evaluate("each => { each.scrollLeft = 150; }")
    assert name.bounding_box() == before
    assert before["width"] < 0.45 * width


def test_browser_a_focused_cell_is_not_covered(opened):
    """By the names of the specs, which stick, when arrows move through columns that are out of sight."""
    opened.set_viewport_size({"width": 400, "height": 800})
    row = opened.locator("#matrix tbody tr", has_text="vit")
    row.locator("a").first.focus()
    for key in ("ArrowRight", "ArrowLeft"):
        opened.keyboard.press(key)
        focused = opened.locator("#matrix a:focus").bounding_box()
        name = row.locator("th").bounding_box()
        assert focused["x"] >= name["x"] + name["width"]
    style = opened.locator("#matrix a:focus").evaluate("each => getComputedStyle(each).outlineStyle")
    assert style == "solid"


def test_browser_a_long_name_wraps_and_does_not_push_the_matrix_away(browser, tmp_path):
    long = "branch_on_a_sum_of_the_values_with_a_long_name-and_another_part" * 2
    path = tmp_path / "report.html"
    cases = [record(spec, f"exporter-{number}") for spec in (long, "a") for number in range(12)]
    path.write_text(html_page(data(*cases)), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto(path.as_uri())
    name = tab.locator("#matrix tbody th", has_text="branch")
    assert name.inner_text() == long
    assert name.bounding_box()["width"] < 400
    assert name.bounding_box()["height"] % 1 == 0
    tab.close()


def test_browser_names_in_tables_are_not_squeezed(browser, tmp_path):
    """Numbers take their room; a name of a usual length stays on its line, a longer one wraps."""
    usual = "cache.layers.10.self_attn.values"
    made = record(
        "net", "x", "fail compare", message="off", outputs=[output(usual, 0.5, False), output(LONG)]
    )
    path = tmp_path / "report.html"
    path.write_text(html_page(data(made)), encoding="utf-8")
    for width in (1280, 400):
        tab = browser.new_page(viewport={"width": width, "height": 800})
        tab.goto(f"{path.as_uri()}#case-0")
        line = tab.locator("article thead th").first.bounding_box()["height"]
        assert tab.locator("article th", has_text=usual).bounding_box()["height"] < 1.2 * line
        assert 1.5 * line < tab.locator("article th", has_text=LONG).bounding_box()["height"] < 8 * line
        tab.close()


def test_browser_on_paper(opened):
    """Light, the whole matrix, and the case that is open; no controls."""
    opened.click("#matrix a:has-text('FAIL compare')")
    opened.emulate_media(media="print")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.locator("main .scroll").evaluate("each => getComputedStyle(each).maxHeight") == "none"
    assert not opened.locator("#filters").is_visible()
    assert not opened.locator("#theme").is_visible()
    assert opened.locator("article h2").is_visible()
    assert opened.locator(".on-paper").is_visible()
    opened.emulate_media(media="screen")
    assert not opened.locator(".on-paper").is_visible()


def test_browser_a_wrong_row_is_marked_by_more_than_colour(opened):
    opened.click("#matrix a:has-text('FAIL shapes')")
    marks = opened.locator("article tr.differs th").evaluate_all(
        "all => all.map((each) => getComputedStyle(each, '::before').content)"
    )
    assert set(marks) == {'"\N{BALLOT X}\N{NO-BREAK SPACE}"'}
