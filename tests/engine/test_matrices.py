"""Matrices of two axes with one symbol: at other sizes they have the structure of what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.observe.matrices import square_axes, with_side
from pytest_exportcheck.observe.resize import resize_arguments
from pytest_exportcheck.observe.shapes import TensorLeaf

from .helpers import infer, make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters


def causal(n: int) -> torch.Tensor:
    return torch.full((n, n), -torch.inf).triu(1)


def window(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril().triu(-2)


def identity(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.int64)


@pytest.mark.parametrize("make", [causal, window, identity, ones])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 7, 13, 40])
def test_what_depends_on_the_distance_does_so_at_other_sizes(make: Any, size: int) -> None:
    made = with_side(make(5), (0, 1), size)
    assert made is not None
    assert made.dtype == make(5).dtype
    assert torch.equal(made, make(size))
    batched = with_side(make(5).expand(2, 3, 5, 5).contiguous(), (2, 3), size)
    assert batched is not None
    assert torch.equal(batched, make(size).expand(2, 3, size, size))


def test_blocks_stay_blocks_and_a_triangle_a_triangle() -> None:
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4))
    assert torch.equal(_made(blocks, 12), torch.block_diag(torch.ones(4, 4), torch.ones(8, 8)))
    # Two texts in a row, each causal.
    assert torch.equal(_made(blocks.tril(), 12), torch.block_diag(torch.ones(4, 4), torch.ones(8, 8)).tril())
    assert torch.equal(_made(blocks.triu(), 3), torch.block_diag(torch.ones(1, 1), torch.ones(2, 2)).triu())
    padded = torch.ones(5, 5).tril()
    padded[:, 0] = 0
    found = _made(padded, 10)
    assert torch.equal(found, found.tril())
    assert bool((found[:, :2] == 0).all())
    assert bool((found[2:, 2:] == torch.ones(8, 8).tril()).all())


def test_diagonals_and_symmetry() -> None:
    found = _made(torch.diag(torch.tensor([1.0, 2.0, 3.0])), 6)
    assert torch.equal(found, torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0])))
    points = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    for size in (3, 4, 11):
        found = _made(torch.cdist(points, points), size)
        assert torch.equal(found, found.mT)
        assert bool((found.diagonal() == 0).all())


def _made(matrix: torch.Tensor, size: int) -> torch.Tensor:
    found = with_side(matrix, (0, 1), size)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
        torch.randn(2, 2, generator=torch.Generator().manual_seed(0)),
        torch.ones(1, 1),
        torch.ones(3, 4),
        torch.ones(0, 0),
        torch.eye(3).to_sparse(),
        torch.eye(3).to(torch.uint16),
    ],
    ids=["random", "two", "one", "oblong", "empty", "sparse", "uint16"],
)
def test_what_has_no_structure_is_made_as_anything_else(tensor: torch.Tensor) -> None:
    assert with_side(tensor, (0, 1), 7) is None


def test_the_axes_of_one_symbol() -> None:
    shapes, _ = infer(
        lambda mask, x: (mask, x),
        *[((torch.ones(n, 1, m, m), torch.ones(n, m, 4)), {}) for n, m in ((2, 5), (3, 7))],
    )
    leaf = shapes.leaves["mask"]
    assert isinstance(leaf, TensorLeaf)
    assert square_axes(leaf) == (2, 3)
    other = shapes.leaves["x"]
    assert isinstance(other, TensorLeaf)
    assert square_axes(other) is None


def test_arguments_of_other_sizes_keep_batch_and_structure() -> None:
    def call(n: int, m: int) -> tuple[Any, ...]:
        mask = torch.ones(n, 1, m, m).tril()
        mask[0, :, :, 0] = 0
        return mask, torch.randn(n, m, 4)

    shapes, calls = infer(lambda mask, x: (mask, x), *[(call(n, m), {}) for n, m in ((2, 5), (3, 7))])
    batch, seq = shapes.symbols
    made = resize_arguments(calls[0].arguments, shapes, {batch: 4, seq: 10})
    mask = made["mask"]
    assert mask.shape == (4, 1, 10, 10)
    assert torch.equal(mask, mask.tril())
    assert torch.equal(mask[1], torch.ones(1, 10, 10).tril())
    assert torch.equal(mask[0], mask[2]), "the rows of the batch repeat"
    assert bool((mask[0, :, :, :2] == 0).all())


STRICT = """
    class Net(nn.Module):
        def forward(self, x, mask):
            if not torch.compiler.is_compiling() and not torch.equal(mask, mask.tril()):
                raise ValueError("not causal")
            if not torch.compiler.is_compiling() and not bool(mask.diagonal().all()):
                raise ValueError("a row of nothing")
            return (x @ x.mT * mask).softmax(-1)


    def build_model():
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [
            ((torch.randn(n, 4, generator=g), torch.ones(n, n).tril()), {}) for n in (5, 7, 8)
        ]
"""


def test_a_model_that_wants_a_causal_mask_is_judged_at_other_sizes(tmp_path: Path) -> None:
    stage, error, record = verdict(make_run(tmp_path, STRICT), "onnx-dynamo")
    assert stage == "pass", error
    resize = record["resize"]
    assert resize["refused_by_eager"] == []
    assert len(resize["passed"]) >= 4
    assert resize["repeated"] == []
