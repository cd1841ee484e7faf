"""What a careful reading found wrong in how calls are captured: copies, odd calls, odd arguments."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import pickle
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck import InputObserver, ObserverWarning, make_dynamic_cache
from pytest_exportcheck.observe.observer import InferenceError

from .helpers import DYNAMIC, call, module, observe
from .test_hard_cases import verdict

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


class Plain:
    """An argument that is no pytree node."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


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


def test_a_replica_on_another_device_runs_itself() -> None:
    model, observer = Double(), InputObserver()
    with observer(model):
        replica = model._replicate_for_data_parallel()
        replica.linear = torch.nn.Identity()
        assert torch.equal(replica(ones(1, 3)), ones(1, 3, value=2)), "the replica runs the original"
        model(ones(2, 3))
    assert observer.info.seen == 1


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
        for copied in (copy.deepcopy(model), copy.copy(model)):
            copied(ones(1, 3))
        model(ones(2, 3))
    assert observer.info.seen == 1


# Which calls count


class Countdown(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 0 else self.forward(x, n - 1) + 1


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_what_a_recursive_method_calls_is_part_of_its_call(limit: int) -> None:
    model, observer = Countdown(), InputObserver()
    with observer(model, store_n_calls=limit):
        for n in (3, 2):
            assert torch.equal(model(ones(n), n), ones(n, value=n + 1))
    assert observer.info.seen == 2
    calls = [*observer.info.calls, *observer.info.shape_calls]
    assert [c.arguments["n"] for c in calls] == [3, 2]


def test_a_call_that_raises_leaves_the_next_one_to_be_recorded() -> None:
    model, observer = module(lambda x: x @ ones(3)), InputObserver()
    with observer(model):
        with pytest.raises(RuntimeError):
            model(ones(2))
        model(ones(3))
    assert [c.number for c in observer.info.calls] == [1]


def test_calls_of_several_threads_are_no_calls_of_one_another() -> None:
    observer, both = InputObserver(), threading.Barrier(2, timeout=60)

    def function(x: Any) -> Any:
        both.wait()
        return x + 1

    model = module(function)
    with observer(model):
        threads = [threading.Thread(target=model, args=(ones(n),)) for n in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(len(c.arguments["x"]) for c in observer.info.calls) == [2, 3]


def test_an_observer_inside_itself_records_a_call_once() -> None:
    model, observer = Double(), InputObserver()
    with observer(model):
        with observer(model):
            model(ones(2, 3))
        model(ones(3, 3))
    assert [c.number for c in observer.info.calls] == [0, 1]
    assert "forward" not in vars(model)


def test_an_observer_that_waits_for_calls_takes_no_second_model() -> None:
    observer = InputObserver()
    first, second = Double(), Double()
    refused = pytest.raises(RuntimeError, match="one observer for each")
    with observer(first), refused, observer(second):
        raise AssertionError("entered")


@pytest.mark.parametrize("limit", [0, 2])
def test_a_call_under_vmap_is_left_alone_and_said_once(limit: int) -> None:
    model, observer = Double(), InputObserver()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with observer(model, store_n_calls=limit):
            for n in (4, 5, 6):
                given = torch.func.vmap(model)(ones(n, 2, 3))
                assert given.shape == (n, 2, 3)
            model(ones(7, 3))
    assert ["torch.func.vmap" in str(w.message) for w in said] == [True]
    assert [len(c.arguments["x"]) for c in (observer.info.calls or observer.info.shape_calls)] == [7]
    assert observer.info.lost == (3 if limit else 0)


def test_a_call_whose_outputs_only_are_batched_is_not_recorded() -> None:
    model, observer = module(lambda x: x * weight), InputObserver()

    def run(value: torch.Tensor) -> torch.Tensor:
        nonlocal weight
        weight = value
        given: torch.Tensor = model(ones(2))
        return given

    weight = ones(2)
    with observer(model):
        torch.func.vmap(run)(ones(4, 2))
        weight = ones(2)
        model(ones(2))
    assert [c.number for c in observer.info.calls] == [1]


def test_values_under_grad_are_recorded() -> None:
    model, observer = Double(), InputObserver()
    with observer(model):
        torch.func.grad(lambda x: model(x).sum())(ones(2, 3, value=5))
        torch.func.jacfwd(model)(ones(2, 3, value=6))
    assert [float(c.arguments["x"].sum()) for c in observer.info.calls] == [30, 36]


class Uncopied:
    """Counts how often somebody tries to copy it."""

    tried = 0

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).tried += 1
        raise TypeError("no copies")


@pytest.mark.parametrize("as_output", [False, True])
def test_a_call_that_cannot_be_copied_is_tried_and_said_once(
    as_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uncopied, "tried", 0)
    model = module(lambda x, c=None: Uncopied() if as_output and c is not True else x)
    observer = InputObserver()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with observer(model):
            for _ in range(5):
                model(ones(2)) if as_output else model(ones(2), Uncopied())
            model(ones(2), c=True)
    assert ["no copies" in str(w.message) for w in said] == [True]
    assert (Uncopied.tried, observer.info.lost) == (1, 5)
    assert observer.num_obs() == 1, "a call of another kind"


def test_what_cannot_be_copied_is_tried_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uncopied, "tried", 0)
    model, observer = module(lambda x, n, c: x), InputObserver()
    with observer(model):
        for n in range(50):
            model(ones(2), n, Uncopied())
    assert Uncopied.tried <= 8
    assert observer.info.lost == 50


