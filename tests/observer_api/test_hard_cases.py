"""What a careful reading of the observer found wrong, one test each."""

from __future__ import annotations

import collections
import copy
import dataclasses
import textwrap
import warnings
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

from .helpers import DYNAMIC, call, module, observe

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")


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


torch.export.register_dataclass(Box, serialized_type_name="hard_cases.Box")
torch.export.register_dataclass(State, serialized_type_name="hard_cases.State")


class Plain:
    """An argument that is no pytree node."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value))


def replayed(observer: InputObserver, model: torch.nn.Module, index: int = 0) -> Any:
    args, kwargs = observer.infer_arguments(index, as_args_kwargs=True)
    return model(*args, **kwargs)


# The user's own calls


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


def test_a_name_that_no_call_has_is_no_batch() -> None:
    observer = observe(lambda x: x + 1, call(ones(2, 3)))
    with pytest.raises(ValueError, match="X"):
        observer.infer_dynamic_shapes(set_batch_dimension_for={"X"})


def test_a_name_that_no_call_has_takes_no_labels() -> None:
    observer = observe(lambda x: x + 1, call(ones(2, 3)), call(ones(3, 3)))
    with pytest.raises(ValueError, match="X"):
        observer.infer_dynamic_shapes(dim_names={"X": {0: "batch"}})


def test_a_string_is_one_name_of_a_batch() -> None:
    observer = observe(lambda x, xy: x + xy, call(ones(2), ones(2)))
    assert observer.infer_dynamic_shapes(set_batch_dimension_for="xy") == ({}, {0: DYNAMIC})


# Records


def test_a_cache_among_the_outputs_has_its_tensors_in_flat_outputs() -> None:
    cache = make_dynamic_cache([(ones(2, 2, 3, 4), ones(2, 2, 3, 4))])
    observer = observe(lambda cache: cache, call(cache))
    assert [tensor.shape for tensor in observer.info.flat_outputs[0]] == [(2, 2, 3, 4)] * 2


@pytest.mark.parametrize("store", ["device", "cpu", "disk"])
def test_sparse_arguments_are_recorded(store: Any) -> None:
    observer = observe(lambda x: x + x, call(torch.eye(3).to_sparse()), store=store)
    assert observer.num_obs() == 1


def test_conjugate_outputs_are_kept_on_disk() -> None:
    value = torch.randn(3, 4, dtype=torch.complex64)
    observer = observe(lambda x: x.conj(), call(value), store="disk")
    assert observer.num_obs() == 1
    assert torch.equal(observer.info.calls[0].outputs, value.conj())


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


def test_the_number_of_a_call_that_was_not_recorded_is_said() -> None:
    observer = observe(lambda x: x + 1, call(ones(2)))
    with pytest.raises(IndexError, match="of 1 recorded call"):
        observer.infer_arguments(7)


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
