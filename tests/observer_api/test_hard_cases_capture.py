"""What a careful reading found wrong in how calls are captured: copies, odd calls, odd arguments."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_exportcheck import InputObserver

from .helpers import call, module, observe

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")


class Double(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Copied(Double):
    """Copies itself in a way of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        made = Copied()
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Slotted(Double):
    __slots__ = ("extra",)


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value))


def _negative(x: torch.Tensor) -> torch.Tensor:
    return -x


# Copies of the model


def _saved(model: torch.nn.Module) -> torch.nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: torch.nn.Module = torch.load(stream, weights_only=False)
    return loaded


def _quantized(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.nn.Module = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    return made


COPIES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": _saved,
    "quantize_dynamic": _quantized,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", [Double, Copied, Slotted])
def test_a_copy_of_the_model_made_inside_the_block_is_plain(kind: type[Double], way: str) -> None:
    model, observer = kind(), InputObserver()
    with observer(model):
        model(ones(2, 3))
        copied = COPIES[way](model)
        assert vars(copied).keys() == vars(kind()).keys()
        copied.linear = torch.nn.Identity()
        assert torch.equal(copied(ones(1, 3)), ones(1, 3, value=2)), "the copy runs the original"
        model(ones(4, 3))
    assert [len(c.arguments["x"]) for c in observer.info.calls] == [2, 4]
    assert observer.info.seen == 2


def test_a_copy_of_a_module_around_the_observed_one_is_plain() -> None:
    model, observer = Outer(), InputObserver()
    with observer(model.inner):
        copied = copy.deepcopy(model)
        copied(ones(1, 3))
        model(ones(2, 3))
    assert [len(c.arguments["x"]) for c in observer.info.calls] == [2]


def test_a_copy_keeps_a_forward_that_the_instance_had_and_the_observers_of_others_are_left_out() -> None:
    model, outer, inner = Double(), InputObserver(), InputObserver()
    model.forward = _negative  # type: ignore[assignment]
    before = vars(model).copy()
    with outer(model), inner(model):
        copied = copy.deepcopy(model)
        assert copied.forward is _negative
        copied(ones(1, 3))
        model(ones(2, 3))
    assert vars(copied).keys() == before.keys()
    assert vars(model) == before
    assert outer.info.seen == inner.info.seen == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_copy_of_a_graph_module_is_plain() -> None:
    model, observer = torch.fx.symbolic_trace(Double()), InputObserver()
    with observer(model):
        for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            copied(ones(1, 3))
        model(ones(2, 3))
    assert observer.info.seen == 1
