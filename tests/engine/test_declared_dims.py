"""Dims that a spec names inside of lists and tuples, and in what a later call takes from an output."""

from __future__ import annotations

from pathlib import Path

from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import load_spec

NET = """
import torch


class Net(torch.nn.Module):
    def forward(self, ids, mask, cache):
        keys = [torch.cat([old, ids[:, :, None].float()], 1) for old, _ in cache]
        scores = [(key * mask[:, :, None]).sum((1, 2)) for key in keys]
        return {"logits": torch.stack(scores), "cache": [(key, key + 1) for key in keys]}
"""

SPEC = """
exportcheck: 1
model: {factory: "net.py:Net"}
observe:
  dims: [batch, seq, past]
  calls:
    - forward:
        ids: "int64[batch, seq] < 50"
        mask: "int64[batch, past + seq] = 1"
        cache: [{tuple: ["float32[batch, past, 1]", "float32[batch, past, 1]"]}]
      dims: {batch: 2, seq: 9, past: 0}
    - forward: {ids: "int64[batch, seq] < 50", mask: "int64[batch, past + seq] = 1", cache: previous.cache}
      dims: {batch: 2, seq: 1, past: 9}
    - forward: {ids: "int64[batch, seq] < 50", mask: "int64[batch, past + seq] = 1", cache: previous.cache}
      dims: {batch: 2, seq: 3, past: 10}
matrix: {exporters: [torch-export]}
"""


def test_they_name_the_axes_of_every_call(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "spec.yaml").write_text(SPEC)
    run = SpecRun(load_spec(tmp_path / "spec.yaml", tmp_path))
    (graph,) = run.observe("cpu", "float32").graphs.values()
    shown = {leaf.path: str(leaf) for leaf in graph.shapes.tensors()}
    assert shown == {
        "ids": "int64[batch, seq]",
        "mask": "int64[batch, past + seq]",
        "cache.0.0": "float32[batch, past, 1]",
        "cache.0.1": "float32[batch, past, 1]",
    }
