"""Which calls are kept, around which modules, and what that costs."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from pytest_exportcheck import (
    InputObserver,
    ObserverWarning,
    make_dynamic_cache,
    register_flattening_functions,
)
from pytest_exportcheck.observe import infer_shapes

from .helpers import DYNAMIC as D
from .helpers import call, f, module, observe, shapes_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")


class Net(torch.nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return x * 2

    def notforward(self, z: Any) -> Any:
        return z + 1


# counters


def test_counters_and_outputs() -> None:
    net, observer = Net(), InputObserver()
    assert observer.is_empty()
    inputs = [f(2, n) for n in range(3, 7)]
    with observer(net):
        for x in inputs:
            net(x)
    assert not observer.is_empty()
    assert len(observer.info) == observer.num_obs() == len(observer.info.inputs) == 3
    for x, outputs in zip(inputs, observer.info.flat_outputs, strict=False):
        assert len(outputs) == 1
        assert torch.equal(outputs[0], net(x))
    assert observe(Net(), *(call(f(2, n)) for n in range(4)), store_n_calls=4).num_obs() == 4


def test_another_method() -> None:
    net, observer = Net(), InputObserver()
    with observer(net, method_name="notforward"):
        net.notforward(f(2, 3))
        net.notforward(f(2, 4))
    assert observer.infer_dynamic_shapes() == ({1: D},)
    with pytest.raises(ValueError, match="does not have a method"), InputObserver()(net, method_name="nope"):
        pass


# beyond the limit


def test_shapes_beyond_the_limit_count() -> None:
    calls = [call(f(2, 3)), call(f(2, 3)), call(f(2, 3)), call(f(2, 5)), call(f(2, 6), f(7))]
    observer = observe(Net(), *calls, store_n_calls=3)
    assert len(observer.info) == 3
    assert observer.infer_dynamic_shapes() == ({1: D}, {})
    assert shapes_of(observer.infer_arguments()) == ((2, 3), (7,))
    for shape_call in observer.info.shape_calls:
        for tensor in shape_call.arguments.values():
            assert tensor.untyped_storage().nbytes() == 4


def test_sizes_that_were_equal_by_chance_are_told_apart_by_a_call_beyond_the_limit() -> None:
    calls = [call(f(n, n, 3 * n)) for n in (2, 3, 4)]
    assert observe(Net(), *calls).infer_dynamic_shapes(dim_names=True) == (
        {0: "x_dim_0", 1: "x_dim_0", 2: "x_dim_2"},
    )
    calls += [call(f(n, n, 3 * n)) for n in range(5, 9)] + [call(f(2, 5, 6)), call(f(3, 7, 9))]
    observer = observe(Net(), *calls, store_n_calls=3)
    assert observer.infer_dynamic_shapes(dim_names=True) == ({0: "x_dim_0", 1: "x_dim_1", 2: "x_dim_2"},)
    assert len(observer.info.shape_calls) == 1


@pytest.mark.parametrize(("last", "expected"), [(9, "past + seq"), (8, "length")])
def test_a_sum_that_a_call_beyond_the_limit_breaks_is_no_relation(last: int, expected: str) -> None:
    def cached(past: int, seq: int, total: int) -> Any:
        cache = make_dynamic_cache([(f(2, 2, past, 4), f(2, 2, past, 4))])
        return call(input_ids=f(2, seq), attention_mask=f(2, total), cache=cache)

    net, observer = module(lambda input_ids, attention_mask, cache: 0), InputObserver()
    with observer(net, store_n_calls=3):
        for args, kwargs in (cached(4, 3, 7), cached(7, 1, 8), cached(8, 2, 10), cached(6, 5, 11)):
            net(*args, **kwargs)
        assert not observer.info.shape_calls
        args, kwargs = cached(7, 2, last)
        net(*args, **kwargs)
    with register_flattening_functions():
        shapes = infer_shapes([*observer.info.calls, *(c.edited(index=3) for c in observer.info.shape_calls)])
    assert str(shapes.leaves["attention_mask"]) == f"float32[2, {expected}]"


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("keep", ["first", "informative"])
def test_the_batch_of_a_later_generate_is_seen_in_the_cache_too(limit: int, keep: Any) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model, observer = LlamaForCausalLM(config).eval(), InputObserver()
    with torch.no_grad(), observer(model, store_n_calls=limit, keep=keep):
        # Every generate begins with layers that hold nothing.
        for batch in (2, 2, 3):
            model.generate(torch.ones(batch, 5, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObserverWarning)
        shapes = observer.infer_dynamic_shapes()
    assert shapes["cache"] == [{0: D, 2: D}] * 4
    assert shapes["input_ids"] == {0: D, 1: D}


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_states_of_linear_attention_are_looked_at_beyond_the_limit(limit: int) -> None:
    config = MambaConfig(hidden_size=8, num_hidden_layers=2, vocab_size=16, state_size=4, eos_token_id=None)
    model, observer = MambaForCausalLM(config).eval(), InputObserver()
    with torch.no_grad(), observer(model, store_n_calls=limit):
        for batch in (2, 2, 3):
            model.generate(torch.ones(batch, 5, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    shapes = observer.infer_dynamic_shapes()
    (name,) = (name for name in shapes if "cache" in name)
    assert all(
        0 in leaf for leaf in torch.utils._pytree.tree_leaves(shapes[name], lambda x: isinstance(x, dict))
    )


def test_shapes_only() -> None:
    observer = observe(Net(), *(call(f(2, n, 1000)) for n in range(50)), store_n_calls=0)
    assert observer.infer_dynamic_shapes() == ({1: D},)
    assert (observer.num_obs(), len(observer.info.shape_calls)) == (0, 2)
    for wants_values in (observer.infer_arguments, lambda: observer.check_discrepancies(b"")):
        with pytest.raises(RuntimeError, match="No inputs were captured"):
            wants_values()


def test_repeats_beyond_the_limit_leave_nothing() -> None:
    observer = observe(Net(), *(call(f(2, 3 + n % 2)) for n in range(50)), store_n_calls=3)
    assert (len(observer.info), observer.info.seen, len(observer.info.shape_calls)) == (3, 50, 0)


@pytest.mark.parametrize("value", [f(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), "text"])
def test_a_call_beyond_the_limit_that_does_not_fit_is_left_out_and_said(value: Any) -> None:
    net, observer = module(lambda x, y=None: 0), InputObserver()
    with observer(net, store_n_calls=2):
        net(f(2, 3))
        net(f(2, 4))
        net(value)
    with pytest.warns(ObserverWarning, match="a call beyond the limit does not fit the recorded ones"):
        assert observer.infer_dynamic_shapes() == ({1: D},)


def test_informative_calls_in_preference_to_repeats() -> None:
    calls = [call(f(2, 3)), call(f(2, 3)), call(f(2, 3)), call(f(2, 5)), call(f(2, 3)), call(f(4, 3), f(7))]
    observer = observe(Net(), *calls, store_n_calls=3, keep="informative")
    kept = [shapes_of(recorded.arguments) for recorded in observer.info.calls]
    assert kept == [{"x": (2, 3)}, {"x": (2, 5)}, {"x": (4, 3), "y": (7,)}]
    assert [recorded.index for recorded in observer.info.calls] == [0, 1, 2]
    assert [len(outputs) for outputs in observer.info.flat_outputs] == [1, 1, 1]
    first = observe(Net(), *calls, store_n_calls=3)
    assert [shapes_of(recorded.arguments) for recorded in first.info.calls] == [{"x": (2, 3)}] * 3


def test_a_call_with_a_new_value_of_a_constant_does_not_push_out_another() -> None:
    calls = [call(x=f(2, 3)), call(x=f(2, 4)), call(x=f(2, 4), y=2)]
    observer = observe(Net(), *calls, store_n_calls=2, keep="informative")
    assert [list(recorded.arguments) for recorded in observer.info.calls] == [["x"], ["x"]]
    with pytest.warns(ObserverWarning, match="argument y is a constant that differs"):
        observer.infer_dynamic_shapes()


def test_what_cannot_be_looked_at_does_not_disturb_the_call() -> None:
    class Odd(list):
        def __len__(self) -> int:
            raise RuntimeError("no length")

    class Shapeless:
        layers = property(lambda self: 1 / 0)

    for value in (Odd(), Shapeless()):
        net, observer = module(lambda x: 7), InputObserver()
        with observer(net, store_n_calls=1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net(f(2))
            assert net(value) == 7
            assert net(value) == 7


def decode(steps: int, limit: int, layers: int = 16) -> tuple[float, float, InputObserver]:
    """Seconds per call of a module that does nothing, bare and observed beyond the limit."""
    net = module(lambda input_ids, position_ids, cache, logits_to_keep=0: None)

    def inputs(n: int) -> dict[str, Any]:
        pair = (torch.zeros(1, 1, n, 2), torch.zeros(1, 1, n, 2))
        ids = torch.zeros(1, 1, dtype=torch.int64)
        cache = make_dynamic_cache([pair] * layers)
        return {"input_ids": ids, "position_ids": ids, "cache": cache, "logits_to_keep": 1}

    calls = [inputs(n) for n in range(1, 12)]

    def best(run: Any) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for step in range(steps):
                run(**calls[step % len(calls)])
            times.append(time.perf_counter() - begin)
        return min(times) / steps

    bare = best(net)
    observer = InputObserver()
    with observer(net, store_n_calls=limit):
        for given in calls:
            net(**given)
        observed = best(net)
    return bare, observed, observer


def test_a_call_beyond_the_limit_costs_microseconds() -> None:
    bare, observed, observer = decode(400, 3)
    assert len(observer.info.shape_calls) == 0
    # A few microseconds on a quiet machine.
    assert observed - bare < 100e-6


# which module


def test_a_compiled_module_is_observed_by_the_signature_of_the_module_inside() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager", dynamic=True)
    observer = InputObserver()
    with observer(compiled):
        compiled(x=f(2, 3))
        compiled(x=f(2, 4))
        assert torch.equal(compiled(x=torch.ones(2, 5)), torch.full((2, 5), 2.0))
    assert observer.infer_dynamic_shapes() == {"x": {1: D}}
    assert "forward" not in vars(net)


def test_a_module_compiled_in_place() -> None:
    net = Net()
    net.compile(backend="eager", dynamic=True)
    compiled, observer = net._compiled_call_impl, InputObserver()
    with observer(net):
        net(x=f(2, 3))
        net(x=f(2, 4))
    assert net._compiled_call_impl is compiled
    assert observer.infer_dynamic_shapes() == {"x": {1: D}}


def test_data_parallel() -> None:
    net, observer = Net(), InputObserver()
    outer = torch.nn.DataParallel(net)
    with observer(outer):
        outer(x=f(2, 3))
        outer(x=f(2, 4))
    assert observer.infer_dynamic_shapes() == {"x": {1: D}}
    assert "forward" not in vars(outer)
    with observer(net):
        net(x=f(3, 4))
    assert observer.num_obs() == 3


def test_calls_that_only_a_compiler_made_are_said() -> None:
    net, observer = Net(), InputObserver()
    compiled = torch.compile(net, backend="eager")
    with (
        pytest.warns(ObserverWarning, match="none was recorded.*observe the compiled module itself"),
        observer(net),
    ):
        compiled(f(2, 3))
    assert observer.is_empty()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("limit", [1, 3])
def test_an_export_inside_the_block_is_no_observation(strict: bool, limit: int) -> None:
    net, observer = Net(), InputObserver()
    with observer(net, store_n_calls=limit):
        net(f(2, 3))
        program = torch.export.export(net, (f(2, 9),), strict=strict)
    assert torch.equal(program.module()(torch.ones(2, 9)), torch.full((2, 9), 2.0))
    assert (observer.num_obs(), len(observer.info.shape_calls)) == (1, 0)


def test_a_compilation_of_the_whole_graph_inside_the_block_is_not_disturbed() -> None:
    net = Net()
    with InputObserver()(net):
        net(f(2, 3))
        assert torch.compile(net, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2, 2]


def test_the_old_name_of_the_cache_beyond_the_limit() -> None:
    def forward(input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...

    forward.__module__ = "transformers.models.tiny"
    net = module(forward)
    observer = InputObserver()
    with observer(net, store_n_calls=2):
        for n in range(1, 9):
            net(input_ids=f(1, 1), past_key_values=make_dynamic_cache([(f(1, 1, n, 2), f(1, 1, n, 2))]))
    assert len(observer.info.shape_calls) == 0
    assert observer.infer_dynamic_shapes() == {"input_ids": {}, "cache": [{2: D}] * 2}