# What runs around the method, and methods that nothing calls


def test_hooks_that_change_inputs_are_said() -> None:
    model = Double()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.warns(ObserverWarning, match=r"forward hooks run around Double\.forward.*observe a module"):
        observe(model, call(ones(2, 3)))


def test_hooks_of_another_method_are_no_matter() -> None:
    model = Double()
    model.double = lambda x: x * 2  # type: ignore[assignment]
    model.register_forward_hook(lambda module, args, output: output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with InputObserver()(model, method_name="double"):
            model.double(ones(2))


def test_a_method_that_no_call_reaches_is_said() -> None:
    model, observer = Double(), InputObserver()
    model.other = lambda x: x  # type: ignore[assignment]
    said = pytest.warns(ObserverWarning, match=r"no call reached Double\.other.*observe what is called")
    with said, observer(model, method_name="other"):
        model(ones(2, 3))
    with pytest.raises(RuntimeError, match=r"No inputs were captured\. no call reached Double\.other"):
        observer.infer_arguments()


# Beyond the limit


def _cache(*lengths: int) -> Any:
    return make_dynamic_cache([(ones(2, 2, n, 4), ones(2, 2, n, 4)) for n in lengths])


def _beyond_and_within(*arguments: Any) -> tuple[Any, Any]:
    """The shapes of the argument, if one call is kept and if all are."""
    calls = [call(ones(2), value) for value in arguments]
    found = [observe(lambda x, cache: x, *calls, store_n_calls=n) for n in (1, len(calls))]
    return tuple(observer.infer_dynamic_shapes()[1] for observer in found)  # type: ignore[return-value]


@pytest.mark.parametrize("layer", range(4))
def test_every_layer_of_a_cache_counts_beyond_the_limit(layer: int) -> None:
    caches = [_cache(*(n if index == layer else 5 for index in range(4))) for n in (5, 6, 7)]
    beyond, within = _beyond_and_within(*caches)
    assert beyond == within
    assert beyond[2 * layer] == {2: DYNAMIC}


def test_layers_that_grew_alike_and_part_later_are_news() -> None:
    caches = [_cache(*lengths) for lengths in ((5, 5, 5), (6, 6, 6), (7, 7, 7), (8, 8, 9), (9, 9, 8))]
    observer = observe(lambda cache: ones(1), *(call(c) for c in caches), store_n_calls=2)
    assert [c.number for c in observer.info.shape_calls] == [3]


def test_layers_that_grew_alike_are_no_news() -> None:
    caches = [_cache(n, n, n) for n in range(4, 40)]
    observer = observe(lambda cache: ones(1), *(call(c) for c in caches), store_n_calls=2)
    assert observer.info.shape_calls == []


def test_values_of_a_layer_count_beyond_the_limit() -> None:
    def cache(n: int) -> Any:
        made = _cache(5, 5, 5)
        made.layers[1].values = ones(2, 2, 5, n)
        return made

    beyond, within = _beyond_and_within(*(cache(n) for n in (4, 5, 6)))
    assert beyond == within
    assert beyond[3] == {3: DYNAMIC}


def test_what_a_layer_holds_beside_keys_and_values_counts_beyond_the_limit() -> None:
    def cache(n: int) -> Any:
        made = _cache(5, 5)
        made.layers[1].states = {0: ones(2, n), 1: None}
        made.beside = ones(n, 3)
        return made

    beyond, within = _beyond_and_within(*(cache(n) for n in (4, 5, 6)))
    assert beyond == within
    assert sum(map(bool, beyond)) == 2


def test_a_layer_that_is_filled_later_counts_beyond_the_limit() -> None:
    caches = [_cache(5, 5), _cache(5, 5), _cache(5, 5)]
    caches[0].layers[1].keys = caches[0].layers[1].values = None
    caches[0].layers[1].is_initialized = False
    caches[2].layers[1].keys, caches[2].layers[1].values = ones(2, 2, 8, 4), ones(2, 2, 8, 4)
    beyond, within = _beyond_and_within(*caches)
    assert beyond == within
    assert DYNAMIC in beyond[2].values()


@pytest.mark.parametrize("limit", [0, 1])
def test_shapes_alone_copy_no_object_that_is_no_pytree_node(limit: int) -> None:
    class Held:
        copied = 0

        def __init__(self) -> None:
            self.weight = ones(1000)

        def __deepcopy__(self, memo: Any) -> Any:
            Held.copied += 1
            return Held()

    calls = [call(ones(n), Held(), {"inside": Held()}) for n in (2, 3, 4, 5)]
    observer = observe(lambda x, held, more: x, *calls, store_n_calls=limit)
    assert Held.copied == 2 * limit, "the values of the calls within the limit"
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC}, None, {"inside": None})
    assert Held.copied == 2 * limit


