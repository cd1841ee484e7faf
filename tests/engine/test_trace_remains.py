"""A model that keeps what it computes under the text of a size: a trace would leave its own there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_exportcheck.checks.remains import TraceRemains
from pytest_exportcheck.exporters.containers import SharedContainers

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")

SOURCE = """
    import functools

    TABLE = {{}}


    class Kept:
        def __init__(self):
            self.sizes, self.last = [], None


    @functools.lru_cache(None)
    def cached(key):
        return torch.arange(3).float()


    class Net(nn.Module):
        seen = {{}}

        def __init__(self):
            super().__init__()
            self.kept = Kept()

        def forward(self, x):
            key = f"{{x.shape[1]}}"
            {body}


    def build_model():
        return Net()


    def calls():
        return [((torch.ones(n, 2 * n),), {{}}) for n in (4, 8)]
"""

KEPT = {
    "global": (
        "return x + TABLE.setdefault(key, torch.arange(x.shape[1]).float())",
        "global `TABLE` of net.py",
    ),
    "class": (
        "return x + Net.seen.setdefault(key, torch.arange(x.shape[1]).float())",
        "class attribute `Net.seen`",
    ),
    "object": (
        "self.kept.sizes.append(x.shape[1]); self.kept.last = x; return x * 2",
        "attribute `kept`",
    ),
    "lru_cache": ("return x + cached(key)[:1]", ""),
}


@pytest.mark.parametrize("name", KEPT)
def test_every_export_finds_what_the_first_one_found(tmp_path: Path, name: str) -> None:
    body, where = KEPT[name]
    run = make_run(tmp_path, SOURCE.format(body=body))
    for exporter in ("torch-export", "onnx-dynamo", "torch-export"):
        stage, error, record = verdict(run, exporter)
        assert stage == "pass", (exporter, error)
        said = [text for text in record["warnings"] if "the trace leaves fake tensors" in text]
        assert bool(said) == bool(where)
        assert all(f"in {where}, which a later" in text for text in said)


def test_a_trace_that_leaves_nothing_is_no_news(tmp_path: Path) -> None:
    run = make_run(tmp_path, SOURCE.format(body="return x * 2"))
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert record["warnings"] == []


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"a": torch.ones(2)}
        self.seen = [torch.ones(1)]
        self.last = None


def test_only_what_a_trace_has_is_taken_out() -> None:
    net = Net()
    table, seen, one = net.table, net.seen, net.table["a"]
    remains = TraceRemains(net)
    with FakeTensorMode():
        fake = torch.ones(2)
    net.table.update(a=fake, b=fake, c=torch.zeros(1))
    net.seen.append(fake)
    net.last, net.new, net.kept = (fake,), {"x": [fake]}, 3
    assert remains.take_out() == [f"attribute `{name}`" for name in ("table", "seen", "last", "new")]
    assert net.table is table
    assert net.seen is seen
    assert list(table) == ["a", "c"]
    assert table["a"] is one
    assert len(seen) == 1
    assert net.last is None
    assert not hasattr(net, "new")
    assert net.kept == 3
    assert TraceRemains(net).take_out() == []


SHARED = """
    SCALES = [1.0]


    class Inner(nn.Module):
        def __init__(self, scales, table):
            super().__init__()
            self.scales, self.table = scales, table

        def forward(self, x):
            return x * self.scales[0] * self.table["gain"][0] * SCALES[0]


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales, self.table = SCALES, {"gain": [2.0]}
            self.pairs = ([1, 2], {"a": (3, [4])})
            self.again = self.pairs
            self.inner = Inner(self.scales, self.table)

        def forward(self, x):
            self.scales[0] = x.shape[0]
            self.table["gain"][0] = x.shape[1]
            return self.inner(x)


    def build_model():
        return Net()


    def calls():
        return [((torch.ones(n, 2 * n),), {}) for n in (2, 3)]
"""


@pytest.mark.parametrize("exporter", ["torch-export", "torch-export-strict", "onnx-dynamo"])
def test_a_module_shares_its_lists_and_tables_after_the_export_as_before(
    tmp_path: Path, exporter: str
) -> None:
    run = make_run(tmp_path, SHARED)
    for _ in range(2):
        stage, error, record = verdict(run, exporter)
        assert stage == "pass", error
        assert record["warnings"] == []
    model = run.observe("cpu", "float32", "none").model
    module = sys.modules[type(model).__module__]
    assert model.scales is model.inner.scales is module.SCALES
    assert model.table is model.inner.table
    assert model.again is model.pairs


def test_what_holds_something_else_is_left_as_it_is() -> None:
    module = torch.nn.Module()
    changed, written, grown, gone = [1, [2]], {"a": [1]}, [3], [4]
    module.changed, module.written, module.grown, module.gone = changed, written, grown, gone
    containers = SharedContainers(module)
    module.changed = [1, [2, 3]]
    module.written, module.grown = {"a": [1]}, [3]
    written["a"].append(2)  # As a trace does: the copies hold what was there before it.
    written["b"] = [3]
    grown[:] = [5, 6]
    del module.gone
    containers.put_back()
    assert module.changed == [1, [2, 3]]
    assert module.changed is not changed
    assert module.written is written
    assert written == {"a": [1]}
    assert module.grown is grown
    assert grown == [3]
    assert not hasattr(module, "gone")
