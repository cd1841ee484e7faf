"""Cases of a report that the tests of its page share, and what of a page is data."""

from __future__ import annotations

import json
import re

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


def script(page, identifier):
    """The data in an element of a page."""
    (text,) = re.findall(
        rf'<script type="application/json" id="{identifier}">(.*?)</script>', page, re.DOTALL
    )
    return text.strip()


def details(page):
    """Name of a case -> its blocks, in the order of the page."""
    names = [entry[0] for entry in json.loads(script(page, "index"))]
    return dict(zip(names, map(json.loads, script(page, "details").splitlines()), strict=True))


def texts(blocks):
    """Every text in blocks, in their order; plots by their titles."""
    found = []
    for block in blocks if isinstance(blocks, list) else blocks.values() if isinstance(blocks, dict) else ():
        if isinstance(block, str):
            found.append(block)
        elif isinstance(block, list) and block[:1] == ["plot"]:
            found.append(block[1])
        else:
            found += texts(block)
    return found


def drawn(blocks):
    """(title, SVG) of the plots in blocks."""
    found = []
    for block in blocks:
        if isinstance(block, list):
            found += [tuple(block[1:])] if block[:1] == ["plot"] else drawn(block)
    return found