def test_shapes_alone_hold_on_to_no_object_of_the_users() -> None:
    held = [Plain(weight=ones(2)), Plain(weight=ones(2))]
    references = [weakref.ref(item) for item in held]
    observer = observe(lambda x, held: x, call(ones(2), held[0]), call(ones(3), held[1]), store_n_calls=0)
    held.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC}, None)


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize(
    "pair", [(torch.float32, torch.float64), (slice(1), slice(2)), (1j, 2j), (torch.relu, torch.sigmoid)]
)
def test_constants_that_are_no_numbers_count_beyond_the_limit(pair: tuple[Any, Any], limit: int) -> None:
    observer = observe(lambda x, c: x, *(call(ones(2), c) for c in pair), store_n_calls=limit)
    assert len(observer.info.calls) + len(observer.info.shape_calls) == 2
    if limit != 1:
        with pytest.raises(InferenceError, match="different constant values"):
            observer.infer_dynamic_shapes()
    else:
        with pytest.warns(ObserverWarning, match="left out: .*argument c is a constant"):
            observer.infer_dynamic_shapes()


# Constants


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Child(Slots):
    __slots__ = ("more",)

    def __init__(self, held: Any, more: Any) -> None:
        super().__init__(held)
        self.more = more


def _cyclic(value: Any) -> Plain:
    made = Plain(value=value, inside=Plain())
    made.inside.parent = made
    return made


def _closure(value: Any) -> Callable[[], Any]:
    return lambda: value


#: What makes a constant of a number; equal for equal numbers and for no others.
CONSTANTS: dict[str, Callable[[int], Any]] = {
    "UserDict": lambda n: collections.UserDict(a=ones(2, value=n)),
    "UserList": lambda n: collections.UserList([ones(2, value=n), 1]),
    "slots": lambda n: Slots(n),
    "slots of a base": lambda n: Child(ones(2, value=n), Slots(3)),
    "object of slots": lambda n: Plain(a=[Slots(n)]),
    "namespace": lambda n: types.SimpleNamespace(a=ones(2, value=n)),
    "cycle": _cyclic,
    "module": lambda n: torch.nn.Threshold(n, 1.0),
    "partial": lambda n: functools.partial(torch.sum, dim=n),
    "closure": _closure,
    "bound method": lambda n: Slots(n).__init__,  # type: ignore[misc]
    "iterator": lambda n: iter([n]),
    "object array": lambda n: np.array([None, n], dtype=object),
    "set in a dataclass": lambda n: frozenset({n}),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_are_compared_by_what_they_hold(kind: str) -> None:
    make = CONSTANTS[kind]
    equal = observe(lambda x, c: x, call(ones(2), make(1)), call(ones(3), make(1)))
    assert equal.infer_dynamic_shapes()[0] == {0: DYNAMIC}
    other = observe(lambda x, c: x, call(ones(2), make(1)), call(ones(3), make(2)))
    with pytest.raises(InferenceError, match="argument c is a constant that differs"):
        other.infer_dynamic_shapes()


@pytest.mark.parametrize(
    "pair",
    [(torch.relu, torch.sigmoid), (_negative, ones), (torch.add, torch.nn.functional.relu), (np.sum, np.max)],
)
def test_two_functions_are_two_constants(pair: tuple[Any, Any]) -> None:
    observer = observe(lambda x, c: x, *(call(ones(2), c) for c in pair))
    with pytest.raises(InferenceError, match="argument c is a constant that differs"):
        observer.infer_dynamic_shapes()


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng])
def test_a_source_of_random_numbers_is_one_constant_wherever_it_has_got_to(make: Callable[[], Any]) -> None:
    observer = observe(lambda x, c: x, call(ones(2), make()), call(ones(3), make()))
    assert observer.infer_dynamic_shapes()[0] == {0: DYNAMIC}
    assert isinstance(observer.infer_arguments()[1], type(make()))


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("layers", [4, None, "four", torch.tensor(4), {"a": 1}])
def test_an_object_with_something_called_layers_is_no_cache(layers: Any, limit: int) -> None:
    class ConfigCache(Plain):
        pass

    calls = [call(ones(n), Plain(layers=layers), ConfigCache(layers=layers)) for n in (2, 3, 4)]
    observer = observe(lambda x, config, cache: x, *calls, store_n_calls=limit)
    assert observer.info.lost == 0
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC}, None, None)


