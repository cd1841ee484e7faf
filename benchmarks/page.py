"""What the HTML report costs a browser, over synthetic reports of many cases.

    python benchmarks/page.py [--cases 640 2000] [--keep FOLDER] [--json FILE]

A row for each number of cases (shapes checks included):

file      MiB of the page, CPU seconds of making it
load      elements once the page stands; seconds by the clock, and CPU seconds of its main thread until then
          (script, and style and layout by themselves)
search    CPU seconds of typing a word, letter by letter, and showing its cases; median of four words
open      CPU seconds until a failed case stands, median of five

Chromium counts the seconds of its main thread (``Performance.getMetrics``, thread time), so that a loaded
machine does not change them much. Needs playwright and a chromium: ``apt-get install chromium``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_exportcheck.reports.html import html_page

COLUMNS = (("shapes", "none"), ("onnx-dynamo", "none"), ("onnx-dynamo", "hf"), ("onnx-dynamo", "all"),
           ("onnx-torchscript", "none"), ("torch-export", "none"), ("torch-export", "hf"),
           ("transformers-onnx", "own"))  # fmt: skip
FAMILIES = (
    "llama",
    "mistral",
    "qwen3_moe",
    "bert",
    "t5",
    "whisper",
    "vit",
    "clip",
    "dinov2",
    "llava",
    "gpt2",
    "resnet",
)
#: As often as in a run that needs work.
VERDICTS = ("pass",) * 15 + ("fail compare", "fail export", "xfail export", "skip", "crash session")
STAGES = ("load", "observe", "patch", "shapes", "export", "convert", "session", "run", "compare", "resize")
OPERATORS = ("Add", "MatMul", "Mul", "Reshape", "Transpose", "Softmax", "Concat", "Slice", "Gather",
             "Unsqueeze", "Cast", "Shape", "Where", "Expand", "Sqrt", "Pow", "Split", "Constant")  # fmt: skip
WORDS = ("llama", "assert size", "spec-0017 dynamo", "zebra")


def report(cases: int, seed: int = 0) -> dict[str, Any]:
    """The data of a report of `cases` records, the same for the same numbers."""
    choose = random.Random(seed)
    made = list(_records(cases, choose))
    environment = {
        "packages": {"torch": "2.13.0", "onnxruntime": "1.32.0", "transformers": "5.24.0"},
        "python": "3.12.1", "arguments": ["--exportcheck", "model_specs"], "seconds": 4000.0,
    }  # fmt: skip
    return {"schema": 1, "environment": environment, "cases": made}


def _records(cases: int, choose: random.Random) -> Iterator[dict[str, Any]]:
    for number in range(cases):
        spec, column = divmod(number, len(COLUMNS))
        family = FAMILIES[spec % len(FAMILIES)]
        path = f"model_specs/{family}/{family}-spec-{spec:04d}.yaml"
        exporter, mode = COLUMNS[column]
        if exporter == "shapes":
            yield _shapes_check(path)
        else:
            yield _case(path, exporter, mode, choose.choice(VERDICTS), choose)


def _shapes_check(path: str) -> dict[str, Any]:
    shapes = {"": {"input_ids": "int64[batch, seq]", "attention_mask": "int64[batch, past + seq]",
                   **{f"cache.layers.{layer}.{kind}": "float32[batch, 2, past, 16]"
                      for layer in range(4) for kind in ("keys", "values")}}}  # fmt: skip
    return {**_identity(path, None, None, "pass"), "shapes": shapes, "accepted": shapes}


def _identity(path: str, exporter: str | None, mode: str | None, verdict: str) -> dict[str, Any]:
    node = (
        f"{path}::test_export[cpu-float32-{exporter}-{mode}]"
        if exporter
        else f"{path}::test_dynamic_shapes[cpu-float32]"
    )
    return {
        "spec": path, "exporter": exporter, "patch_mode": mode, "device": "cpu", "dtype": "float32",
        "graph": None,
        "verdict": verdict, "nodeid": node, "message": None, "stage": "shapes", "durations": {}, "seed": 0,
        "reproduce": f'pytest --exportcheck "{node}"',
    }  # fmt: skip


def _case(path: str, exporter: str, mode: str, verdict: str, choose: random.Random) -> dict[str, Any]:
    record = _identity(path, exporter, mode, verdict)
    kind, _, stage = verdict.partition(" ")
    if kind == "skip":
        return {**record, "stage": None, "message": "no CUDA device"}
    reached = STAGES[: STAGES.index(stage or "resize") + 1]
    record |= {
        "stage": reached[-1],
        "durations": {each: {"wall_s": choose.random(), "cpu_s": choose.random()} for each in reached},
        "example": {"call": 1, "sizes": {"batch": 2, "past": 7, "seq": 5}, "resized": True, "note": None},
        "exported_shapes": {"input_ids": "[batch, seq]", "attention_mask": "[batch, past + seq]"},
        "patches": {
            "active": 12,
            "called": {f"patched_{name}": 4 for name in ("mask", "rope", "cache", "attention")},
        },
        "peak_rss_mb": 900.5,
    }
    if "compare" in reached:
        record |= {
            "outputs": [_output(path, kind, choose) for path in _outputs()],
            "nodes": choose.randrange(80, 900), "opset": 23, "model_bytes": 350_000, "conversion": "new",
            "operators": {name: choose.randrange(1, 90) for name in OPERATORS},
        }  # fmt: skip
    if kind in ("fail", "xfail", "crash"):
        record |= {
            "message": f"{stage}: assert size of tensor a ({choose.randrange(9)}) must match b",
            "details": [f"  File model.py, line {line}, in forward" for line in range(8)],
        }
    if verdict == "fail compare":
        record["diagnosis"] = _diagnosis(choose)
    if verdict == "pass":
        record["resize"] = {"passed": [f"batch={size}, seq={size + 3}" for size in range(1, 9)]}
    return record


def _outputs() -> list[str]:
    return ["logits", *(f"cache.layers.{layer}.{kind}" for layer in range(4) for kind in ("keys", "values"))]


def _output(path: str, kind: str, choose: random.Random) -> dict[str, Any]:
    error = 10 ** -choose.uniform(1 if kind == "fail" else 5.5, 8)
    ok = error < 1e-5
    return {
        "path": path, "ok": ok, "shape": [2, 5, 256], "dtype": "float32", "reason": "" if ok else "outside",
        "max_abs": error, "max_rel": 10 * error, "at": [0, 1, 17], "outside": 0.0 if ok else 0.25,
        "would_need": None if ok else 2 * error, "atol": 1e-5, "rtol": 1e-4, "note": "", "by": "",
    }  # fmt: skip


def _diagnosis(choose: random.Random) -> dict[str, Any]:
    profile = [
        [f"node_{number}", 10 ** -choose.uniform(1, 8), 10 ** -choose.uniform(1, 8)] for number in range(60)
    ]
    rungs = [{"name": name, "status": status, "max_abs": error, "max_rel": error, "worst": "logits"}
             for name, status, error in (("captured", "ok", 1e-7), ("ONNX", "differs", 0.5))]  # fmt: skip
    first = {"name": "node_30", "operator": "aten.add.Tensor", "onnx_nodes": "Add", "module": "model.mlp",
             "source": "model.py:7: x + y", "shape": [2, 3], "max_abs": 0.5, "error": 0.25}  # fmt: skip
    nodes = {"kind": "jump", "kernel": False, "compared": 60, "nodes": 80, "first": first, "profile": profile}
    return {
        "guilty": "conversion: %node_30 in model.mlp (model.py:7)", "rungs": rungs, "seconds": 3.2,
        "nodes": nodes,
    }  # fmt: skip


def measure(browser: Any, path: Path) -> dict[str, Any]:
    """What the page at `path` costs; every page in a process of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> dict[str, float]:
        # Two frames: what was asked for is laid out and painted.
        tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}

    def seconds(act: Any) -> float:
        before = spent()["TaskDuration"]
        act()
        return float(spent()["TaskDuration"] - before)

    tab.goto(path.as_uri(), timeout=300_000)
    load = spent()
    # Of this document alone: those that the process counts may be of a document before.
    elements = tab.evaluate("document.querySelectorAll('*').length")
    stands = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    search = []
    for word in WORDS:
        tab.fill("#search", "")
        search.append(seconds(lambda word=word: tab.locator("#search").press_sequentially(word)))
    tab.fill("#search", "")
    failed = tab.evaluate(
        "() => [...document.querySelectorAll('#matrix a.fail')].slice(0, 5).map((each) => each.hash)"
    )
    opened = [
        seconds(lambda hash=hash: tab.evaluate("(hash) => { location.hash = hash; }", hash))
        for hash in failed
    ]
    assert tab.locator("h2:visible", has_text="FAIL").count() == 1, "no case stands"
    context.close()
    return {
        "elements": elements,
        "wall_s": stands,
        "load_s": load["TaskDuration"],
        "script_s": load["ScriptDuration"],
        "layout_s": load["LayoutDuration"] + load["RecalcStyleDuration"],
        "search_s": statistics.median(search),
        "open_s": statistics.median(opened),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, nargs="+", default=[640, 2000])
    parser.add_argument("--keep", type=Path, help="a folder for the pages and their data")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("no chromium on this machine: apt-get install chromium")
    found = {}
    print("cases   MiB  made s  elements  wall s  load s  script s  layout s  search s  open s")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for cases in options.cases:
            data = report(cases)
            began = time.process_time()
            text = html_page(data)
            made = time.process_time() - began
            page = folder / f"page-{cases}.html"
            page.write_text(text, encoding="utf-8")
            page.with_suffix(".json").write_text(json.dumps(data), encoding="utf-8")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            row = {"mib": page.stat().st_size / 2**20, "made_s": made, **measure(browser, page)}
            browser.close()
            found[str(cases)] = row
            print(
                f"{cases:5}{row['mib']:6.1f}{made:8.1f}{row['elements']:10}{row['wall_s']:8.2f}{row['load_s']:8.2f}{row['script_s']:10.3f}"
                f"{row['layout_s']:10.3f}{row['search_s']:10.3f}{row['open_s']:8.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
