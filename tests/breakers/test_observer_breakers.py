"""Faults of the observer, one test each; every one failed when it was written."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_exportcheck import ExportCheckError, InputObserver, load_spec, make_dynamic_cache
from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.observe import probe
from pytest_exportcheck.observe.observer import InferenceError
from pytest_exportcheck.pipeline import SpecRun, run_case

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")


DYNAMIC = torch.export.Dim.DYNAMIC


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def module(function: Callable[..., Any]) -> torch.nn.Module:
    made: torch.nn.Module = type("Net", (torch.nn.Module,), {"forward": staticmethod(function)})()
    return made


def observe(function: Any, *calls: Any, **options: Any) -> InputObserver:
    observer = InputObserver()
    model = function if isinstance(function, torch.nn.Module) else module(function)
    with observer(model, **{"store_n_calls": len(calls), **options}):
        for args, kwargs in calls:
            model(*args, **kwargs)
    return observer


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@dataclasses.dataclass
class Box:
    inside: torch.Tensor


@dataclasses.dataclass(frozen=True)
class State:
    layers: list[torch.Tensor]


torch.export.register_dataclass(Box, serialized_type_name="breakers.Box")
torch.export.register_dataclass(State, serialized_type_name="breakers.State")


class Plain:
    """An argument that is no pytree node."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: int) -> None:
        self.factor = factor


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value))


def replayed(observer: InputObserver, model: torch.nn.Module, index: int = 0) -> Any:
    args, kwargs = observer.infer_arguments(index, as_args_kwargs=True)
    return model(*args, **kwargs)


# The user's own calls


def test_a_copy_of_the_model_made_while_it_is_observed_has_its_own_weights() -> None:
    model = Scale()
    with InputObserver()(model):
        twin = copy.deepcopy(model)
        torch.nn.init.constant_(twin.weight, 5.0)
        inside = twin(ones(2))
    assert torch.equal(inside, ones(2, value=5.0))
    assert torch.equal(twin(ones(2)), ones(2, value=5.0))


def test_a_model_quantized_while_it_is_observed_is_quantized() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with warnings.catch_warnings(), InputObserver()(model):
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            model, {torch.nn.Linear}, dtype=torch.qint8
        )
    assert quantized(ones(1, 2)).grad_fn is None, "the original runs"


def test_an_observed_model_can_be_pickled() -> None:
    model = Scale()
    with InputObserver()(model):
        again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(ones(2)), ones(2))


def test_a_warning_of_the_observer_is_no_exception_in_the_users_call() -> None:
    model = module(lambda x: (part for part in [x]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as `-W error` and pytest's `filterwarnings = error` do
        with InputObserver()(model):
            assert torch.equal(next(model(ones(2))), ones(2))


def test_a_constant_object_with_a_number_of_layers_does_not_break_a_call_beyond_the_limit() -> None:
    model = module(lambda x, config: x * config.layers)
    with InputObserver()(model, store_n_calls=1):
        for layers in (0, 0, 4):
            model(ones(2), Plain(layers=layers))


def test_an_object_with_a_number_of_layers_is_a_constant() -> None:
    function = lambda x, config: x * config.layers  # noqa: E731
    observer = observe(function, call(ones(2), Plain(layers=4)), call(ones(3), Plain(layers=4)))
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC}, None)


def test_making_an_export_safe_example_leaves_the_state_of_the_model_alone() -> None:
    model = torch.nn.BatchNorm1d(3)
    observer = observe(model, call(torch.randn(1, 3, 4)), call(torch.randn(1, 3, 5)))
    before = copy.deepcopy(model.state_dict())
    arguments = observer.infer_arguments(export_safe=True, set_batch_dimension_for=True)
    assert arguments[0].shape[0] > 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Arguments that mean something else


def test_a_tensor_in_star_args_does_not_replace_a_parameter_of_the_same_name() -> None:
    model = module(lambda args_0, *args: args_0 - args[0])
    observer = observe(model, call(ones(2), ones(2, value=3)), call(ones(3), ones(3, value=3)))
    assert torch.equal(replayed(observer, model), ones(2, value=-2))


def test_a_keyword_does_not_replace_a_positional_only_argument_of_the_same_name() -> None:
    def function(x: Any, /, **kwargs: Any) -> Any:
        return x - kwargs["x"]

    model = module(function)
    observer = observe(model, call(ones(2), x=ones(2, value=3)), call(ones(3), x=ones(3, value=3)))
    assert torch.equal(replayed(observer, model), ones(2, value=-2))


