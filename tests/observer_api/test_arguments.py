"""`infer_arguments`, `value_if_missing`, `remove_inputs`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from pytest_exportcheck import InputObserver, ObserverWarning, make_dynamic_cache

from .helpers import DYNAMIC as D
from .helpers import call, f, module, observe, shapes_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")


def wxyz(x: Any = None, y: Any = None, z: Any = None, w: Any = None) -> Any:
    return x if x is not None else z


PARTIAL = [
    call(x=f(5, 6), y=f(1, 6)),
    call(x=f(5, 7), y=f(1, 7), z=f(5, 7), w=f(1, 7)),
    call(z=f(5, 8), w=f(1, 8)),
]


# which call


def test_the_first_complete_call_as_a_tuple_or_a_dict() -> None:
    calls = [call(f(2, 6), f(1, 6)), call(f(2, 7), f(1, 7))]
    assert shapes_of(observe(wxyz, *calls).infer_arguments()) == ((2, 6), (1, 6))
    assert shapes_of(observe(wxyz, *PARTIAL).infer_arguments()) == {
        "x": (5, 7), "y": (1, 7), "z": (5, 7), "w": (1, 7),
    }  # fmt: skip


def test_a_multimodal_prompt_takes_the_second_call() -> None:
    def forward(
        input_ids: Any, pixel_values: Any = None, attention_mask: Any = None, cache: Any = None
    ) -> Any:
        return input_ids

    def ids(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int64)

    def cache(n: int) -> Any:
        return make_dynamic_cache([(f(1, 1, n, 4), f(1, 1, n, 4))])

    observer = observe(
        forward,
        call(input_ids=ids(1, 20), pixel_values=f(1, 3, 8, 8), attention_mask=ids(1, 20)),
        call(input_ids=ids(1, 1), attention_mask=ids(1, 21), cache=cache(20)),
        call(input_ids=ids(1, 1), attention_mask=ids(1, 22), cache=cache(21)),
        value_if_missing={"pixel_values": f(0, 3, 8, 8)},
    )
    arguments = observer.infer_arguments()
    assert arguments["cache"].layers[0].keys.shape[2] == 20
    del arguments["cache"]
    assert shapes_of(arguments) == {
        "input_ids": (1, 1), "pixel_values": (0, 3, 8, 8), "attention_mask": (1, 21),
    }  # fmt: skip
    assert observer.infer_dynamic_shapes() == {
        "input_ids": {1: D}, "pixel_values": {0: D}, "attention_mask": {1: D}, "cache": [{2: D}] * 2,
    }  # fmt: skip


def test_mixed_calls_give_all_names() -> None:
    observer = observe(wxyz, call(f(2), f(2), z=f(2), w=f(2)), call(f(3), f(3), z=f(3), w=f(3)))
    assert list(observer.infer_arguments()) == ["x", "y", "z", "w"]


# completion


def test_an_index_is_that_call_with_empty_tensors_for_what_it_lacks() -> None:
    observer = observe(wxyz, *PARTIAL)
    assert shapes_of(observer.infer_arguments(0)) == {"x": (5, 6), "y": (1, 6), "z": (5, 0), "w": (1, 0)}
    assert shapes_of(observer.infer_arguments(-1)) == {"x": (5, 0), "y": (1, 0), "z": (5, 8), "w": (1, 8)}
    with pytest.warns(
        ObserverWarning, match=r"z, w are not among the inputs.*the model never saw this"
    ) as caught:
        observer.infer_arguments(0)
    assert caught[0].filename == __file__
    with pytest.raises(IndexError):
        observer.infer_arguments(3)


def test_a_users_dict_or_tuple_is_completed() -> None:
    observer = observe(wxyz, *PARTIAL)
    w, z = f(2, 3), f(5, 3)
    arguments = observer.infer_arguments({"w": w, "z": z})
    assert shapes_of(arguments) == {"x": (5, 0), "y": (1, 0), "z": (5, 3), "w": (2, 3)}
    assert list(arguments) == ["x", "y", "z", "w"]
    assert torch.equal(arguments["w"], w)
    arguments = observer.infer_arguments((f(5, 3), f(1, 3)))
    assert shapes_of(arguments) == {"x": (5, 3), "y": (1, 3), "z": (5, 0), "w": (1, 0)}
    for wrong in (2.5, [f(2)], {1, 2}, True):
        with pytest.raises(ValueError, match="Unexpected type"):
            observer.infer_arguments(wrong)
    with pytest.raises(ValueError, match="no argument 'q'"):
        observer.infer_arguments({"q": f(2)})
    with pytest.raises(ValueError, match="5 inputs for 4 arguments"):
        observer.infer_arguments((*PARTIAL[1][1].values(), 1))


def test_what_is_made_has_dtype_and_device_and_is_zero() -> None:
    def ids(n: int) -> torch.Tensor:
        return torch.ones(2, n, dtype=torch.int32)

    observer = observe(wxyz, call(x=f(2)), call(x=f(3), y=ids(3), z=torch.ones(2, 2)))
    made = observer.infer_arguments(0)
    assert made["y"].dtype == torch.int32
    assert made["z"].tolist() == [[0, 0], [0, 0]], "no axis of it is dynamic"
    assert made["y"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_an_empty_cache_becomes_one_of_length_0_and_the_batch_of_its_call() -> None:
    def cache(batch: int, n: int) -> Any:
        return make_dynamic_cache([(f(batch, 1, n, 4), f(batch, 1, n, 4))] if n else [])

    observer = observe(
        lambda x, cache=None: x,
        call(x=f(3, 5), cache=cache(3, 0)),
        call(x=f(2, 1), cache=cache(2, 5)),
        call(x=f(4, 1), cache=cache(4, 6)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = observer.infer_arguments(0)["cache"].layers[0]
    assert tuple(layer.keys.shape) == (3, 1, 0, 4)
    assert observer.infer_arguments()["cache"].layers[0].keys.shape[2] == 5


def test_sizes_0_and_1_are_said() -> None:
    observer = observe(wxyz, call(x=f(2, 1)), call(x=f(2, 5)))
    shapes = observer.infer_dynamic_shapes()
    with pytest.warns(ObserverWarning, match="x axis 1.*backed_size_oblivious"):
        observer.infer_arguments()
    assert observer.needs_backed_size_oblivious(shapes)
    assert not observer.needs_backed_size_oblivious(shapes, 1)


def test_safe_arguments_have_no_size_0_or_1() -> None:
    net = module(lambda x, y=None: x if y is None else x + y)
    observer = InputObserver()
    with observer(net):
        net(x=f(1, 1))
        net(x=f(1, 4))
        arguments = observer.infer_arguments(export_safe=True, set_batch_dimension_for=True)
    assert min(arguments["x"].shape) > 1
    assert observer.info.seen == 2, "the model was called, and that is no observation"
    assert not observer.needs_backed_size_oblivious({"x": {0: D, 1: D}}, arguments)


def test_sizes_that_the_model_refuses_are_not_made() -> None:
    def forward(x: Any) -> Any:
        if x.shape[0] not in (1, 0):
            raise RuntimeError("no")
        return x

    observer = InputObserver()
    net = module(forward)
    with observer(net):
        net(f(0))
        net(f(1))
    with pytest.warns(ObserverWarning, match="eager refuses"):
        assert observer.infer_arguments(export_safe=True)[0].shape[0] in (0, 1)
    del net
    with pytest.raises(RuntimeError, match="the observed model is gone"):
        observer.infer_arguments(export_safe=True)


def test_copies_are_handed_out() -> None:
    observer = observe(wxyz, call(x=torch.zeros(2)), call(x=torch.zeros(3)))
    for take in (
        lambda: observer.infer_arguments()["x"],
        lambda: observer.infer_arguments(0)["x"],
        lambda: observer.infer_arguments(flat=True)[0],
        lambda: observer.info.inputs[0].kwargs["x"],
        lambda: observer.info.inputs[0].flat_list[0],
        lambda: (observer.info.inputs[0].aligned_flat_list or [])[0],
        lambda: observer.info.flat_outputs[0][0],
    ):
        take().fill_(9)
        assert take().tolist() == [0, 0]
    given = torch.zeros(2)
    observer.infer_arguments({"x": given})["x"].fill_(9)
    assert given.tolist() == [0, 0]


# *args and **kwargs


def test_args_and_kwargs() -> None:
    def forward(a: Any, *args: Any, **kwargs: Any) -> Any:
        return a

    observer = observe(forward, *(call(f(2, n), f(n), f(n), y=f(n), x=f(n)) for n in (3, 4)))
    with pytest.raises(RuntimeError, match="as_args_kwargs=True"):
        observer.infer_arguments()
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert shapes_of(args) == ((2, 3), (3,), (3,))
    assert list(kwargs) == ["x", "y"]
    assert len(observer.infer_arguments(flat=True)) == 5
    assert observer.infer_arguments((f(2, 5), f(5), f(5)), as_args_kwargs=True)[0][2].shape == (5,)


def test_extra_keywords_stay_at_the_top_level() -> None:
    observer = observe(lambda x, **kwargs: x, call(x=f(2), y=f(2)), call(x=f(3), y=f(3)))
    assert list(observer.infer_arguments()) == ["x", "y"]
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "kwargs": {"y": {0: D}}}


def test_as_args_kwargs_of_plain_calls() -> None:
    observer = observe(wxyz, call(f(2), f(2)), call(f(3), f(3)))
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert (shapes_of(args), kwargs) == (((2,), (2,)), {})
    observer = observe(wxyz, call(f(2), y=f(2)), call(f(3), f(3), z=f(3)))
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert (len(args), list(kwargs)) == (1, ["y", "z"])


# value_if_missing


def test_a_stand_in_by_name() -> None:
    seen = []

    def forward(x: Any, mask: Any = None) -> Any:
        seen.append(mask)
        return x

    observer = observe(
        forward, call(x=f(2, 3)), call(x=f(2, 4), mask=f(2, 10)), value_if_missing={"mask": f(0, 10)}
    )
    assert seen[0] is None
    assert observer.infer_dynamic_shapes() == {"x": {1: D}, "mask": {0: D}}
    assert shapes_of(observer.infer_arguments()) == {"x": (2, 3), "mask": (0, 10)}
    assert shapes_of(observer.infer_arguments({"x": f(2, 9)})) == {"x": (2, 9), "mask": (0, 10)}


def test_a_stand_in_by_position() -> None:
    observer = observe(
        lambda x, y: x, call(f(2, 3), None), call(f(2, 4), f(2, 10)), value_if_missing={1: f(0, 10)}
    )
    assert observer.infer_dynamic_shapes() == ({1: D}, {0: D})
    assert shapes_of(observer.infer_arguments()) == ((2, 3), (0, 10))


@pytest.mark.parametrize("key", [1, "y"])
def test_a_nested_stand_in(key: Any) -> None:
    stand_in = (f(0, 10), f(0, 3))
    observer = observe(
        lambda x, y: x,
        call(f(2, 3), None),
        call(f(2, 4), (f(2, 10), f(2, 3))),
        value_if_missing={key: stand_in},
    )
    shapes, arguments = observer.infer_dynamic_shapes(), observer.infer_arguments()
    found = shapes[1] if key == 1 else shapes["y"]
    assert found == ({0: D}, {0: D})
    assert type(arguments[1] if key == 1 else arguments["y"]) is tuple


def test_a_stand_in_by_name_of_what_is_passed_by_position() -> None:
    observer = observe(
        lambda x, y: x, call(f(2, 3), f(2, 9)), call(f(2, 4), f(3, 9)), value_if_missing={"y": f(0, 9)}
    )
    assert observer.infer_dynamic_shapes() == ({1: D}, {0: D})
    assert shapes_of(observer.infer_arguments()) == ((2, 3), (2, 9))


def test_a_stand_in_is_not_changed_by_its_user() -> None:
    stand_in = torch.zeros(1, 3)
    observer = observe(wxyz, call(x=f(2)), call(x=f(3), y=f(2, 3)), value_if_missing={"y": stand_in})
    observer.infer_arguments()["y"].fill_(5)
    assert not stand_in.any()


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ("nope", ValueError, "Unexpected keyword argument"),
        (7, ValueError, "Unexpected keyword argument"),
        (1, NotImplementedError, "Unexpected keyword argument"),
        (1.5, TypeError, "Unexpected type"),
        (("y",), TypeError, "Unexpected type"),
    ],
)
def test_wrong_stand_ins_are_said_in_the_call(key: Any, error: Any, text: str) -> None:
    net, observer = module(lambda x, y=None: x), InputObserver({key: f(2)})
    with observer(net), pytest.raises(error, match=text):
        net(f(2))
    assert "forward" not in vars(net)


def test_a_stand_in_for_any_name_of_kwargs() -> None:
    observer = observe(lambda x, **more: x, call(x=f(2)), call(x=f(3), z=f(2)), value_if_missing={"z": f(0)})
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "more": {"z": {0: D}}}


# remove_inputs


def test_removed_inputs_vanish() -> None:
    observer = observe(wxyz, *PARTIAL)
    assert observer.remove_inputs(["z"]) == 1
    assert list(observer.infer_dynamic_shapes()) == list(observer.infer_arguments(1)) == ["x", "y", "w"]
    assert observer.remove_inputs(["z", "w"]) == 1
    assert list(observer.infer_dynamic_shapes()) == list(observer.infer_arguments()) == ["x", "y"]
    assert observer.remove_inputs(["nope"]) == 0


def test_a_removed_position() -> None:
    observer = observe(wxyz, call(f(2), f(3), f(4)), call(f(3), f(3), f(4)))
    assert observer.remove_inputs(["y"]) == 1
    # By name: in a tuple, z would be in the place of y.
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "z": {}}
    observer = observe(wxyz, call(f(2), f(3), f(4)), call(f(3), f(3), f(4)))
    assert observer.remove_inputs(["z"]) == 1
    assert observer.infer_dynamic_shapes() == ({0: D}, {})


def test_what_cannot_be_removed() -> None:
    with pytest.raises(RuntimeError, match="No input was captured"):
        InputObserver().remove_inputs(["x"])
    observer = observe(lambda x, *args, **kwargs: x, call(f(2)), call(f(3)))
    for name in ("args", "kwargs"):
        with pytest.raises(ValueError, match="Cannot remove variadic"):
            observer.remove_inputs([name])
    assert observe(wxyz, call(f(2))).remove_inputs(["w"]) == 0


def test_names_that_do_not_exist_are_refused_with_the_one_that_was_meant() -> None:
    calls = call(x=f(2, 3), input_ids=f(2, 5)), call(x=f(2, 4), input_ids=f(2, 5))
    fixed = observe(lambda x, input_ids: x, *calls)
    open_ended = observe(lambda x, **kwargs: x, *calls)
    for observer in (fixed, open_ended):
        meant = r"no argument 'inputids' \(did you mean 'input_ids'\?\)"
        with pytest.raises(ValueError, match=meant):
            observer.infer_dynamic_shapes(set_batch_dimension_for=["inputids"])
        with pytest.raises(ValueError, match=meant):
            observer.infer_dynamic_shapes(dim_names={"inputids": {0: "batch"}})
        with pytest.raises(ValueError, match=meant):
            observer.infer_arguments({"inputids": f(2, 5)})
    with pytest.raises(ValueError, match=r"no argument 'other' \(known: x, input_ids\)"):
        fixed.infer_dynamic_shapes(set_batch_dimension_for=["other"])
    for position in (2, -1):
        with pytest.raises(ValueError, match=f"the signature has no position {position}"):
            fixed.infer_dynamic_shapes(set_batch_dimension_for=[position])
        with pytest.raises(ValueError, match=f"the signature has no position {position}"):
            fixed.infer_dynamic_shapes(dim_names={position: {0: "batch"}})
    # What ``**kwargs`` may still catch.
    assert open_ended.infer_dynamic_shapes(set_batch_dimension_for=["pixels"])["x"] == {1: D}


def test_a_call_that_was_not_recorded() -> None:
    observer = observe(lambda x: x, call(f(2, 3)), call(f(2, 4)))
    assert observer.infer_arguments(-1)[0].shape == (2, 4)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"there is no call {index}, of 2 recorded calls"):
            observer.infer_arguments(index)