# Outputs


@pytest.mark.parametrize("make", [Plain, lambda t: Slots(t), lambda t: {"a": [Slots((t, {t}))]}])
@pytest.mark.parametrize("store", ["device", "disk"])
def test_outputs_of_an_unregistered_class_that_need_grad_are_kept(make: Any, store: Any) -> None:
    linear = torch.nn.Linear(3, 3)

    def function(x: Any) -> Any:
        given = linear(x)
        assert given.requires_grad
        return Plain(t=given) if make is Plain else make(given)

    observer = observe(function, call(ones(2, 3)), call(ones(4, 3)), store=store)
    assert (observer.num_obs(), observer.info.lost) == (2, 0)
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC},)
    kept = observer.info.calls[1].outputs
    kept = kept.t if make is Plain else kept.held if isinstance(kept, Slots) else kept["a"][0].held[0]
    assert torch.equal(kept, linear(ones(4, 3)))
    assert not kept.requires_grad


def test_arguments_of_an_unregistered_class_that_need_grad_are_kept() -> None:
    hidden = torch.nn.Linear(3, 3)(ones(2, 3))
    observer = observe(lambda x, state: x, call(ones(2), Plain(hidden=hidden)))
    assert observer.num_obs() == 1
    assert hidden.requires_grad


# Names


class Counted:
    """A pytree node that has a counter in its context."""

    def __init__(self, inside: torch.Tensor, count: Any) -> None:
        self.inside, self.count = inside, count


_pytree.register_pytree_node(
    Counted,
    lambda value: ([value.inside], value.count),
    lambda children, count: Counted(next(iter(children)), count),
    serialized_type_name="hard_cases_capture.Counted",
    flatten_with_keys_fn=lambda value: ([(_pytree.GetAttrKey("inside"), value.inside)], value.count),
)


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: [{"a": c}]])
def test_contexts_that_differ_between_calls_are_said(wrap: Any, limit: int) -> None:
    calls = [call(wrap(Counted(ones(2), n))) for n in (2, 3, 4)]
    observer = observe(lambda x: ones(1), *calls, store_n_calls=limit)
    assert len(observer.info.calls) + len(observer.info.shape_calls) == max(limit, 2)
    with pytest.warns(ObserverWarning, match="a Counted whose pytree context differs .*.2 in call 0, 3 in"):
        observer.infer_dynamic_shapes()


