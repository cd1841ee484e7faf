"""Copies, records, examples and other sizes lie in memory as what the model was called with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_exportcheck.observe import InputObserver
from pytest_exportcheck.observe.placement import PLACES
from pytest_exportcheck.pytrees.cloning import clone_tensor
from pytest_exportcheck.pytrees.strides import in_layout_of, lies_as

from .helpers import Function, make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")

BASE = torch.arange(720.0).reshape(6, 10, 12)

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: BASE,
    "transposed": lambda: BASE.transpose(0, 2),
    "permuted": lambda: BASE.permute(1, 2, 0),
    "sliced": lambda: BASE[:, 2:5],
    "stepped": lambda: BASE[:, :, 1::3],
    "selected": lambda: BASE[:, 3],
    "expanded": lambda: BASE[:, :1].expand(6, 4, 12),
    "expanded scalar": lambda: torch.tensor(3.0).expand(4, 5),
    "one row of a slice": lambda: BASE[:1, 2:5],
    "one column": lambda: BASE[:, :, :1],
    "transposed slice": lambda: BASE[1:4, 2:5].mT,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "empty": lambda: torch.empty(3, 0, 4),
    "bfloat16": lambda: BASE.bfloat16().mT,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_lies_as_the_original(name: str) -> None:
    tensor = LAYOUTS[name]()
    copy = clone_tensor(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.dtype) == (tensor.stride(), tensor.dtype)
    assert not tensor.numel() or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert copy._base is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_record_lies_as_the_argument(name: str, place: str) -> None:
    tensor = LAYOUTS[name]()
    seen: list[tuple[int, ...]] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.stride())
        return x + 1

    observer = InputObserver()
    module = Function(model)
    with observer(module, store=place):  # type: ignore[arg-type]
        module(tensor)
    (call,) = observer.info.calls
    recorded = call.arguments["x"]
    assert torch.equal(recorded, tensor)
    assert recorded.stride() == tensor.stride() == seen[0]
    assert observer.infer_arguments()[0].stride() == tensor.stride()


def test_a_small_slice_of_a_large_tensor_is_no_large_copy() -> None:
    large = torch.randn(300, 1000, 8)
    tensor = large[:, 5].t()
    copy = clone_tensor(tensor)
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().nbytes() < 5 * tensor.numel() * 4
    # What a model can ask is the same.
    assert (copy.is_contiguous(), copy.t().is_contiguous()) == (False, False)
    for one in (copy, tensor):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            one.t().view(-1)


@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if name not in ("empty", "contiguous", "one row of a slice")]
)
def test_another_size_lies_as_the_original(name: str) -> None:
    tensor = LAYOUTS[name]()
    made = in_layout_of(tensor.repeat_interleave(2, dim=0), tensor)
    assert torch.equal(made, tensor.repeat_interleave(2, dim=0))
    assert made.is_contiguous() == tensor.is_contiguous()
    order = sorted(range(tensor.dim()), key=tensor.stride)
    assert sorted(range(tensor.dim()), key=made.stride) == order
    assert [step == 0 for step in made.stride()] == [step == 0 for step in tensor.stride()]


@pytest.mark.parametrize(
    "tensor", [BASE.unfold(1, 4, 1), BASE.diagonal(0, 1, 2)], ids=["windows", "diagonal"]
)
def test_what_has_no_likeness_in_other_sizes_is_contiguous(tensor: torch.Tensor) -> None:
    assert torch.equal(clone_tensor(tensor), tensor)
    assert clone_tensor(tensor).is_contiguous()
    assert in_layout_of(tensor[:3], tensor).is_contiguous()


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, 2, dtype=torch.complex64).conj().mT, torch.eye(3).to_sparse()]
)
def test_other_tensors_are_copied_by_torch(tensor: torch.Tensor) -> None:
    assert torch.equal(clone_tensor(tensor).to_dense(), tensor.to_dense())


NET = """
    class Net(nn.Module):
        def forward(self, x):
            {0}


    def build_model():
        return Net()


    def calls():
        torch.manual_seed(0)
        return [(({1},), {{}}) for n in (3, 4)]