def test_the_first_position_can_be_removed() -> None:
    def function(x: Any = None, y: Any = None) -> Any:
        return (0 if x is None else 2 * x) + (0 if y is None else 5 * y)

    model = module(function)
    observer = observe(model, call(ones(2), ones(2, value=3)), call(ones(3), ones(3, value=3)))
    observer.remove_inputs(["x"])
    arguments = observer.infer_arguments()
    given = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
    assert torch.equal(given, ones(2, value=15)), "y became x"


def test_a_call_that_leaves_an_argument_to_its_tensor_default_gets_the_default() -> None:
    default = torch.tensor([2.0])

    def function(x: Any, scale: Any = default) -> Any:
        return x * scale

    model = module(function)
    observer = observe(model, call(ones(2)), call(ones(3), scale=torch.tensor([7.0])))
    assert torch.equal(replayed(observer, model), ones(2, value=2))


def test_a_number_as_default_and_a_tensor_in_another_call_are_not_one_graph() -> None:
    def function(x: Any, scale: Any = 2.0) -> Any:
        return x * scale

    model = module(function)
    observer = observe(model, call(ones(2)), call(ones(3), scale=torch.tensor(3.0)))
    try:
        given = replayed(observer, model)
    except InferenceError:
        return  # as for a number that is passed
    assert torch.equal(given, ones(2, value=2))


def test_inputs_of_the_user_keep_their_constants() -> None:
    def function(x: Any, negative: bool = False) -> Any:
        return -x if negative else x

    model = module(function)
    observer = observe(model, call(ones(2), False), call(ones(3), False))
    args, kwargs = observer.infer_arguments((ones(4), True), as_args_kwargs=True)
    assert torch.equal(model(*args, **kwargs), ones(4, value=-1))


def test_inputs_of_the_user_are_not_dropped_because_no_call_had_them() -> None:
    def function(x: Any, mask: Any = None) -> Any:
        return x if mask is None else x * mask

    observer = observe(function, call(x=ones(2)), call(x=ones(3)))
    try:
        arguments = observer.infer_arguments({"x": ones(4), "mask": torch.zeros(4)})
    except (ValueError, RuntimeError):
        return
    assert "mask" in arguments


def test_an_unknown_name_among_the_inputs_of_the_user_is_said() -> None:
    def function(x: Any, **kwargs: Any) -> Any:
        return x + kwargs["y"]

    observer = observe(function, call(ones(2), y=ones(2)), call(ones(3), y=ones(3)))
    with pytest.raises((ValueError, InferenceError), match="Y"):
        observer.infer_arguments({"x": ones(4), "Y": ones(4)})


def test_a_call_that_leaves_an_argument_to_its_tuple_default_gets_the_default() -> None:
    def function(x: Any, dims: Any = (0, 1)) -> Any:
        return x.sum(dims) if dims else x

    model = module(function)
    observer = observe(model, call(ones(2, 3), dims=()), call(ones(3, 3)))
    try:
        given = replayed(observer, model, 1)
    except InferenceError:
        return
    assert torch.equal(given, torch.tensor(9.0))


def test_a_tuple_that_equals_the_default_is_no_other_constant() -> None:
    def function(x: Any, dims: Any = (0, 1)) -> Any:
        return x.sum(dims)

    observer = observe(function, call(x=ones(2, 3), dims=(0, 1)), call(x=ones(3, 3)))
    assert observer.infer_dynamic_shapes()["x"] == {0: DYNAMIC}


def test_minus_zero_is_not_the_default_zero() -> None:
    def function(x: Any, divisor: float = 0.0) -> Any:
        return x / divisor

    model = module(function)
    observer = observe(model, call(x=ones(2), divisor=-0.0), call(x=ones(3), divisor=-0.0))
    assert torch.equal(replayed(observer, model), ones(2, value=float("-inf")))


def test_a_flag_that_a_model_does_not_read_from_its_config_is_kept() -> None:
    class Wrapper(torch.nn.Module):
        config = SimpleNamespace(return_dict=True)

        def forward(self, x: Any, return_dict: Any = None) -> Any:
            return {"double": x * 2} if return_dict else x * 3

    model = Wrapper()
    observer = observe(model, call(ones(2), return_dict=True), call(ones(3), return_dict=True))
    assert isinstance(replayed(observer, model), dict)


