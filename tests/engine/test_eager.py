"""A model that disagrees with itself is named with what it is and where; no exporter is blamed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.checks.trace import Trace, first_difference
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.registry import EXPORTERS
from pytest_exportcheck.observe import ObserverWarning
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import load_spec

from .helpers import make_run, verdict

CALLS = """

def build_model():
    return Net()


def calls():
    g = torch.Generator().manual_seed(1)
    return [((torch.randn(n, 4, generator=g),), {}) for n in (2, 3, 5)]
"""


def net(tmp_path: Path, body: str, extra: str = "") -> SpecRun:
    """A spec of a module with `body` (indented by four)."""
    return make_run(tmp_path, "\nclass Net(nn.Module):\n" + body.strip("\n") + "\n" + CALLS, extra)


def init(*lines: str) -> str:
    return "    def __init__(self):\n        super().__init__()\n" + "".join(f"        {x}\n" for x in lines)


def forward(*lines: str) -> str:
    return "    def forward(self, x):\n" + "".join(f"        {x}\n" for x in lines)


def stays_in_train_mode() -> str:
    return "    def train(self, mode=True):\n        return self\n"


GUILTY = {
    "dropout": (
        init("self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.4)])")
        + stays_in_train_mode()
        + forward("return self.layers[1](self.layers[0](x.repeat(9, 1)))"),
        ["dropout is active in `layers.1` (", "net.py:13 in forward", "(training=True)"],
    ),
    "functional-dropout": (
        forward("return nn.functional.dropout(x.repeat(9, 1), 0.4)"),
        [
            "dropout is active at ",
            "net.py:8 in forward (training=True is passed, its module is in eval mode)",
        ],
    ),
    "random": (
        forward("return x + torch.rand_like(x)"),
        ["torch.rand_like at ", "net.py:8 in forward draws from the global generator"],
    ),
    "own-generator": (
        init("self.g = torch.Generator().manual_seed(0)")
        + forward("return x + torch.randn(x.shape, generator=self.g)"),
        ["torch.randn at ", "draws from a generator of its own"],
    ),
    "python-random": (
        forward("import random", "return x * random.random()"),
        ["Python's `random` is drawn from during the call"],
    ),
    "numpy-random": (
        forward("import numpy", "return x * float(numpy.random.rand())"),
        ["numpy's global generator is drawn from during the call"],
    ),
    "buffer-written": (
        init('self.register_buffer("steps", torch.tensor(0))')
        + forward("self.steps += 1", "return x + self.steps"),
        ["buffer `steps` changed from 4 to 5 during a replay of call 0", "net.py:11 in forward"],
    ),
    "buffer-replaced": (
        init('self.register_buffer("steps", torch.tensor(0))')
        + forward("self.steps = self.steps + 1", "return x + self.steps"),
        ["buffer `steps` changed from 4 to 5 during a replay of call 0"],
    ),
    "attribute": (
        init("self.inner = nn.Identity()", "self.inner.past = None")
        + forward(
            "now = x.sum(0, keepdim=True)",
            "self.inner.past = now if self.inner.past is None else torch.cat([self.inner.past, now])",
            "return x + self.inner.past.sum(0)",
        ),
        ["attribute `inner.past` changed from float32[4, 4] to float32[5, 4] during a replay of call 0"],
    ),
    "statistics": (
        init("self.bn = nn.BatchNorm1d(4)")
        + forward("self.bn.train()", "self.bn(x)", "self.bn.eval()", "return self.bn(x)"),
        ["buffer `bn.running_mean` changed from"],
    ),
    "global": (
        forward("STEP[0] += 1", "return x * STEP[0]") + "\n\nSTEP = [0]\n",
        [
            "torch.mul at ",
            "gets 5 in one replay and 6 in the next: a Python value that changes between calls",
        ],
    ),
    "branch-on-a-global": (
        forward("STEP[0] += 1", "return x + 1 if STEP[0] % 2 else x * 2") + "\n\nSTEP = [1]\n",
        ["(a branch on something that changes between calls)"],
    ),
}


@pytest.mark.parametrize("name", GUILTY)
def test_what_changes_is_named(tmp_path: Path, name: str) -> None:
    body, says = GUILTY[name]
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, _ = verdict(net(tmp_path, body), exporter)
        assert stage == "observe"
        assert error is not None
        assert error.message.startswith("eager disagrees with itself on call 0: ")
        assert error.message.endswith("; no exporter is blamed")
        for text in says:
            assert text in error.message


def test_a_model_that_refuses_a_replay_names_its_state(tmp_path: Path) -> None:
    body = init("self.n = 0") + forward("self.n += 1", "assert self.n < 4, 'too many'", "return x")
    stage, error, _ = verdict(net(tmp_path, body), "torch-export")
    assert stage == "observe"
    assert "eager replays call 0 with AssertionError: too many: attribute `n` changed from 4 to 5" in str(
        error
    )


def test_a_recorded_call_under_other_conditions(tmp_path: Path) -> None:
    """Autocast, or a global that the calls set: two replays agree with each other."""
    body = (
        forward("return x @ x.T") + "\n\ndef drive(model):\n    with torch.autocast('cpu', torch.bfloat16):\n"
    )
    body += "        model(torch.randn(3, 4)), model(torch.randn(5, 4))\n"
    run = net(tmp_path, body, 'observe: {calls: "net.py:drive"}\n')
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "observe"
    assert "two more replays agree with each other: the recorded call ran under other conditions" in str(
        error
    )


#: Body of `forward(self, a, b)`, arguments of a call with n rows -> what the message says.
LOST = {
    "one tensor": ("return a * 3 if a is b else a + b", "x, x", "`a` and `b` are one tensor"),
    "shared memory": ("a.zero_()\n        return b * 2, a", "x[:, :4], x[:, 2:]", "`a` and `b` share memory"),
    "windows": ("a[0] = 7.0\n        return a * b", "x.t().unfold(0, 3, 1), x[0, 0] * 1", "axes of `a`"),
    "offset": (
        "return a * a.storage_offset() + b", "x[1:, 1:], x[:-1, 1:] * 1",
        "`a` begins 7 elements into its memory",
    ),
    "keywords": (
        "one, two = k.values()\n        return one - 2 * two", "q=x, k=x * 3",
        "extra keywords were passed in the order q, k, copies are in that of names",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_copies_of_the_arguments_lack_is_named(tmp_path: Path, name: str) -> None:
    """A program is fed with tensors of their own: what eager makes of others is no fault of an exporter."""
    body, arguments, says = LOST[name]
    parameters = "self, **k" if name == "keywords" else "self, a, b"
    drive = f"    for n in (3, 5):\n        x = torch.randn(n, 6)\n        model({arguments})\n"
    source = f"    def forward({parameters}):\n        {body}\n\n\ndef drive(model):\n{drive}"
    run = net(tmp_path, source, 'observe: {calls: "net.py:drive"}\n')
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "observe", error
    assert error is not None
    assert f"copies of the arguments lack what those of the recorded call had: {says}" in error.message
    assert "autocast" in "\n".join(error.details)


def test_arguments_that_share_memory_and_are_only_read_are_no_news(tmp_path: Path) -> None:
    body = "    def forward(self, a, b):\n        return a @ b.t()\n\n\ndef drive(model):\n"
    body += "    for n in (3, 5, 6):\n        x = torch.randn(n, 6)\n        model(x[:, :4], x[:, 2:])\n"
    run = net(tmp_path, body, 'observe: {calls: "net.py:drive"}\n')
    assert verdict(run, "torch-export")[0] == "pass"


def observed(run: SpecRun) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observation = run.observe("cpu", "float32")
    graph = observation.graphs[None]
    said = [str(item.message) for item in caught if item.category is ObserverWarning]
    assert set(graph.shapes.warnings) <= {text.removeprefix("net.yaml: ") for text in said}
    return graph.shapes.warnings, graph


def test_a_right_model_has_nothing_to_say(tmp_path: Path) -> None:
    body = init("self.seq = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))")
    notes, graph = observed(net(tmp_path, body + forward("return self.seq(x)")))
    assert notes == []
    assert not graph.writes
    assert not graph.stateful


def test_a_right_model_is_replayed_once_a_call(tmp_path: Path) -> None:
    """Naming is expensive: it runs where there is something to name."""
    body = init("self.count = []") + forward("self.count.append(len(x))", "return x * 2")
    run = net(tmp_path, body, "resize: off\n")
    notes, graph = observed(run)
    assert notes == []
    assert graph.target.module.count[:3] == [2, 3, 5]
    replays = graph.target.module.count[3:]
    assert [replays.count(n) for n in (2, 3)] == [1, 1]


def test_state_that_no_output_shows_is_a_warning(tmp_path: Path) -> None:
    body = init('self.register_buffer("steps", torch.tensor(0))') + forward("self.steps += 1", "return x * 2")
    run = net(tmp_path, body)
    notes, graph = observed(run)
    assert len(notes) == 1
    assert "buffer `steps` changed from 6 to 7 during a call, though no output" in notes[0]
    assert graph.stateful == {"buffer `steps`"}
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert record["warnings"] == notes


def test_modules_left_in_train_mode_are_a_warning(tmp_path: Path) -> None:
    body = (
        init("self.sub = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))")
        + stays_in_train_mode()
        + forward("return self.sub(x)")
    )
    notes, _ = observed(net(tmp_path, body))
    assert notes == [
        "4 modules are in train mode though eval() was called on the model (`the model`, `sub`, `sub.0`, "
        "`sub.1`): the program is the one of train mode"
    ]


def test_a_random_number_that_no_output_shows_is_a_warning(tmp_path: Path) -> None:
    notes, _ = observed(net(tmp_path, forward("torch.rand(2)", "return x * 2")))
    assert len(notes) == 1
    assert "the global generator of torch is drawn from during a call" in notes[0]
    assert "torch.rand at " in notes[0]


# inputs written to in place

IN_PLACE = forward("y = x * 2", "x.add_(1)", "return y")


def test_an_input_written_in_place_is_named_and_compared(tmp_path: Path) -> None:
    run = net(tmp_path, IN_PLACE)
    notes, graph = observed(run)
    assert len(notes) == 1
    assert notes[0].startswith("input `x` is written to in place at ")
    assert "net.py:9 in forward and no output returns it" in notes[0]
    assert sorted(graph.writes) == [0, 1, 2]
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert [row["path"] for row in record["outputs"]] == ["output", "x (in place)"]
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert [row["path"] for row in record["outputs"]] == ["output"]
    assert record["warnings"] == notes


def test_a_program_that_drops_the_write_fails(tmp_path: Path) -> None:
    class Pure:
        name = "pure"

        def export(self, request: ExportRequest) -> Exported:
            return Exported(lambda x: x * 2)

    EXPORTERS.register("pure", Pure())
    try:
        stage, error, _ = verdict(net(tmp_path, IN_PLACE), "pure")
    finally:
        EXPORTERS.unregister("pure")
    assert stage == "compare"
    assert "x (in place)" in str(error)


@pytest.mark.parametrize("guilty", ["program", "eager"])
def test_a_write_that_is_wrong_at_another_size_only(tmp_path: Path, guilty: str) -> None:
    """It adds 0 in every observed call, and something to five rows and more."""

    class Pure:
        name = "pure"

        def export(self, request: ExportRequest) -> Exported:
            return Exported(lambda x: x * 2)

    class Writes:
        name = "writes"

        def export(self, request: ExportRequest) -> Exported:
            return Exported(lambda x: (x * 2, x.add_(x.shape[0] // 6))[0])

    writes = forward("y = x * 2", "x.add_(x.shape[0] // 6)", "return y")
    body, exporter = (writes, Pure()) if guilty == "eager" else (forward("return x * 2"), Writes())
    run = net(tmp_path, body, "resize: {x_dim_0: [5, 7]}\n")
    EXPORTERS.register(exporter.name, exporter)
    try:
        stage, error, record = verdict(run, exporter.name)
    finally:
        EXPORTERS.unregister(exporter.name)
    assert stage == "resize"
    assert "1 of 2 outputs" in str(error)
    assert "x (in place)" in str(error)
    assert record["resize"]["passed"] == ["x_dim_0=5"]
    assert record["resize"]["failed"] == "x_dim_0=7"
    right = verdict(run, "torch-export")
    assert right[0] == "pass", right[1]
    assert right[2]["resize"]["passed"] == ["x_dim_0=5", "x_dim_0=7"]


def test_an_input_that_is_returned_is_no_news(tmp_path: Path) -> None:
    """A cache that is written to and returned: compared as an output."""
    notes, graph = observed(net(tmp_path, forward("x.add_(1)", "return {'y': x * 2, 'x': x[:, :2]}")))
    assert notes == []
    assert graph.writes


CACHE = """
from transformers import DynamicCache
from pytest_exportcheck import make_dynamic_cache


