"""Caches as leaves: round trips, contexts, copies, registration, export."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pytest_exportcheck.observe import InputObserver
from pytest_exportcheck.pytrees import (
    FlatteningWarning,
    clone_tree,
    flatten_with_paths,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)
from pytest_exportcheck.pytrees.caches import context_from_json, context_to_json, flatten_cache_with_keys
from pytest_exportcheck.pytrees.registration import registration_owner, without_our_flattening


@pytest.fixture(autouse=True)
def flattening() -> Iterator[None]:
    with register_flattening_functions():
        yield


def kv(length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 1, length, 4), torch.randn(batch, 1, length, 4)


def dynamic(length: int = 3, layers: int = 2) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(*kv(length), layer)
    return cache


def mixed(length: int = 3, window: int = 12) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=window)]
    for layer in cache.layers:
        layer.update(*kv(length))
    return cache


def static(length: int = 3) -> StaticCache:
    config = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    cache = StaticCache(config=config, max_cache_len=8)
    for layer in range(2):
        cache.update(*kv(length), layer, cache_kwargs={"cache_position": torch.arange(length)})
    return cache


def encoder_decoder(length: int = 3) -> EncoderDecoderCache:
    return EncoderDecoderCache(dynamic(length), dynamic(5))


def _recurrent(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return model.eval()(torch.arange(8).reshape(2, 4), use_cache=True)["cache"]


@pytest.fixture(scope="module")
def mamba() -> Any:
    return _recurrent(
        MambaForCausalLM(MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1, vocab_size=32))
    )


@pytest.fixture(scope="module")
def lfm2_model() -> Any:
    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, layer_types=["conv", "full_attention"],
        max_position_embeddings=64,
    )  # fmt: skip
    return Lfm2ForCausalLM(config).eval()


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Any:
    if request.param == "mamba":
        return request.getfixturevalue("mamba")
    if request.param == "lfm2":
        return _recurrent(request.getfixturevalue("lfm2_model"))
    return request.param()


ALL = [dynamic, mixed, static, encoder_decoder, DynamicCache, "mamba", "lfm2"]


def state(value: Any) -> Any:
    """Everything in a cache as plain text and tensors."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return {key: state(item) for key, item in value.items()}
    if isinstance(value, list):
        return [state(item) for item in value]
    if (
        hasattr(value, "layers")
        or hasattr(value, "keys")
        or type(value).__module__.startswith("transformers")
    ):
        return (
            {"class": type(value), **{key: state(item) for key, item in vars(value).items()}}
            if hasattr(value, "__dict__")
            else value
        )
    return value


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    else:
        assert first == second


# leaves and names


def test_a_dynamic_cache_is_keys_and_values_layer_by_layer() -> None:
    cache = dynamic()
    leaves, _ = _pytree.tree_flatten(cache)
    expected = [cache.layers[0].keys, cache.layers[0].values, cache.layers[1].keys, cache.layers[1].values]
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    pairs, _ = flatten_cache_with_keys(cache)
    assert [key.key for key, _ in pairs] == ["key_0", "value_0", "key_1", "value_1"]
    assert [key.path for key, _ in pairs][::2] == ["layers.0.keys", "layers.1.keys"]


def test_an_empty_cache_has_no_leaf() -> None:
    assert _pytree.tree_leaves(DynamicCache()) == []
    lazy = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    assert len(lazy.layers) == 2
    assert _pytree.tree_leaves(lazy) == []


def test_layers_of_several_classes_carry_a_letter() -> None:
    pairs, _ = flatten_cache_with_keys(mixed())
    assert [key.key for key, _ in pairs][:2] == ["key_D_0", "value_D_0"]
    assert [key.key for key, _ in pairs][2:4] == ["key_W_1", "value_W_1"]


def test_encoder_decoder_caches_are_two_children() -> None:
    paths = [path for path, _ in flatten_with_paths(encoder_decoder(), "cache")]
    assert paths[0] == "cache.self_attention_cache.layers.0.keys"
    assert paths[-1] == "cache.cross_attention_cache.layers.1.values"
    assert len(paths) == 8


def test_states_of_linear_attention(mamba: Any) -> None:
    paths = [path for path, _ in flatten_with_paths(mamba, "cache")]
    assert paths == ["cache.layers.0.conv_states.0", "cache.layers.0.recurrent_states.0"]