def test_past_key_values_is_renamed_only_where_the_model_renames_it() -> None:
    def function(x: Any, cache: Any = None, **kwargs: Any) -> Any:
        return x + (0 if cache is None else 100 * cache) + kwargs.get("past_key_values", 0)

    model = module(function)
    observer = observe(model, call(ones(2), past_key_values=ones(2)))
    assert torch.equal(replayed(observer, model), ones(2, value=2))


def test_a_call_with_cache_and_past_key_values_is_recorded() -> None:
    def function(x: Any, cache: Any = None, **kwargs: Any) -> Any:
        return x + cache + kwargs["past_key_values"]

    assert observe(function, call(ones(2), ones(2), past_key_values=ones(2))).num_obs() == 1


# Shapes


def test_shapes_beyond_the_limit_count_inside_a_registered_class() -> None:
    function = lambda box: box.inside + 1  # noqa: E731
    observer = observe(function, *(call(Box(ones(2, n))) for n in (4, 5, 6)), store_n_calls=1)
    assert observer.infer_dynamic_shapes() == ([{1: DYNAMIC}],)


def test_shapes_beyond_the_limit_count_in_every_layer_of_a_cache() -> None:
    def cache(*lengths: int) -> Any:
        return make_dynamic_cache([(ones(2, 2, n, 4), ones(2, 2, n, 4)) for n in lengths])

    calls = [call(cache(5, 3)), call(cache(6, 3)), call(cache(6, 4))]
    observer = observe(lambda cache: cache.layers[1].keys + 1, *calls, store_n_calls=2)
    axes = [{2: DYNAMIC}] * 4
    assert observer.infer_dynamic_shapes() == (axes,)


def test_an_empty_cache_beyond_the_limit_counts() -> None:
    def cache(*lengths: int) -> Any:
        return make_dynamic_cache([(ones(2, 2, n, 4), ones(2, 2, n, 4)) for n in lengths])

    calls = [call(ones(2), cache(5)), call(ones(2), cache())]
    within, beyond = (observe(lambda x, cache: x, *calls, store_n_calls=n) for n in (2, 1))
    assert beyond.infer_dynamic_shapes() == within.infer_dynamic_shapes() == ({}, [{2: DYNAMIC}] * 2)


def test_a_misfit_beyond_the_limit_does_not_take_the_others_with_it() -> None:
    calls = [call(ones(2, 4)), call(ones(2, 5)), call(ones(2, 6), k=2)]
    observer = observe(lambda x, k=1: x * k, *calls, store_n_calls=1)
    # The warning says that "a call was left out".
    assert observer.infer_dynamic_shapes()[0] == {1: DYNAMIC}


def test_a_keyword_with_a_dot_is_no_part_of_another_argument() -> None:
    def function(x: Any, **kwargs: Any) -> Any:
        return x["b"] + kwargs["x.b"]

    observer = observe(function, *(call(x={"b": ones(2)}, **{"x.b": ones(n, 1)}) for n in (3, 4)))
    assert observer.infer_dynamic_shapes() == {"x": {"b": {}}, "kwargs": {"x.b": {0: DYNAMIC}}}


def test_a_name_that_no_call_has_is_no_batch() -> None:
    observer = observe(lambda x: x + 1, call(ones(2, 3)))
    with pytest.raises(ValueError, match="X"):
        observer.infer_dynamic_shapes(set_batch_dimension_for={"X"})


def test_a_name_that_no_call_has_takes_no_labels() -> None:
    observer = observe(lambda x: x + 1, call(ones(2, 3)), call(ones(3, 3)))
    with pytest.raises(ValueError, match="X"):
        observer.infer_dynamic_shapes(dim_names={"X": {0: "batch"}})


def test_a_negative_axis_takes_its_label() -> None:
    observer = observe(lambda x: x + 1, call(ones(2, 3)), call(ones(3, 3)))
    assert observer.infer_dynamic_shapes(dim_names={"x": {-2: "batch"}}) == ({0: "batch"},)


def test_a_negative_position_is_said() -> None:
    observer = observe(lambda x: x + 1, call(ones(2, 3)))
    with pytest.raises(ValueError, match="position"):
        observer.infer_dynamic_shapes(set_batch_dimension_for={-1})


def test_a_string_is_one_name_of_a_batch() -> None:
    observer = observe(lambda x, xy: x + xy, call(ones(2), ones(2)))
    assert observer.infer_dynamic_shapes(set_batch_dimension_for="xy") == ({}, {0: DYNAMIC})


