"""Want of memory: not judged at sizes of ours, and visibly; a failure at those of a call or of the spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.checks.shortage import Shortage, bytes_text, largest_of_eager, shortage
from pytest_exportcheck.errors import ResizeError, RunError
from pytest_exportcheck.observe.resize import nearer_sizes
from pytest_exportcheck.observe.signature import CallSignature
from pytest_exportcheck.observe.targets import Target
from pytest_exportcheck.runtimes.onnx_runtime import OnnxRuntimeSession

from .helpers import Function, infer, make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

ARENA = (
    "Error in execution: Non-zero status code returned while running Softmax node. Name:'s' Status Message: "
    "bfc_arena.cc:360 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) "
    "Failed to allocate memory for requested buffer of size {asked}"
)

NET = """
    class Net(nn.Module):
        def forward(self, x):
            {body}


    def build_model():
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, m, generator=g),), {{}}) for n, m in ((2, 5), (4, 7))]
"""


def net(body: str) -> str:
    return NET.format(body=("\n" + " " * 12).join(body.splitlines()))


def limited(monkeypatch: pytest.MonkeyPatch, error: Exception, most: int = 7, axis: int = 1) -> None:
    """ONNX Runtime has no memory for a longer input."""
    whole = OnnxRuntimeSession.run

    def run(self: Any, arguments: Any) -> Any:
        if arguments["x"].shape[axis] > most:
            raise error
        return whole(self, arguments)

    monkeypatch.setattr(OnnxRuntimeSession, "run", run)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(ARENA.format(asked=2717908992)), 2717908992),
        (RuntimeError("BFCArena: Available memory of 5 is smaller than requested bytes of 4096"), 4096),
        (RuntimeError("std::bad_alloc"), None),
        (RuntimeError("bad allocation"), None),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 18874368 bytes. Error code 12 (Cannot allocate memory)"
            ),
            18874368,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has"), 3 * 2**29),
        (RuntimeError("CUDA failure 2: out of memory ; GPU=0"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), None),
        (MemoryError(), None),
        (MemoryError("Unable to allocate 8.00 TiB for an array with shape (1099511627776,)"), 2**43),
    ],
)
def test_what_allocators_say(error: Exception, asked: int | None) -> None:
    assert shortage(error) == Shortage(asked)
    outer = ResizeError("the runtime fails")
    outer.__cause__ = error
    assert shortage(outer) == Shortage(asked), "it is told by what the failure was made from"


def test_what_torch_and_onnx_runtime_say_today() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert shortage(caught.value) == Shortage(2**62)


@pytest.mark.parametrize(
    "error", [ValueError("out of memory slots"), RuntimeError("too long"), KeyError("bad_alloc"), OSError()]
)
def test_what_is_about_something_else(error: Exception) -> None:
    assert shortage(error) is None


def test_how_much_is_absurd() -> None:
    assert not Shortage(64 * 100).is_absurd(100)
    assert Shortage(64 * 100 + 1).is_absurd(100)
    assert Shortage(65).is_absurd(0)
    assert not Shortage(None).is_absurd(100)
    assert not Shortage(10**18).is_absurd(None)
    assert [bytes_text(n) for n in (5, 2048, 2717908992, 26244000000000000)] == [
        "5 bytes",
        "2.0 KiB",
        "2.5 GiB",
        "23.3 PiB",
    ]
    assert bytes_text(2**80) == "1.1e+09 PiB"


def largest(function: Any, *args: torch.Tensor) -> int | None:
    arguments = {f"x{i}": each for i, each in enumerate(args)}
    module = Function(function)
    return largest_of_eager(Target("it", module, "forward", CallSignature.of(module.forward)), arguments)


def test_the_largest_tensor_of_eager_is_what_is_in_memory() -> None:
    def view(x0: Any) -> Any:
        return x0[:, None, None].expand(10, 1000, 1000)[:, 0, 0] + 1

    def scores(x0: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x0, x0, x0)

    def product(x0: Any) -> Any:
        return (x0[:, None] * x0[None]).sum()

    assert largest(view, torch.ones(10)) == 40
    assert largest(product, torch.ones(10)) == 400
    assert largest(scores, torch.ones(2, 3, 50, 8)) == 2 * 3 * 50 * 50 * 4
    assert largest(lambda x0: x0.nothing(), torch.ones(3)) is None


def test_half_as_far_above_the_example() -> None:
    shapes, _ = infer(lambda x: x, ((torch.ones(2, 5),), {}), ((torch.ones(4, 7),), {}))
    a, b = shapes.symbols
    example = {a: 4, b: 7}
    far = {a: 4, b: 15}
    seen = []
    while far is not None:
        far = nearer_sizes(far, example, shapes)
        seen.append(far and far[b])
    assert seen == [11, 9, 8, None]
    assert nearer_sizes({a: 6, b: 1}, example, shapes) == {a: 5, b: 1}, "what is below stays"
    assert nearer_sizes({a: 2, b: 3}, example, shapes) is None
    images, _ = infer(
        lambda pixel_values: pixel_values,
        *[((), {"pixel_values": torch.ones(2, 3, *sides)}) for sides in ((32, 64), (64, 32))],
    )
    example = {**dict.fromkeys(images.symbols, 2), "height": 32, "width": 64}
    near = nearer_sizes({**example, "height": 192, "width": 96}, example, images)
    assert near == {**example, "height": 96, "width": 64}


def test_a_size_of_ours_is_not_judged_and_a_nearer_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, RuntimeError(ARENA.format(asked=4096)), most=11)
    run = make_run(tmp_path, net("return x * 2"))
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    resize = record["resize"]
    missing = {line.partition(": ")[0] for line in resize["no_memory"]}
    assert missing == {"x_dim_0=4, x_dim_1=15", "x_dim_0=9, x_dim_1=15"}
    assert "x_dim_0=4, x_dim_1=11" in resize["passed"]
    assert "x_dim_0=6, x_dim_1=11" in resize["passed"]
    assert not missing & {*resize["passed"]}
    assert resize["refused_by_eager"] == []
    assert "failed" not in resize
    assert (
        "2 sizes are not judged for want of memory: x_dim_0=4, x_dim_1=15: for onnxruntime CPU (it asks for "
        "4.0 KiB at once); and more (judged in place of them, nearer to the example: x_dim_0=4, x_dim_1=11; "
        "x_dim_0=6, x_dim_1=11)"
    ) in record["warnings"]


def test_a_nearer_size_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, RuntimeError("std::bad_alloc"), most=11)
    body = "return x * float(x.shape[1] > 10)"
    stage, error, record = verdict(make_run(tmp_path, net(body)), "onnx-torchscript")
    assert stage == "resize", error
    assert record["resize"]["failed"] == "x_dim_0=4, x_dim_1=11"
    assert record["resize"]["no_memory"] == [
        "x_dim_0=4, x_dim_1=15: for onnxruntime CPU",
        "x_dim_0=9, x_dim_1=15: for onnxruntime CPU",
    ]


def test_a_threshold_has_no_nearer_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, RuntimeError("std::bad_alloc"), most=30)
    body = "if x.shape[1] > 40:\n    return x * 2\nreturn x * 2"
    stage, error, record = verdict(make_run(tmp_path, net(body)), "onnx-dynamo")
    assert stage == "pass", error
    lines = record["resize"]["no_memory"]
    assert {line.partition(": ")[0].partition("x_dim_1=")[2] for line in lines} == {"40", "41", "42"}
    assert not any("judged in place" in warning for warning in record["warnings"])


def test_an_observed_call_and_a_size_of_the_spec_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, RuntimeError("bad allocation"), most=5)
    stage, error, _ = verdict(make_run(tmp_path, net("return x * 2")), "onnx-dynamo")
    assert (stage, type(error)) == ("run", RunError)
    assert "onnxruntime CPU has no memory for call 2 of 2: RuntimeError: bad allocation" in str(error)
    monkeypatch.undo()
    limited(monkeypatch, RuntimeError(ARENA.format(asked=4096)), most=11)
    run = make_run(tmp_path, net("return x * 2"), "resize: {x_dim_1: [12]}\n")
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize"
    assert (
        "onnxruntime CPU has no memory for sizes x_dim_0=4, x_dim_1=12, which eager accepts (it asks for 4.0 "
        "KiB at once)" in str(error)
    )
    assert record["resize"]["no_memory"] == []


def test_a_graph_that_writes_out_what_eager_only_views_fails(tmp_path: Path) -> None:
    """No memory holds it at 3,001, and none should have to: 4 axes of an `Expand` where eager has a view."""
    body = "n = x.shape[1]\nif n > 3000:\n    pass\n"
    body += "return x[0, :, None, None, None].expand(n, n, n, n)[:, 0, 0, 0] + x"
    stage, error, record = verdict(make_run(tmp_path, net(body)), "onnx-dynamo")
    assert stage == "resize", record
    assert error is not None
    assert "has no memory for sizes" in error.message
    asked = next(line for line in error.details if "no want of memory" in line)
    assert int(asked.split("asks for ")[1].split()[0]) >= 3001**4 * 4
    assert "eager's largest tensor here has 48016 " in asked
    assert record["resize"]["no_memory"] == []


def test_want_of_memory_in_eager_is_told_as_that(tmp_path: Path) -> None:
    body = "if x.shape[1] > 11:\n    torch.empty(2**60)\nreturn x * 2"
    for exporter in ("torch-export", "onnx-torchscript"):
        run = make_run(tmp_path, net(body))
        stage, error, record = verdict(run, exporter)
        assert stage == "pass", error
        resize = record["resize"]
        assert resize["refused_by_eager"] == []
        first = resize["no_memory"][0]
        assert first.startswith("x_dim_0=4, x_dim_1=15: for eager: RuntimeError: "), first
        assert "x_dim_0=4, x_dim_1=11" in resize["passed"]


def test_memory_for_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_exportcheck.checks import sizes

    whole = sizes.compare_rounded

    def compare(expected: Any, *more: Any) -> Any:
        if expected[0][1].shape[1] > 11:
            raise MemoryError
        return whole(expected, *more)

    monkeypatch.setattr(sizes, "compare_rounded", compare)
    stage, error, record = verdict(make_run(tmp_path, net("return x * 2")), "onnx-dynamo")
    assert stage == "pass", error
    assert record["resize"]["no_memory"][0] == "x_dim_0=4, x_dim_1=15: to compare"
    assert "x_dim_0=4, x_dim_1=11" in record["resize"]["passed"]
