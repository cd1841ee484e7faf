"""A model that keeps what it computes under the text of a size: a trace would leave its own there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_exportcheck.checks.remains import TraceRemains

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