def test_labels_made_of_paths_differ_for_different_tensors() -> None:
    calls = [call({"x": ones(n)}, {"b": {"x": ones(n + 1)}}) for n in (2, 4)]
    observer = observe(lambda a_b, a: a_b["x"], *calls)
    first, second = observer.infer_dynamic_shapes(dim_names={0: {5: "none"}})
    assert first["x"][0] != second["b"]["x"][0], "torch.onnx.export takes one label for one dimension"


def test_a_constant_among_positional_only_arguments_has_its_place_in_the_shapes() -> None:
    def function(x: Any, k: int = 3, y: Any = None, /, z: Any = None) -> Any:
        return x * k + y + z

    model = module(function)
    observer = observe(model, *(call(ones(n, 3), 3, ones(3), z=ones(3)) for n in (2, 3)))
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    torch.export.export(model, args, kwargs, dynamic_shapes=observer.infer_dynamic_shapes())


def test_sizes_in_tuples_under_integer_keys_need_backed_size_oblivious() -> None:
    observer = observe(lambda d: d[0][0] + 1, call({0: (ones(1, 3),)}), call({0: (ones(3, 3),)}))
    assert observer.needs_backed_size_oblivious(observer.infer_dynamic_shapes())


def test_an_empty_dict_is_no_tensor_for_backed_size_oblivious() -> None:
    observer = observe(lambda x, d, y: x + y, *(call(ones(n, 3), {}, ones(n, 3)) for n in (1, 3)))
    assert observer.needs_backed_size_oblivious(observer.infer_dynamic_shapes())


# Records


def test_a_cache_among_the_outputs_has_its_tensors_in_flat_outputs() -> None:
    cache = make_dynamic_cache([(ones(2, 2, 3, 4), ones(2, 2, 3, 4))])
    observer = observe(lambda cache: cache, call(cache))
    assert [tensor.shape for tensor in observer.info.flat_outputs[0]] == [(2, 2, 3, 4)] * 2


def test_the_outermost_call_of_a_recursion_is_the_first() -> None:
    class Recursive(torch.nn.Module):
        def forward(self, x: Any, depth: int = 0) -> Any:
            return x if depth == 2 else self.forward(x, depth + 1) + 1

    observer = observe(Recursive(), call(ones(2)), store_n_calls=1)
    assert [recorded.number for recorded in observer.info.calls] == [0]


def test_a_call_inside_two_blocks_of_one_observer_is_one_call() -> None:
    model, observer = Scale(), InputObserver()
    with observer(model), observer(model):
        model(ones(2))
    assert observer.num_obs() == 1


@pytest.mark.parametrize("store", ["device", "cpu", "disk"])
def test_sparse_arguments_are_recorded(store: Any) -> None:
    observer = observe(lambda x: x + x, call(torch.eye(3).to_sparse()), store=store)
    assert observer.num_obs() == 1


def test_conjugate_outputs_are_kept_on_disk() -> None:
    value = torch.randn(3, 4, dtype=torch.complex64)
    observer = observe(lambda x: x.conj(), call(value), store="disk")
    assert observer.num_obs() == 1
    assert torch.equal(observer.info.calls[0].outputs, value.conj())


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_per_tensor_quantized_arguments_are_kept_elsewhere(store: Any) -> None:
    value = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    observer = observe(lambda x: x.dequantize(), call(value), store=store)
    assert observer.num_obs() == 1


def test_a_subclass_of_tensor_stays_one_on_disk() -> None:
    class Mine(torch.Tensor):
        pass

    observer = observe(lambda x: x + 1, call(ones(2).as_subclass(Mine)), store="disk")
    assert type(observer.info.calls[0].arguments["x"]) is Mine


def test_a_frozen_registered_class_with_layers_is_recorded() -> None:
    function = lambda state: state.layers[0] + 1  # noqa: E731
    observer = observe(function, call(State([ones(2)])), call(State([ones(3)])))
    assert observer.num_obs() == 2


def test_a_registered_class_with_layers_is_no_cache() -> None:
    @dataclasses.dataclass
    class Layers:
        layers: list[torch.Tensor]

    torch.export.register_dataclass(Layers)
    calls = [call(Layers([ones(2)])), call(Layers([ones(3), ones(3)]))]
    observer = observe(lambda state: state.layers[0] + 1, *calls)
    with pytest.raises(InferenceError, match="structure"):  # as for a plain list
        observer.infer_dynamic_shapes()


def test_an_output_of_a_class_that_is_no_node_does_not_lose_a_call_with_gradients() -> None:
    inner = torch.nn.Linear(2, 2)
    assert observe(lambda x: Plain(logits=inner(x)), call(ones(1, 2))).num_obs() == 1