# round trips


@pytest.mark.parametrize("cache", ALL, indirect=True)
def test_flattening_round_trips(cache: Any) -> None:
    leaves, spec = _pytree.tree_flatten(cache)
    again = _pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(cache)
    leaves_again, spec_again = _pytree.tree_flatten(again)
    assert spec_again == spec
    assert all(a is b for a, b in zip(leaves, leaves_again, strict=True))
    first, second = state(cache), state(again)
    for key in ("layers",) if "layers" in first else ():
        assert [layer.keys() for layer in first[key]] == [layer.keys() for layer in second[key]] or not leaves


@pytest.mark.parametrize("cache", ALL, indirect=True)
def test_a_clone_keeps_everything_and_shares_nothing(cache: Any) -> None:
    twin = clone_tree(cache)
    assert_same(state(cache), state(twin))
    for a, b in zip(_pytree.tree_leaves(cache), _pytree.tree_leaves(twin), strict=True):
        assert a.data_ptr() != b.data_ptr()
        b.zero_()
    if _pytree.tree_leaves(cache):
        assert any(bool(leaf.any()) for leaf in _pytree.tree_leaves(cache))


def test_a_clone_goes_on_where_the_original_is() -> None:
    cache = dynamic()
    twin = clone_tree(cache)
    twin.update(*kv(2), 0)
    assert (cache.get_seq_length(0), twin.get_seq_length(0)) == (3, 5)


def test_a_clone_keeps_the_window_and_the_counter_of_a_sliding_layer() -> None:
    cache = mixed(length=3, window=4)
    for _ in range(3):
        cache.layers[1].update(*kv(1))
    layer = cache.layers[1]
    twin = clone_tree(cache).layers[1]
    assert layer.cumulative_length > layer.keys.shape[-2]
    assert (twin.sliding_window, twin.cumulative_length) == (4, layer.cumulative_length)
    assert twin.keys.shape[-2] == 3


def test_a_rebuilt_sliding_layer_keeps_its_window_and_counts_what_it_holds() -> None:
    leaves, spec = _pytree.tree_flatten(mixed(length=3, window=12))
    layer = _pytree.tree_unflatten(leaves, spec).layers[1]
    assert layer.sliding_window == 12
    assert layer.cumulative_length == 3
    full_keys, _ = layer.update(*kv(1))
    assert full_keys.shape[-2] == 4


# contexts


@pytest.mark.parametrize("make", [dynamic, mixed, encoder_decoder, static])
def test_contexts_are_equal_across_lengths(make: Any) -> None:
    assert _pytree.tree_structure(make(3)) == _pytree.tree_structure(make(5))


def test_contexts_tell_windows_and_classes_apart() -> None:
    assert _pytree.tree_structure(mixed(3, 12)) != _pytree.tree_structure(mixed(3, 13))
    assert _pytree.tree_structure(dynamic(3)) != _pytree.tree_structure(mixed(3))
    assert _pytree.tree_structure(dynamic(3, 2)) != _pytree.tree_structure(dynamic(3, 3))


@pytest.mark.parametrize("cache", ALL, indirect=True)
def test_contexts_are_plain_json(cache: Any) -> None:
    _, context = _pytree.SUPPORTED_NODES[type(cache)].flatten_fn(cache)
    text = context_to_json(context)
    json.loads(text)
    assert context_from_json(text) == context


def test_a_tree_with_a_cache_can_be_written_down() -> None:
    spec = _pytree.tree_structure({"cache": mixed()})
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec


# registration


def is_registered() -> bool:
    return DynamicCache in _pytree.SUPPORTED_NODES