class Net(nn.Module):
    def forward(self, x, cache):
        keys, values = cache.update(x, x, 0)
        return {RETURNED}


def build_model():
    return Net()


def calls():
    return [
        ((torch.ones(2, 1, n, 4), make_dynamic_cache([(torch.zeros(2, 1, n + 1, 4),) * 2])), {})
        for n in (2, 3)
    ]
"""


@pytest.mark.parametrize("returned", [True, False])
def test_a_cache_that_grows_has_to_be_returned(tmp_path: Path, returned: bool) -> None:
    text = CACHE.replace("{RETURNED}", "keys.sum(-1), cache" if returned else "keys.sum(-1)")
    notes, _ = observed(make_run(tmp_path, text))
    found = [note for note in notes if "are replaced during the call and no output returns" in note]
    assert bool(found) is not returned
    if found:
        assert "`cache.layers.0.values`" in found[0]


# exporters that change the model

BODY = init("self.lin = nn.Linear(4, 4)", "self.drop = nn.Dropout(0.5)", "self.aux = nn.Linear(4, 4)")
BODY += forward("return self.drop(self.lin(x))")

VANDALS = {
    "unused-weight": (lambda model: model.aux.weight.data.mul_(1.5), "parameter `aux.weight` changed"),
    "one-bit": (lambda model: model.lin.weight.data[0, 0].mul_(1 + 2**-23), "parameter `lin.weight` changed"),
    "mode": (lambda model: model.aux.train(), "mode of `aux` changed from eval to train"),
    "dtype": (lambda model: model.aux.half(), "parameter `aux.weight` changed from float32[4, 4] to float16"),
    "new-buffer": (lambda model: model.register_buffer("b", torch.ones(2)), "buffer `b` is new ([1, 1])"),
    "gone": (lambda model: delattr(model, "aux"), "parameter `aux.weight` is gone"),
}


@pytest.mark.parametrize("name", VANDALS)
def test_an_exporter_that_changes_what_no_call_shows(tmp_path: Path, name: str) -> None:
    vandal, says = VANDALS[name]

    class Vandal:
        def export(self, request: ExportRequest) -> Exported:
            program = torch.export.export(
                request.model, (), kwargs=request.kwargs, dynamic_shapes=request.dynamic_shapes
            )
            vandal(request.model)
            return Exported(program)

    exporter = Vandal()
    exporter.name = "vandal"  # type: ignore[attr-defined]
    run = net(tmp_path, BODY)
    EXPORTERS.register("vandal", exporter)
    try:
        stage, error, _ = verdict(run, "vandal")
    finally:
        EXPORTERS.unregister("vandal")
    if name == "mode":
        # `flat_forward` puts modes back: nothing is left to complain about.
        assert stage == "pass", error
        return
    assert stage == "export"
    assert f"vandal changed the model in place: {says}" in str(error)
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "pass", error


# the trace


def test_the_first_operator_that_differs() -> None:
    """An unstable operator is found whatever it is, without a word of its own."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            return (x * 2 + noise).exp()

    model = Net()
    traces = []
    for noise in (torch.zeros(3), torch.full((3,), 1e-6)):
        trace = Trace(model)
        with trace.follow():
            model(torch.ones(3), noise)
        traces.append(trace)
    event, sentence = first_difference(*traces)
    assert event is not None
    assert event.name == "torch.add"
    assert "the first operator whose result differs between two replays is torch.add at " in sentence
    assert first_difference(traces[0], traces[0]) == (None, "")


