"""Where recorded values are kept: nothing that is handed out may depend on it."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck import InputObserver, make_dynamic_cache, register_flattening_functions
from pytest_exportcheck.observe import placement
from pytest_exportcheck.pytrees import flatten_with_paths

from .helpers import call, observe

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


class Net(torch.nn.Module):
    def forward(self, x: Any, y: Any = None, scale: float = 1.0, cache: Any = None) -> Any:
        return {"x": x, "twice": [x, x[..., ::2]], "cache": cache, "scale": scale}


def calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    def cache(length: int) -> Any:
        pair = torch.rand(2, 2, length, 4), torch.rand(2, 2, length, 4)
        return make_dynamic_cache([pair, pair])

    return [
        call(torch.rand(2, 6), scale=2.0, cache=cache(0)),
        call(torch.rand(3, 5).t(), y=[torch.arange(4), torch.ones((), dtype=torch.bool)], scale=2.0),
        call(torch.rand(1, 8).expand(4, 8), scale=2.0, cache=cache(3)),
    ]


def same(one: Any, two: Any) -> bool:
    with register_flattening_functions(None):
        left, right = flatten_with_paths(one), flatten_with_paths(two)
        if _pytree.tree_structure(one) != _pytree.tree_structure(two):
            return False
    return [path for path, _ in left] == [path for path, _ in right] and all(
        type(a) is type(b)
        and (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b)
        for (_, a), (_, b) in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_what_is_handed_out_is_the_same(place: str) -> None:
    made = calls()
    plain, placed = observe(Net(), *made), observe(Net(), *made, store=place)
    assert same(plain.infer_dynamic_shapes(), placed.infer_dynamic_shapes())
    for index in range(3):
        assert same(plain.infer_arguments(index), placed.infer_arguments(index))
        assert same(plain.info.calls[index].arguments, placed.info.calls[index].arguments)
        assert same(plain.info.calls[index].outputs, placed.info.calls[index].outputs)
    assert same(plain.info.flat_outputs, placed.info.flat_outputs)
    assert plain.remove_inputs(["y"]) == placed.remove_inputs(["y"]) == 1
    assert same(plain.infer_arguments(), placed.infer_arguments())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5), (1,)], ids=str)
def test_every_dtype_and_size_comes_back_from_disk(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 3).to(dtype)
    loaded = placement.Placed([value], "disk").load()[0]
    assert loaded.dtype == dtype
    assert loaded.shape == value.shape
    assert loaded.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def test_on_disk_there_is_no_name_left_and_what_is_loaded_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    observer = observe(Net(), *calls(), store="disk")
    assert os.listdir(tmp_path) == []
    first = observer.info.calls[0].arguments["x"]
    before = first.clone()
    first.add_(1)
    assert observer.info.calls[0].arguments["x"].equal(before)


def test_on_disk_no_value_stays_in_memory() -> None:
    def tensors() -> list[torch.Tensor]:
        gc.collect()
        found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
        return [t for t in found if t.dtype == torch.float64 and t.untyped_storage().nbytes() > 8]

    net = Net()
    others = {t.untyped_storage().data_ptr() for t in tensors()}
    observer = InputObserver()
    with observer(net, store="disk"):
        net(torch.rand(32, 32, dtype=torch.float64))
    # Those on disk are mapped: none but them is of this dtype.
    kept = {t.untyped_storage().data_ptr() for t in tensors()} - others
    mapped = {
        leaf.untyped_storage().data_ptr()
        for call in observer.info.calls
        for part in (call._arguments, call._outputs)
        for leaf in _pytree.tree_leaves(part._kept)  # type: ignore[union-attr]
        if isinstance(leaf, torch.Tensor)
    }
    assert len(mapped) == 4
    assert kept <= mapped


@pytest.mark.parametrize(("option", "value"), [("store", "gpu"), ("keep", "best")])
def test_a_wrong_word_is_refused(option: str, value: str) -> None:
    with (
        pytest.raises(ValueError, match=f"{option}='{value}' is none of"),
        InputObserver()(
            Net(),
            **{option: value},  # type: ignore[arg-type]
        ),
    ):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_values_come_back_to_their_device(place: str) -> None:
    net, observer = Net().cuda(), InputObserver()
    with observer(net, store=place):  # type: ignore[arg-type]
        net(torch.rand(2, 3, device="cuda"), y=torch.rand(2))
    arguments = observer.infer_arguments()
    assert (arguments["x"].device.type, arguments["y"].device.type) == ("cuda", "cpu")