"""


@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() - {"empty"}))
def test_what_lies_as_something_else(name: str) -> None:
    tensor = LAYOUTS[name]()
    assert lies_as(in_layout_of(tensor.repeat_interleave(2, 0), tensor), tensor)
    assert lies_as(tensor.contiguous(), tensor) == tensor.is_contiguous()


def test_rows_of_prompts_of_different_lengths_do_not_lie_alike() -> None:
    rows = [torch.randn(2, length, 32)[:, -1:] for length in (7, 5, 1)]
    assert [lies_as(row, rows[0]) for row in rows] == [False, False, False]
    assert lies_as(rows[2], torch.randn(3, 1, 32))


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_a_call_that_lies_otherwise_than_the_example_is_named(tmp_path: Path, exporter: str) -> None:
    body = "return x * 2 if x.is_contiguous() else x * 3"
    run = make_run(tmp_path, NET.format(body, "torch.randn(6, n + 3).t() if n == 3 else torch.randn(7, 6)"))
    stage, error, _ = verdict(run, exporter)
    assert stage == ("compare" if exporter == "torch-export" else "export"), error
    assert "other than in the example lie in memory `x` (strides (1, 6) of (6, 6)" in str(error)


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_where_all_calls_lie_alike_memory_is_not_named(tmp_path: Path, exporter: str) -> None:
    body = "return x * (2 if torch.compiler.is_exporting() else 3)"
    run = make_run(tmp_path, NET.format(body, "torch.randn(6, n).t()"))
    stage, error, _ = verdict(run, exporter)
    assert stage in ("compare", "export"), error
    assert "memory" not in str(error)


ASKING = {
    "view": ("return x.transpose(1, 2).view(x.shape[0], -1) * 2", "torch.randn(n, 5, 6).transpose(1, 2)"),
    "is_contiguous": ("return x * 2 if x.is_contiguous() else x.cumsum(1)", "torch.randn(n, 6, 5).mT"),
    "stride": ("return x * 2 if x.stride(1) == 1 else x.cumsum(1)", "torch.randn(n, 6, 5).mT"),
    "channels last": (
        "return x if x.is_contiguous(memory_format=torch.channels_last) else x * 2",
        "torch.randn(n, 3, 4, 5).to(memory_format=torch.channels_last)",
    ),
    "slice": ("return x * 2 if x.is_contiguous() else x.cumsum(1)", "torch.randn(n, 6, 8)[:, :, :5]"),
    "one row": (
        "return x.transpose(0, 1) * 2, x.reshape(-1), x.cumsum(0)",
        "torch.randn(n, 6, 6)[:, -1:]",
    ),
    "both axes": ("return x.transpose(0, 1) * 2, x.reshape(-1)", "torch.randn(n + 1, 12)[:, :n]"),
    "diagonal": ("return x.reshape(-1) * 2, x.cumsum(0)", "torch.randn(n, 6, 6).diagonal(0, 1, 2)"),
    "last of a prompt, or all of it": (
        "return torch.nn.functional.linear(x, torch.ones(3, 8))",
        "torch.randn(n, 1 if n % 2 else 7, 8)[:, -1:]",
    ),
    "of something large": ("return x.reshape(-1) * 2", "torch.randn(40, 3000, 8)[:n, 7]"),
    "windows": ("return x.transpose(0, 1) * 2", "torch.randn(n, 8).unfold(1, 4, 2)"),
    "expanded": ("return x * 2 if x.stride(1) else x.cumsum(1)", "torch.randn(n, 1, 8).expand(n, 6, 8)"),
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_a_model_that_asks_how_its_input_lies(tmp_path: Path, name: str, exporter: str) -> None:
    run = make_run(tmp_path, NET.format(*ASKING[name]))
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    assert record["resize"]["passed"]
    assert record["resize"]["refused_by_eager"] == []