def test_a_call_under_vmap_is_no_observation_or_one_that_can_be_used() -> None:
    model = Scale()
    observer = InputObserver()
    with observer(model):
        torch.vmap(model)(ones(2, 3))
        model(ones(4))
    observer.infer_arguments()


def test_a_stand_in_shares_no_memory_with_the_users_tensor() -> None:
    stand_in = torch.zeros(0, 3)
    observer = InputObserver({"y": stand_in})
    model = module(lambda x, y=None: x)
    with observer(model):
        model(ones(2))
        model(ones(3), y=ones(4, 3))
    stand_in.resize_(2, 2)
    assert observer.infer_dynamic_shapes()["y"] == {0: DYNAMIC}


# Memory and time


def test_calls_that_cannot_be_recorded_are_not_copied_for_ever() -> None:
    copies = 0

    class Whole:
        def __deepcopy__(self, memo: Any) -> Any:
            nonlocal copies
            copies += 1
            raise TypeError("cannot be copied")

    observe(lambda x, held: x, *[call(ones(2), Whole())] * 100, store_n_calls=2)
    assert copies < 50


def test_shapes_beyond_the_limit_hold_no_values_of_objects() -> None:
    calls = [call(ones(*shape), Plain(big=ones(1000))) for shape in ((2, 2), (3, 2), (3, 3))]
    observer = observe(lambda x, held: x, *calls, store_n_calls=1)
    held = [recorded.shapes().arguments["held"] for recorded in observer.info.shape_calls]
    sizes = [item.big.untyped_storage().nbytes() for item in held if hasattr(item, "big")]
    assert len(observer.info.shape_calls) == 2
    assert not sizes


def test_the_work_of_a_call_with_news_is_not_cubic_in_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = collections.Counter[int]()
    original = probe._is_sum
    for images in (10, 20):

        def is_sum(*rows: Any, images: int = images) -> bool:
            counted[images] += 1
            return original(*rows)

        monkeypatch.setattr(probe, "_is_sum", is_sum)
        model = module(lambda xs: xs[0])
        with InputObserver()(model, store_n_calls=1):
            for begin in (5, 7000):
                model([ones(begin + 3**k % 101 + 37 * k, 2 + begin + 11 * k) for k in range(images)])
    assert counted[20] <= 5 * counted[10], counted  # 2.9 s in the user's call for 80 images


# Errors


def test_differing_mappings_that_are_no_nodes_are_named() -> None:
    calls = [call(ones(2), collections.UserDict(a=ones(n))) for n in (3, 4)]
    with pytest.raises(InferenceError, match="batch"):
        observe(lambda x, batch: x, *calls).infer_dynamic_shapes()


def test_equal_mappings_that_are_no_nodes_are_one_constant() -> None:
    calls = [call(ones(n), collections.UserDict(a=ones(3))) for n in (3, 4)]
    assert observe(lambda x, batch: x, *calls).infer_dynamic_shapes() == ({0: DYNAMIC}, None)


def test_equal_objects_with_slots_are_one_constant() -> None:
    calls = [call(ones(n), Slotted(3)) for n in (3, 4)]
    assert observe(lambda x, held: x, *calls).infer_dynamic_shapes() == ({0: DYNAMIC}, None)


def test_one_generator_in_two_calls_is_one_constant() -> None:
    generator = torch.Generator()
    function = lambda x, generator: x + torch.rand(x.shape, generator=generator)  # noqa: E731
    calls = [call(ones(n), generator) for n in (3, 4)]
    assert observe(function, *calls).infer_dynamic_shapes() == ({0: DYNAMIC}, None)


def test_the_number_of_a_call_that_was_not_recorded_is_said() -> None:
    observer = observe(lambda x: x + 1, call(ones(2)))
    with pytest.raises(IndexError, match="1 call"):
        observer.infer_arguments(7)


def test_a_traced_module_is_observed() -> None:
    # A scripted one is; a traced one has no signature that `inspect` can tell.
    traced = torch.jit.trace(Scale(), ones(2))  # type: ignore[no-untyped-call]
    observer = InputObserver()
    with observer(traced):
        traced(ones(2))
    assert observer.num_obs() == 1


def test_a_method_that_calls_do_not_reach_is_said() -> None:
    model = Scale()
    with pytest.warns(UserWarning, match="__call__"), InputObserver()(model, method_name="__call__"):
        model(ones(2))