class TestRegistration:
    @pytest.fixture(autouse=True)
    def flattening(self) -> Iterator[None]:
        """Not inside a block."""
        yield
        assert registration_owner(DynamicCache) is None

    def test_blocks_nest_and_restore(self) -> None:
        assert registration_owner(DynamicCache) is None
        with register_flattening_functions() as same:
            assert same(3) == 3
            with register_flattening_functions():
                assert registration_owner(DynamicCache) == "pytest_exportcheck"
            assert registration_owner(DynamicCache) == "pytest_exportcheck"
        assert registration_owner(DynamicCache) is None

    def test_a_class_that_is_imported_inside_a_block_stays_until_it_ends(self) -> None:
        with register_flattening_functions():
            late = type("LateCache", (DynamicCache,), {})
            assert registration_owner(late) is None
            with register_flattening_functions():
                assert registration_owner(late) == "pytest_exportcheck"
            assert registration_owner(late) == "pytest_exportcheck"
            with register_flattening_functions():
                pass
            assert registration_owner(late) == "pytest_exportcheck"
        assert registration_owner(late) is None
        with register_flattening_functions():
            pass
        assert registration_owner(late) is None

    def test_an_error_restores_too(self) -> None:
        with pytest.raises(RuntimeError), register_flattening_functions():
            raise RuntimeError
        assert not is_registered()

    def test_nothing_of_transformers_on_request(self) -> None:
        with register_flattening_functions(patch_transformers=False):
            assert not is_registered()

    def test_no_trace_is_left_in_torch(self) -> None:
        before = (
            set(_pytree.SUPPORTED_NODES),
            set(_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE),
            len(_pytree._cxx_pytree_pending_imports),
        )
        for _ in range(2):
            with register_flattening_functions():
                pass
        after = (
            set(_pytree.SUPPORTED_NODES),
            set(_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE),
            len(_pytree._cxx_pytree_pending_imports),
        )
        assert after == before

    def test_a_foreign_registration_is_named_replaced_and_put_back(self) -> None:
        _pytree.register_pytree_node(
            DynamicCache,
            lambda cache: ([], None),
            lambda values, context: DynamicCache(),
            serialized_type_name="foreign.Cache",
        )
        try:
            node = _pytree.SUPPORTED_NODES[DynamicCache]
            block = register_flattening_functions()
            with pytest.warns(
                FlatteningWarning, match="DynamicCache was registered as a pytree node by 'foreign.Cache'"
            ):
                block.__enter__()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with register_flattening_functions():
                    assert len(_pytree.tree_leaves(dynamic())) == 4
            block.__exit__(None, None, None)
            assert _pytree.SUPPORTED_NODES[DynamicCache] is node
            assert registration_owner(DynamicCache) == "foreign.Cache"
            assert _pytree.tree_leaves(dynamic()) == []
            spec = _pytree.tree_structure(DynamicCache())
            assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec
        finally:
            _pytree._deregister_pytree_node(DynamicCache)

    def test_the_registration_of_transformers_itself_is_put_back(self) -> None:
        from transformers.integrations.executorch import register_dynamic_cache_export_support

        register_dynamic_cache_export_support()
        try:
            before = _pytree.tree_structure(dynamic())
            with pytest.warns(FlatteningWarning, match="DynamicCache"), register_flattening_functions():
                assert len(_pytree.tree_leaves(dynamic())) == 4
            assert _pytree.tree_structure(dynamic()) == before
            assert registration_owner(DynamicCache) not in (None, "pytest_exportcheck")
        finally:
            _pytree._deregister_pytree_node(DynamicCache)

    def test_a_warning_that_is_an_error_leaves_nothing_behind(self) -> None:
        _pytree.register_pytree_node(
            EncoderDecoderCache, lambda cache: ([], None), lambda values, context: None
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(FlatteningWarning):
                    register_flattening_functions().__enter__()
            assert not is_registered()
        finally:
            _pytree._deregister_pytree_node(EncoderDecoderCache)

    def test_a_foreign_registration_in_torch_fx_is_set_aside_too(self) -> None:
        """transformers registers there as well, and an ExportedProgram flattens its inputs by it."""
        from torch.fx import _pytree as fx_pytree

        entry = fx_pytree.SUPPORTED_NODES.get(DynamicCache, lambda cache, spec: [])
        fx_pytree.register_pytree_flatten_spec(DynamicCache, entry)
        try:
            with register_flattening_functions():
                assert DynamicCache not in fx_pytree.SUPPORTED_NODES
                assert DynamicCache not in fx_pytree.SUPPORTED_NODES_EXACT_MATCH
            assert fx_pytree.SUPPORTED_NODES[DynamicCache] is entry
            assert DynamicCache in fx_pytree.SUPPORTED_NODES_EXACT_MATCH
        finally:
            fx_pytree._deregister_pytree_flatten_spec(DynamicCache)

    def test_others_may_register_their_layout_for_a_while(self) -> None:
        def flatten(cache: Any) -> Any:
            return [cache.layers], None

        with without_our_flattening():
            assert not is_registered()
        with register_flattening_functions():
            with without_our_flattening():
                assert not is_registered()
                _pytree.register_pytree_node(DynamicCache, flatten, lambda values, context: values)
            assert registration_owner(DynamicCache) == "pytest_exportcheck"
            assert len(_pytree.tree_leaves(dynamic())) == 4
            with pytest.raises(RuntimeError), without_our_flattening():
                raise RuntimeError
            assert len(_pytree.tree_leaves(dynamic())) == 4

    def test_a_users_class(self) -> None:
        class Box:
            def __init__(self, value: Any) -> None:
                self.value = value

        def flatten(box: Any) -> Any:
            return [box.value], None

        def unflatten(values: Any, context: Any) -> Any:
            return Box(*values)

        def with_keys(box: Any) -> Any:
            return [(_pytree.MappingKey("value"), box.value)], None

        assert register_class_flattening(Box, flatten, unflatten, with_keys, lambda: Box(torch.ones(1)))
        assert not register_class_flattening(Box, flatten, unflatten, with_keys)
        assert [path for path, _ in flatten_with_paths(Box(torch.ones(1)), "x")] == ["x.value"]
        unregister_class_flattening(Box)
        unregister_class_flattening(Box)
        assert Box not in _pytree.SUPPORTED_NODES
        with pytest.raises(ValueError, match="flattening Box does not round trip: 1 leaf became 2"):
            register_class_flattening(
                Box,
                lambda box: (box.value, None),
                lambda values, context: Box([1, 2]),
                with_keys,
                lambda: Box([1]),
            )
        assert Box not in _pytree.SUPPORTED_NODES


# export


class Append(torch.nn.Module):
    """The cache is an input, written into, and an output."""

    def forward(self, x: Any, cache: Any) -> Any:
        keys, values = cache.update(x, x + 1, 0)
        return {"sum": keys.sum(2) + values.sum(2), "cache": cache}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [dynamic, lambda n: mixed(n, 12)], ids=["dynamic", "mixed"])
