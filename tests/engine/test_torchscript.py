"""What a TorchScript trace keeps of its example: named, and tried where the model decides otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {signature}):
        {body}


def build_model():
    return Net()


def calls():
    torch.manual_seed(0)
    return [(({calls},), {{}}) for n in (3, 5)]
"""


def verdict_of(tmp_path: Path, signature: str, body: str, calls: str, init: str = "pass") -> Any:
    run = make_run(tmp_path, NET.format(signature=signature, body=body, calls=calls, init=init))
    return *verdict(run, "onnx-torchscript"), run


ROWS = "torch.randn(n, 4)"


@pytest.mark.parametrize(
    ("condition", "sizes"), [("x.shape[0] > 40", "x_dim_0=41"), ("x.shape[0] * 2 > 90", "x_dim_0=46")]
)
def test_a_branch_on_a_size_is_tried_on_both_sides(tmp_path: Path, condition: str, sizes: str) -> None:
    """TorchScript has no guards, and no symbols: the boundary comes from a capture beside it."""
    stage, error, record, _ = verdict_of(tmp_path, "x", f"return x * 2 if {condition} else x * 3", ROWS)
    assert stage == "resize", record["resize"]
    assert f"at sizes {sizes}, which no observed call had" in error.message
    assert "decided at x_dim_0=5, and otherwise here" in str(error)


def test_a_capture_beside_the_trace_leaves_nothing_in_the_model(tmp_path: Path) -> None:
    body = "self.last = x * 2; return self.last if x.shape[0] > 1 else x * 2"
    stage, error, record, run = verdict_of(tmp_path, "x", body, ROWS, init="self.last = None")
    assert stage == "pass", error
    assert "the trace keeps what the example decided" in record["warnings"][-1]
    model = run.model("cpu", "float32")
    assert type(model.last).__name__ == "Tensor"
    assert "forward" not in vars(model)


VALUES = {
    "boolean": ("x, m", "return x * m + 1 if bool(m.all()) else x * m", f"{ROWS}, torch.ones(n, 4)"),
    "integer": ("x, k", "return x[:, : int(k)] * k", f"{ROWS}, torch.tensor(2)"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_was_the_same_in_all_calls_is_named(tmp_path: Path, kind: str) -> None:
    """No call shows that it is a constant now; another value does."""
    signature, body, calls = VALUES[kind]
    stage, error, record, _ = verdict_of(tmp_path, signature, body, calls)
    assert stage == "compare", record
    assert error.message.startswith("the program does not follow eager where not all values of ")
    (note,) = record["warnings"]
    assert note in error.details
    assert note.startswith("the trace keeps what the example decided: ")
    assert note.endswith(
        f"net.py:12: {body} (Converting a tensor to a Python {kind} might cause the trace to be incorrect)"
    )


KEEPS = "the trace keeps what the example decided: "

#: What a model does -> where that fails, and whether the failure names the line without the tracer.
EXPLAINED = {
    "for a value": (
        "x, k",
        "return x * (2.0 if bool(k > 4) else 1.0) + 0 * k",
        f"{ROWS}, torch.tensor(n)",
        "compare",
    ),
    "for a number of rounds": (
        "x, k",
        "return sum(x * i for i in range(int(k))) + 0 * k",
        f"{ROWS}, torch.tensor(n)",
        "compare",
    ),
    "for what is no input any more": ("x, k", "return x[:, : int(k)]", f"{ROWS}, torch.tensor(2)", "convert"),
}


@pytest.mark.parametrize("kind", EXPLAINED)
def test_a_failure_names_what_the_trace_keeps(tmp_path: Path, kind: str) -> None:
    signature, body, calls, where = EXPLAINED[kind]
    stage, error, record, _ = verdict_of(tmp_path, signature, body, calls)
    assert stage == where, error
    (note,) = [line for line in error.details if line.startswith(KEEPS)]
    assert f"net.py:12: {body}" in note
    assert note in record["warnings"]


def test_a_line_that_is_named_already_is_not_named_again(tmp_path: Path) -> None:
    """A comparison of sizes is told with the sizes at which it is decided otherwise."""
    stage, error, record, _ = verdict_of(tmp_path, "x", "return x * 2 if x.shape[0] > 40 else x * 3", ROWS)
    assert stage == "resize"
    assert str(error).count("net.py:12") == 1
    assert any(line.startswith(KEEPS) for line in record["warnings"])


def test_a_trace_that_keeps_nothing_says_nothing(tmp_path: Path) -> None:
    stage, error, record, _ = verdict_of(tmp_path, "x", "return x.reshape(x.shape[0], -1) * x.shape[1]", ROWS)
    assert stage == "pass", error
    assert record["warnings"] == []


def test_nothing_is_printed_of_a_model_that_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """torch prints its whole graph, from C++."""
    caplog.set_level(logging.DEBUG, "pytest_exportcheck")
    stage, error, _, _ = verdict_of(tmp_path, "x", "return torch.special.bessel_j0(x)", ROWS)
    assert stage == "export", error
    assert "aten::special_bessel_j0" in error.message
    assert "Torch IR graph at exception" in caplog.text
    assert capfd.readouterr().out == ""


def test_a_graph_that_is_asked_for_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = NET.format(signature="x", body="return torch.special.bessel_j0(x)", calls=ROWS, init="pass")
    run = make_run(tmp_path, text, "exporter_options: {onnx-torchscript: {verbose: true}}\n")
    assert verdict(run, "onnx-torchscript")[0] == "export"
    assert "Torch IR graph at exception" in capfd.readouterr().out


def test_nothing_is_printed_of_the_capture_beside_the_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is made for its comparisons of sizes; torch prints the graph where it refuses a value."""
    body = "return x * (2.0 if bool(k > 2) else 1.0) + 0 * k"
    assert verdict_of(tmp_path, "x, k", body, f"{ROWS}, torch.tensor(n)")[0] == "pass"
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "def forward" not in printed.err


@pytest.mark.parametrize(
    "body",
    ["return x[:, 5 // int(k) - 1 :]", "return x + int(k * k)"],
    ids=["eager refuses a zero", "another sign says nothing"],
)
def test_an_input_that_vanished_is_asked_for_with_several_values(tmp_path: Path, body: str) -> None:
    stage, error, _, _ = verdict_of(tmp_path, "x, k", body, f"{ROWS}, torch.tensor(2)")
    assert stage == "convert", error
    assert "the program has no input for k, and eager's outputs depend on it" in error.message