@pytest.mark.parametrize("same", [7, None, "text", ("a", 1)])
def test_contexts_that_are_equal_are_not_said(same: Any) -> None:
    calls = [call(Counted(ones(n), same), {"a": ones(n), "b": 1}, None) for n in (2, 3)]
    calls.append(call(Counted(ones(4), same), {"b": 1, "a": ones(4)}, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer = observe(lambda x, y, z: x.inside, *calls)
        assert observer.infer_dynamic_shapes()[0] == [{0: DYNAMIC}]


def _named_like_a_position(a: Any, /, **kwargs: Any) -> Any:
    return a - 2 * kwargs["a"] + kwargs.get("a_by_name", 0)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_keyword_named_like_a_positional_only_argument_is_another_argument(limit: int) -> None:
    model = module(_named_like_a_position)
    observer = observe(model, *(call(ones(1, 3), a=ones(n, 3)) for n in (2, 4, 5)), store_n_calls=limit)
    assert observer.infer_dynamic_shapes() == {"a": {}, "kwargs": {"a": {0: DYNAMIC}}}
    if limit:
        args, kwargs = observer.infer_arguments(as_args_kwargs=True)
        assert (args[0].shape, kwargs["a"].shape) == ((1, 3), (2, 3))
        assert torch.equal(model(*args, **kwargs), ones(2, 3, value=-1))
        candidate = observer.info.inputs[0]
        assert (candidate.args[0].shape, candidate.kwargs["a"].shape) == ((1, 3), (2, 3))


def test_no_two_keywords_share_a_name() -> None:
    model = module(_named_like_a_position)
    calls = [call(ones(n), a=ones(n, value=5), a_by_name=ones(n, value=9)) for n in (2, 3)]
    observer = observe(model, *calls)
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert torch.equal(model(*args, **kwargs), ones(2, value=1 - 2 * 5 + 9))


@pytest.mark.parametrize("limit", [1, 3])
def test_a_keyword_named_like_an_item_of_star_args_is_another_argument(limit: int) -> None:
    model = module(lambda x, *args, **kwargs: x + args[0] * kwargs["args_0"])
    calls = [call(ones(1), ones(1, value=3), args_0=ones(n)) for n in (2, 4, 5)]
    observer = observe(model, *calls, store_n_calls=limit)
    assert observer.infer_dynamic_shapes() == {"x": {}, "args": ({},), "kwargs": {"args_0": {0: DYNAMIC}}}
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert torch.equal(model(*args, **kwargs), ones(2, value=4))


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_keyword_with_a_dot_is_no_path(limit: int) -> None:
    model = module(lambda **kwargs: kwargs["a.b"].sum() - kwargs["a"]["b"].sum())
    calls = [call(**{"a": {"b": ones(2)}, "a.b": ones(n)}) for n in (5, 6, 7)]
    observer = observe(model, *calls, store_n_calls=limit)
    assert observer.infer_dynamic_shapes() == {"kwargs": {"a": {"b": {}}, "a.b": {0: DYNAMIC}}}
    if limit:
        assert model(**observer.infer_arguments()) == 3
        given = {"a": {"b": ones(2)}, "a.b": ones(8)}
        assert model(**observer.infer_arguments(given)) == 6
        assert observer.infer_dynamic_shapes(set_batch_dimension_for={"a.b"})["kwargs"]["a"] == {"b": {}}
        assert list(observer.info.inputs[0].kwargs) == ["a", "a.b"]
        assert observer.remove_inputs(["a.b"]) == 1
        assert list(observer.infer_arguments()) == ["a"]


@pytest.mark.parametrize("name", ["", "1", "a\\", "a\\.b", "x y"])
def test_any_text_is_a_name_of_a_keyword(name: str) -> None:
    model = module(lambda **kwargs: kwargs[name])
    observer = observe(model, call(**{name: ones(2)}), call(**{name: ones(3)}))
    assert observer.infer_dynamic_shapes() == {"kwargs": {name: {0: DYNAMIC}}}
    assert list(observer.infer_arguments()) == [name]


# Modules of TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("script", [True, False])
def test_scripted_and_traced_modules_are_observed(script: bool) -> None:
    inner = torch.nn.Linear(3, 3)
    made = torch.jit.script(inner) if script else torch.jit.trace(inner, ones(2, 3))
    observer = InputObserver()
    with observer(made):
        made(ones(2, 3))
        made(input=ones(4, 3))
    assert observer.infer_dynamic_shapes() == {"input": {0: DYNAMIC}}
    assert torch.equal(observer.info.flat_outputs[1][0], inner(ones(4, 3)))
    assert type(made.forward) is torch.ScriptMethod


def test_a_method_without_a_signature_is_refused_with_what_to_do() -> None:
    model = Double()
    model.forward = torch.neg  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"signature of .*neg.* cannot be read.*observe a module"):
        InputObserver()(model).__enter__()


def test_a_spec_whose_contexts_differ_says_so_at_observe(tmp_path: Path) -> None:
    model = """
        from torch.utils import _pytree

        class State:
            def __init__(self, x, count):
                self.x, self.count = x, count

        _pytree.register_pytree_node(
            State, lambda s: ([s.x], s.count), lambda children, count: State(next(iter(children)), count),
            serialized_type_name="hard_cases_capture.State",
            flatten_with_keys_fn=lambda s: ([(_pytree.GetAttrKey("x"), s.x)], s.count),
        )

        class Net(nn.Module):
            def forward(self, state):
                return state.x * 2

        def calls():
            return [((State(torch.ones(n, 3), n),), {}) for n in (2, 3)]
        """
    with pytest.warns(ObserverWarning, match=r"net\.yaml: argument state is a State whose"):
        verdict(tmp_path, model, 'calls: "net.py:calls"\n')