def test_a_cache_is_an_input_and_a_mutated_output_of_an_export(make: Any, strict: bool) -> None:
    hint = torch.export.Dim.DYNAMIC
    model = Append()
    shapes = {"x": {2: hint}, "cache": [{2: hint}] * 4}
    example = {"x": kv(2)[0], "cache": make(5)}
    program = torch.export.export(model, (), kwargs=clone_tree(example), dynamic_shapes=shapes, strict=strict)
    for seq, past in ((2, 5), (3, 7)):
        inputs = {"x": kv(seq)[0], "cache": make(past)}
        expected = flatten_with_paths(model(**clone_tree(inputs)))
        got = flatten_with_paths(program.module()(**clone_tree(inputs)))
        assert [path for path, _ in got] == [path for path, _ in expected]
        for (path, a), (_, b) in zip(expected, got, strict=True):
            assert torch.equal(a, b), path
        assert [leaf.shape[2] for path, leaf in got if path == "cache.layers.0.keys"] == [seq + past]


def test_generate_of_a_hybrid_model_is_recorded_and_replays(lfm2_model: Any) -> None:
    observer = InputObserver()
    with observer(lfm2_model, store_n_calls=4), torch.no_grad():
        lfm2_model.generate(torch.arange(10).reshape(2, 5), max_new_tokens=3, do_sample=False, pad_token_id=0)
    calls = observer.info.calls
    assert len(calls) == 3
    assert not any("layers" in path for path in calls[0].leaves())
    assert {path for path in calls[1].leaves() if "layers" in path} == {
        "cache.layers.0.conv_states.0",
        "cache.layers.1.keys",
        "cache.layers.1.values",
    }
    for call in calls:
        with torch.no_grad():
            again = lfm2_model(**clone_tree(call.arguments))
        for (path, a), (_, b) in zip(call.output_leaves(), flatten_with_paths(again), strict=True):
            assert torch.allclose(a, b, atol=1e-6), path