def test_hooks_of_the_trace_are_gone_after_an_error() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model = Net()
    trace = Trace(model)
    with pytest.raises(ValueError, match="no"), trace.follow():
        model(torch.ones(1))
    before = len(trace.events)
    torch.ones(3) + 1
    assert len(trace.events) == before
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_state_that_only_some_calls_change_is_not_blamed_on_the_exporter(tmp_path):
    source = """
import torch


class Grows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.ones(4))
        self.register_buffer("table", self.first)

    def forward(self, x):
        if not torch.compiler.is_exporting():
            size = 4 if x.shape[1] <= 4 else 8
            self.register_buffer("table", self.first if size == 4 else torch.ones(8))
        return x + 1


def build():
    return Grows()
"""
    (tmp_path / "grows.py").write_text(source)
    for sizes in ((3, 7), (7, 3)):
        calls = "".join(f'    - {{forward: {{x: "float32[2, {size}]"}}}}\n' for size in sizes)
        path = tmp_path / "grows.yaml"
        path.write_text(f'exportcheck: 1\nmodel: {{factory: "grows.py:build"}}\nobserve:\n  calls:\n{calls}')
        run = SpecRun(load_spec(path, tmp_path))
        for exporter in ("torch-export", "onnx-dynamo"):
            assert verdict(run, exporter)[:2] == ("pass", None)
