"""Recording calls: the model is left as it was, the records are whole, the user's call is never disturbed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.observe import InputObserver, ObserverWarning
from pytest_exportcheck.pytrees import register_flattening_functions

from .helpers import Function, record

DYNAMIC = torch.export.Dim.DYNAMIC


class Net(torch.nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return x + 1 if y is None else x + y

    def encode(self, z: Any) -> Any:
        return z * 2


# the model


def test_forward_is_restored_without_an_instance_attribute() -> None:
    net = Net()
    with InputObserver()(net):
        assert "forward" in vars(net)
        net(torch.zeros(1))
    assert "forward" not in vars(net)
    assert net.forward.__func__ is Net.forward


def test_an_instance_attribute_that_was_there_is_put_back() -> None:
    net = Net()

    def mine(x: Any) -> Any:
        return x * 3

    net.forward = mine
    with InputObserver()(net):
        assert float(net(torch.ones(()))) == 3
    assert vars(net)["forward"] is mine


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_restored_after_an_error(error: type[BaseException]) -> None:
    net = Net()
    with pytest.raises(error), InputObserver()(net):
        raise error
    assert "forward" not in vars(net)


def test_an_unknown_method_is_refused_on_entering() -> None:
    with (
        pytest.raises(ValueError, match="Net does not have a method 'nothing'"),
        InputObserver()(Net(), method_name="nothing"),
    ):
        pass


def test_another_method() -> None:
    net, observer = Net(), InputObserver()
    with observer(net, method_name="encode"):
        net(torch.zeros(2))
        net.encode(torch.zeros(2))
        net.encode(torch.zeros(3))
    assert observer.num_obs() == 2
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC},)
    assert "encode" not in vars(net)


def test_one_observer_does_not_mix_models() -> None:
    first, observer = Net(), InputObserver()
    with observer(first):
        first(torch.zeros(2))
    with observer(first):
        first(torch.zeros(3))
    assert observer.num_obs() == 2
    with pytest.raises(RuntimeError, match="another model"), observer(Net()):
        pass


# whole records


def test_a_call_that_raises_leaves_no_record() -> None:
    def forward(x: Any) -> Any:
        if x.shape[0] == 2:
            raise RuntimeError("refused")
        return x * 10

    net, observer = Function(forward), InputObserver()
    with observer(net):
        net(torch.full((1,), 1.0))
        with pytest.raises(RuntimeError, match="refused"):
            net(torch.full((2,), 2.0))
        net(torch.full((3,), 3.0))
    assert observer.num_obs() == 2
    assert (observer.info.seen, observer.info.lost) == (3, 0)
    for call in observer.info.calls:
        assert torch.equal(call.outputs, call.arguments["x"] * 10)
    assert [call.index for call in observer.info.calls] == [0, 1]


def test_no_more_than_the_limit_is_kept() -> None:
    net, observer = Net(), InputObserver()
    with observer(net):
        for n in range(5):
            net(torch.zeros(n))
    assert (len(observer.info), observer.info.seen) == (3, 5)
    observer = InputObserver()
    with observer(net, store_n_calls=4):
        for n in range(5):
            net(torch.zeros(n))
    assert len(observer.info) == observer.num_obs() == 4


def test_inputs_are_those_before_the_call_and_share_no_memory() -> None:
    def forward(x: Any) -> Any:
        x.add_(1)
        return x

    x = torch.zeros(3)
    call = record(forward, ((x,), {})).info.calls[0]
    assert call.arguments["x"].tolist() == [0, 0, 0]
    assert call.outputs.tolist() == [1, 1, 1]
    x.fill_(9)
    assert call.arguments["x"].tolist() == [0, 0, 0]
    assert call.outputs.tolist() == [1, 1, 1]


def test_one_tensor_given_twice_becomes_two() -> None:
    x = torch.zeros(3)
    arguments = record(lambda x, y: x + y, ((x, x), {})).info.calls[0].arguments
    assert arguments["x"] is not arguments["y"]
    assert arguments["x"].data_ptr() != arguments["y"].data_ptr()


def test_an_expanded_tensor_stays_one_of_its_own_memory() -> None:
    """What writes to it is refused in a replay, as it would have been in the call."""
    given = torch.zeros(1)
    call = record(lambda x: x, ((given.expand(4),), {})).info.calls[0]
    given.fill_(5)
    assert call.arguments["x"].tolist() == [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        call.arguments["x"].add_(1)


@pytest.mark.parametrize(
    "output",
    [
        3,
        None,
        "text",
        (torch.zeros(1), 3, None, True, "x"),
        {"a": {"b": [torch.zeros(1)]}, "n": 2.5},
        BaseModelOutput(last_hidden_state=torch.zeros(1)),
        [],
    ],
)
def test_any_output_is_recorded(output: Any) -> None:
    observer = record(lambda x: output, ((torch.zeros(1),), {}))
    assert observer.num_obs() == 1
    assert type(observer.info.calls[0].outputs) is type(output)


def test_arguments_of_every_kind() -> None:
    class Opaque:
        pass

    given = {"a": 1, "b": None, "c": "s", "d": [torch.zeros(1), {"k": (2, torch.ones(1))}], "e": Opaque()}
    arguments = record(lambda **kwargs: 0, ((), given)).info.calls[0].arguments
    assert arguments["a"] == 1
    assert arguments["d"][1]["k"][0] == 2
    assert isinstance(arguments["e"], Opaque)
    with register_flattening_functions():
        assert set(record(lambda **kwargs: 0, ((), given)).info.calls[0].leaves()) == {
            "a", "b", "c", "d.0", "d.1.k.0", "d.1.k.1", "e",
        }  # fmt: skip


class Stubborn:
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


@pytest.mark.parametrize("as_output", [False, True])
def test_what_cannot_be_copied_does_not_disturb_the_call(as_output: bool) -> None:
    net = Function((lambda x: Stubborn()) if as_output else (lambda x: 7))
    observer = InputObserver()
    with observer(net), pytest.warns(ObserverWarning, match="not recorded: TypeError: no copies"):
        result = net(torch.zeros(1) if as_output else Stubborn())
    assert isinstance(result, Stubborn) if as_output else result == 7
    assert (observer.num_obs(), observer.info.seen, observer.info.lost) == (0, 1, 1)


def test_a_wrong_call_fails_as_it_would_have_without_the_observer() -> None:
    net = Net()
    with InputObserver()(net), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
            net(torch.zeros(1), q=1)


def test_an_export_inside_the_block_is_no_observation() -> None:
    net, observer = Net(), InputObserver()
    with observer(net):
        net(torch.zeros(2))
        torch.export.export(net, (torch.zeros(3),))
        torch.jit.trace(lambda x: net(x), (torch.zeros(4),), check_trace=False)
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            net(torch.zeros(5))
    assert observer.num_obs() == 1
    assert observer.info.lost == 0


def test_a_cache_is_recorded_as_it_was_before_the_call() -> None:
    def forward(x: Any, cache: Any) -> Any:
        cache.update(x, x, 0)
        return {"cache": cache}

    cache = DynamicCache()
    x = torch.ones(1, 1, 2, 3)
    observer = record(forward, ((x, cache), {}), ((x, cache), {}))
    before = [len(call.arguments["cache"].layers) for call in observer.info.calls]
    assert before == [0, 1]
    assert observer.info.calls[1].arguments["cache"].layers[0].keys.shape[2] == 2
    assert observer.info.calls[1].outputs["cache"].layers[0].keys.shape[2] == 4
    assert cache.layers[0].keys.shape[2] == 4


def test_flat_outputs() -> None:
    info = record(lambda x: (x, None, 3, {"k": x + 1}), ((torch.zeros(2),), {})).info
    assert [tensor.tolist() for tensor in info.flat_outputs[0]] == [[0, 0], [1, 1]]
    assert info.inputs[0].args[0].tolist() == [0, 0]


# what it infers


def test_positional_calls_give_tuples_and_the_others_dicts() -> None:
    observer = record(
        lambda x, y: x,
        ((torch.zeros(5, 6), torch.zeros(1, 6)), {}),
        ((torch.zeros(7, 7), torch.zeros(1, 7)), {}),
    )
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC, 1: DYNAMIC}, {1: DYNAMIC})
    assert [tuple(x.shape) for x in observer.infer_arguments()] == [(5, 6), (1, 6)]
    observer = record(
        lambda x, y: x,
        ((torch.zeros(5, 6),), {"y": torch.zeros(1)}),
        ((torch.zeros(5, 7),), {"y": torch.zeros(1)}),
    )
    assert observer.infer_dynamic_shapes() == {"x": {1: DYNAMIC}, "y": {}}
    assert list(observer.infer_arguments()) == ["x", "y"]


def test_batch_dimension_by_name_position_or_for_all() -> None:
    observer = record(lambda x, y, z: x, ((torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)), {}))
    assert observer.infer_dynamic_shapes() == ({}, {}, {})
    assert observer.infer_dynamic_shapes(set_batch_dimension_for=True) == ({0: DYNAMIC},) * 3
    assert observer.infer_dynamic_shapes(set_batch_dimension_for={0, "z"}) == ({0: DYNAMIC}, {}, {0: DYNAMIC})


def test_inference_needs_a_call() -> None:
    with pytest.raises(RuntimeError, match="No inputs were captured"):
        InputObserver().infer_dynamic_shapes()
    assert InputObserver().is_empty()


def test_the_first_complete_call_gives_the_arguments_as_copies() -> None:
    observer = record(lambda x, y=None: x, ((torch.zeros(1),), {}), ((torch.zeros(2),), {"y": torch.ones(2)}))
    arguments = observer.infer_arguments()
    assert {name: tuple(value.shape) for name, value in arguments.items()} == {"x": (2,), "y": (2,)}
    arguments["x"].fill_(9)
    assert observer.infer_arguments()["x"].tolist() == [0, 0]


def test_value_if_missing_is_an_observation_and_is_never_passed_to_the_model() -> None:
    seen = []

    def forward(x: Any, mask: Any = None) -> Any:
        seen.append(mask)
        return x

    net = Function(forward)
    observer = InputObserver(value_if_missing={"mask": torch.zeros(0, 10)})
    with observer(net):
        net(x=torch.zeros(2, 3))
        net(x=torch.zeros(2, 4), mask=torch.zeros(2, 10))
    assert seen[0] is None
    assert observer.infer_dynamic_shapes() == {"x": {1: DYNAMIC}, "mask": {0: DYNAMIC}}
    assert tuple(observer.infer_arguments(0)["mask"].shape) == (0, 10)


def test_what_it_infers_can_be_exported() -> None:
    class Nested(torch.nn.Module):
        def forward(self, x: Any, items: Any, scale: int = 1) -> Any:
            return x + items[0] * scale + items[1]["k"]

    def call(n: int) -> dict[str, Any]:
        return {"x": torch.ones(n, 3), "items": [torch.ones(n, 3), {"k": torch.ones(3)}], "scale": 2}

    net, observer = Nested(), InputObserver()
    with observer(net):
        net(**call(4))
        net(**call(5))
    shapes = observer.infer_dynamic_shapes()
    assert shapes == {"x": {0: DYNAMIC}, "items": [{0: DYNAMIC}, {"k": {}}], "scale": None}
    program = torch.export.export(net, (), kwargs=observer.infer_arguments(), dynamic_shapes=shapes)
    assert torch.equal(program.module()(**call(7)), net(**call(7)))


def test_constants_that_differ_are_reported_on_inference_not_in_the_call() -> None:
    observer = record(lambda x, k=None: x, ((torch.zeros(2),), {"k": 2}), ((torch.zeros(2),), {"k": 3}))
    with pytest.raises(ObserveError, match="argument k is a constant that differs between calls"):
        observer.infer_dynamic_shapes()