def test_hooks_around_the_observed_method_are_said() -> None:
    # The recorded x is the doubled one; an exported program doubles it again.
    model = Scale()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observe(model, call(ones(2)), call(ones(3))).infer_arguments()
    assert any("hook" in str(warning.message) for warning in caught)


# Specs: what these faults make of a verdict


def verdict(folder: Path, model: str, observed: str) -> str:
    """``pass``, or the stage that failed, with torch-export."""
    source = "import dataclasses\nimport torch\nfrom torch import nn\n" + textwrap.dedent(model)
    (folder / "net.py").write_text(source + "\ndef build_model():\n    return Net()\n", encoding="utf-8")
    spec = folder / "net.yaml"
    spec.write_text(
        'exportcheck: 1\nmodel: {factory: "net.py:build_model"}\nobserve:\n'
        + textwrap.indent(textwrap.dedent(observed), "  "),
        encoding="utf-8",
    )
    run = SpecRun(load_spec(spec, folder))
    case = CaseId(run.spec.relative, "torch-export", "none", "cpu", "float32", None)
    try:
        run_case(run, case, lambda stage: None, {})
    except ExportCheckError as error:
        return f"{error.stage}: {error}"
    return "pass"


def test_shapes_beyond_the_limit_of_a_spec_count_inside_a_registered_class(tmp_path: Path) -> None:
    model = """
        @dataclasses.dataclass
        class Held:
            x: torch.Tensor

        torch.export.register_dataclass(Held, serialized_type_name="breakers.Held")

        class Net(nn.Module):
            def forward(self, held):
                return held.x * 2 if held.x.shape[0] < 4 else held.x * 3

        def calls():
            return [((Held(torch.ones(n, 3)),), {}) for n in (2, 2, 5)]
        """
    given = verdict(tmp_path, model, 'calls: "net.py:calls"\nstore_n_calls: 1\n')
    # The graph for 2 rows, and only that one, is exported: 5 rows get an error or the wrong numbers.
    assert given != "pass", "a program that cannot serve the third call passes"


def test_a_flag_that_a_model_does_not_read_from_its_config_is_no_randomness(tmp_path: Path) -> None:
    model = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.config = type("Config", (), {"return_dict": True})()

            def forward(self, x, return_dict=None):
                return x * 2 if return_dict else x * 3
        """
    observed = """
        dims: [b]
        calls:
          - {forward: {x: "float32[b, 3]"}, dims: {b: 2}}
          - {forward: {x: "float32[b, 3]"}, dims: {b: 3}}
          - {forward: {x: "float32[b, 3]", return_dict: true}, dims: {b: 4}}
        ignore_calls: [2]
        """
    assert verdict(tmp_path, model, observed) == "pass"
    observed = observed.replace("ignore_calls: [2]", "graphs: one")
    assert "return_dict" in verdict(tmp_path, model, observed), "two values of a constant"


def test_an_empty_tuple_in_one_call_and_another_default_are_two_graphs(tmp_path: Path) -> None:
    model = """
        class Net(nn.Module):
            def forward(self, x, dims=(1,)):
                return x.sum(dims) if dims else x
        """
    observed = """
        dims: [b]
        calls:
          - {forward: {x: "float32[b, 3]"}, dims: {b: 2}}
          - {forward: {x: "float32[b, 3]", dims: []}, dims: {b: 3}}
        """
    given = verdict(tmp_path, model, observed)
    assert given.startswith("observe"), "the exporter is blamed"
    assert "dims" in given


def test_a_list_that_equals_the_default_is_no_other_constant_in_a_spec(tmp_path: Path) -> None:
    model = """
        class Net(nn.Module):
            def forward(self, x, dims=[1]):
                return x.sum(dims)
        """
    observed = """
        dims: [b]
        calls:
          - {forward: {x: "float32[b, 3]"}, dims: {b: 2}}
          - {forward: {x: "float32[b, 3]", dims: [1]}, dims: {b: 3}}
        """
    assert verdict(tmp_path, model, observed) == "pass"


def test_a_parameter_named_like_an_item_of_star_args_is_checked(tmp_path: Path) -> None:
    model = """
        class Net(nn.Module):
            def forward(self, args_0, *args):
                return args_0 - args[0]

        def calls():
            return [((torch.ones(n, 3), torch.ones(n, 3)), {}) for n in (2, 3)]
        """
    assert verdict(tmp_path, model, 'calls: "net.py:calls"\n') == "pass"
