"""Caches made, taken apart, copied."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree
from transformers import DynamicCache, Lfm2Config, MambaConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

import pytest_exportcheck
from pytest_exportcheck import (
    CacheKeyValue,
    flatten_object,
    flatten_unflatten_for_dynamic_shapes,
    make_dynamic_cache,
    make_dynamic_shapes_kv_cache,
    make_encoder_decoder_cache,
    make_static_cache,
    max_diff,
    register_flattening_functions,
    replacement_before_exporting,
    string_type,
    torch_deepcopy,
)

Pair = namedtuple("Pair", "left right")


def kv(n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(4, 5, n, 7), torch.rand(4, 5, n, 7)


# made


def test_a_dynamic_cache_of_pairs_or_of_a_flat_list() -> None:
    pairs = [kv(), kv()]
    for given in (pairs, [t for pair in pairs for t in pair], [list(pair) for pair in pairs]):
        cache = make_dynamic_cache(given)
        assert isinstance(cache, DynamicCache)
        assert [layer.keys for layer in cache.layers] == [pairs[0][0], pairs[1][0]]
        assert all(type(layer) is DynamicLayer for layer in cache.layers)
        assert cache.get_seq_length() == 6
    assert len(make_dynamic_cache([]).layers) == 0
    with pytest.raises(ValueError, match="3 tensors cannot be paired"):
        make_dynamic_cache([*kv(), kv()[0]])
    cache = make_dynamic_cache(pairs)
    cache.update(*kv(2), 0)
    cache.update(*kv(2), 2)
    assert [layer.keys.shape[2] for layer in cache.layers] == [8, 6, 2]


def test_classes_and_arguments_of_layers() -> None:
    cache = make_dynamic_cache(
        [kv(), kv()],
        cls_layers=[DynamicLayer, DynamicSlidingWindowLayer],
        cls_kwargs=[{}, {"sliding_window": 12}],
    )
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicSlidingWindowLayer]
    assert cache.layers[1].sliding_window == 12
    assert cache.layers[1].cumulative_length == 6
    default = make_dynamic_cache([kv()], cls_layers="DynamicSlidingWindowLayer")
    assert default.layers[0].sliding_window == 6
    assert default.layers[0].keys.shape[2] == 6
    with pytest.raises(ValueError, match="2 layers, 1 classes"):
        make_dynamic_cache([kv(), kv()], cls_layers=[DynamicLayer])


def test_a_static_cache() -> None:
    pairs = [kv(), kv()]
    cache = make_static_cache(pairs, max_cache_len=15)
    assert isinstance(cache, StaticCache)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(4, 5, 15, 7)] * 2
    assert torch.equal(cache.layers[1].values[:, :, :6], pairs[1][1])
    assert int(cache.get_seq_length()) == 6
    assert make_static_cache(pairs).layers[0].keys.shape[2] == 6
    with pytest.raises(ValueError, match="less than the 6"):
        make_static_cache(pairs, max_cache_len=5)


def test_shapes_for_a_cache() -> None:
    shapes = make_dynamic_shapes_kv_cache(make_dynamic_cache([kv(), kv()]), {0: "batch"})
    assert shapes == [{0: "batch"}] * 4
    assert shapes[0] is not shapes[1]


def test_keys_and_values() -> None:
    pairs = [kv(), kv()]
    flat = [tensor for pair in pairs for tensor in pair]
    sliding = make_dynamic_cache(
        pairs, [DynamicLayer, DynamicSlidingWindowLayer], [{}, {"sliding_window": 12}]
    )
    for given in (make_dynamic_cache(pairs), flat, sliding, pairs):
        found = CacheKeyValue(given)
        assert found.key_cache is not None
        assert all(a is b for a, b in zip(found.key_cache, flat[::2], strict=True))
        assert all(a is b for a, b in zip(found.aslist(), flat, strict=True))
        assert (found.n_layers, len(found)) == (2, 4)
    assert CacheKeyValue(sliding).cls_layers == [DynamicLayer, DynamicSlidingWindowLayer]
    again = CacheKeyValue(sliding).make_dynamic_cache()
    assert string_type(again, with_shape=True) == string_type(sliding, with_shape=True)
    assert again.layers[1].sliding_window == 12
    empty = CacheKeyValue(None)
    assert (empty.key_cache, empty.value_cache, empty.n_layers, len(empty), empty.aslist()) == (
        None,
        None,
        0,
        0,
        [],
    )
    assert CacheKeyValue(make_static_cache(pairs)).n_layers == 2
    mamba = DynamicCache(config=MambaConfig(hidden_size=8, num_hidden_layers=2))
    assert len(CacheKeyValue(mamba)) == 0
    with pytest.raises(TypeError, match="two caches"):
        CacheKeyValue(make_encoder_decoder_cache(sliding, sliding))


# taken apart, every class of cache


def mixed() -> Any:
    return make_dynamic_cache(
        [kv(), kv()], [DynamicLayer, DynamicSlidingWindowLayer], [{}, {"sliding_window": 12}]
    )


def linear() -> Any:
    cache = DynamicCache(config=MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1))
    cache.layers[0].update_conv_state(torch.rand(2, 16, 4))
    cache.layers[0].update_recurrent_state(torch.rand(2, 16, 4))
    return cache


def hybrid() -> Any:
    config = Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    cache = DynamicCache(config=config)
    cache.layers[0].update_conv_state(torch.rand(4, 8, 3))
    cache.update(*kv(), 1)
    return cache


def both_kinds_in_one_layer() -> Any:
    from transformers import cache_utils

    layers: list[Any] = [
        cache_utils.LinearAttentionAndFullAttentionLayer(),
        cache_utils.LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=12),
    ]
    cache = DynamicCache()
    cache.layers = layers
    for index, layer in enumerate(layers):
        layer.update_conv_state(torch.rand(4, 8, 3))
        cache.update(*kv(3), index)
    return cache


def static_sliding() -> Any:
    from transformers import Gemma2Config

    config = Gemma2Config(num_hidden_layers=2, sliding_window=4)
    cache = StaticCache(config=config, max_cache_len=9)
    for index in range(2):
        cache.update(*kv(3), index)
    return cache


KINDS = {
    "dynamic": lambda: make_dynamic_cache([kv(), kv()]),
    "mixed": mixed,
    "static": lambda: make_static_cache([kv(), kv()], max_cache_len=9),
    "static sliding": static_sliding,
    "linear": linear,
    "hybrid": hybrid,
    "both": both_kinds_in_one_layer,
    "not filled": lambda: DynamicCache(config=MambaConfig(hidden_size=8, num_hidden_layers=2)),
    "empty": DynamicCache,
    "encoder-decoder": lambda: make_encoder_decoder_cache(mixed(), make_dynamic_cache([kv(3), kv(3)])),
}


@pytest.fixture(params=list(KINDS))
def cache(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def states(value: Any) -> Any:
    """Everything that a cache holds but its tensors."""
    if hasattr(value, "self_attention_cache"):
        return [states(value.self_attention_cache), states(value.cross_attention_cache), value.is_updated]
    return [
        (type(layer), {n: v for n, v in vars(layer).items() if not isinstance(v, (torch.Tensor, dict))})
        for layer in value.layers
    ]


def direct(cache: Any, what: str) -> Any:
    kind = "encoder_decoder" if hasattr(cache, "self_attention_cache") else "dynamic"
    kind = "static" if isinstance(cache, StaticCache) else kind
    return getattr(pytest_exportcheck, f"{what}_{kind}_cache")


def test_every_cache_goes_there_and_back(cache: Any) -> None:
    values, context = direct(cache, "flatten")(cache)
    assert isinstance(context, list)
    pairs, same = direct(cache, "flatten_with_keys")(cache)
    assert same == context
    assert [str(key.key) for key, _ in pairs] == context
    assert all(a is b for (_, a), b in zip(pairs, values, strict=True))
    again = direct(cache, "unflatten")(values, context)
    assert type(again) is type(cache)
    assert states(again) == states(cache)
    assert max_diff(cache, again)["abs"] == 0


def test_every_cache_can_be_copied_and_described(cache: Any) -> None:
    twin = torch_deepcopy([cache])[0]
    assert type(twin) is type(cache)
    assert states(twin) == states(cache)
    assert max_diff(cache, twin)["abs"] == 0
    assert string_type(twin, with_shape=True) == string_type(cache, with_shape=True)
    addresses = {tensor.data_ptr() for tensor in flatten_object(cache)}
    assert not addresses & {tensor.data_ptr() for tensor in flatten_object(twin)} - {0}
    with register_flattening_functions():
        assert len(_pytree.tree_leaves(cache)) == len(flatten_object(cache))


def test_contexts() -> None:
    assert pytest_exportcheck.flatten_dynamic_cache(KINDS["dynamic"]())[1] == [
        "key_0",
        "value_0",
        "key_1",
        "value_1",
    ]
    wide = mixed()
    wide.layers[1].sliding_window = 99
    for made in (mixed(), wide):
        context = pytest_exportcheck.flatten_dynamic_cache(made)[1]
        assert context == ["key_D_0", "value_D_0", "key_W_1", "value_W_1"]


def test_plain_names_as_context() -> None:
    tensors = [*kv(), *kv()]
    again = pytest_exportcheck.unflatten_dynamic_cache(
        tensors, ["key_D_0", "value_D_0", "key_W_1", "value_W_1"]
    )
    assert [type(layer) for layer in again.layers] == [DynamicLayer, DynamicSlidingWindowLayer]
    assert again.layers[1].sliding_window == 6
    static = pytest_exportcheck.unflatten_static_cache(tensors, ["key_0", "value_0", "key_1", "value_1"])
    assert [layer.keys.shape[2] for layer in static.layers] == [6, 6]
    both = pytest_exportcheck.unflatten_encoder_decoder_cache(
        [mixed(), mixed()], ["self_attention_cache", "cross_attention_cache"]
    )
    assert len(flatten_object(both)) == 8


def test_model_outputs() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(2), attentions=(torch.ones(3),))
    values, context = pytest_exportcheck.flatten_base_model_output(output)
    assert context == ["last_hidden_state", "attentions"]
    pairs, _ = pytest_exportcheck.flatten_with_keys_base_model_output(output)
    assert [key.key for key, _ in pairs] == context
    for names in (context, list(context)):
        assert pytest_exportcheck.unflatten_base_model_output(values, names) == output


# trees


@dataclasses.dataclass
class Settings:
    value: Any


class Opaque:
    pass


def test_copies() -> None:
    given = {
        "a": [torch.ones(2), None, 3, "s", 2.5], "b": (torch.ones(1).expand(4),), "c": np.ones(2),
        "d": BaseModelOutput(last_hidden_state=torch.ones(2)), "e": Settings(torch.ones(1)),
        "f": OrderedDict(x=torch.ones(2)), "g": Pair(torch.ones(2), 1), "h": {1, 2},
    }  # fmt: skip
    twin = torch_deepcopy(given)
    assert list(twin) == list(given)
    assert [type(twin[key]) for key in twin] == [type(given[key]) for key in given]
    twin["a"][0].fill_(9)
    twin["b"][0][0] = 9
    twin["c"][0] = 9
    twin["d"].last_hidden_state.fill_(9)
    twin["e"].value.fill_(9)
    twin["f"]["x"].fill_(9)
    assert max_diff({k: v for k, v in given.items() if k in "bcf"}, {
        "b": (torch.ones(4),), "c": np.ones(2), "f": {"x": torch.ones(2)},
    })["abs"] == 0  # fmt: skip
    assert given["d"].last_hidden_state.tolist() == given["a"][0].tolist() == [1, 1]
    assert torch_deepcopy(torch.ones(2, dtype=torch.float16)).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="Opaque"):
        torch_deepcopy([Opaque()])


def test_flat_lists() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert flatten_object([one, (two, None), {"k": 3}], drop_keys=True) == [one, two, None, 3]
    assert flatten_object({"k": 3}) == ["k", 3]
    assert len(flatten_object([mixed(), one])) == 5
    assert flatten_object(BaseModelOutput(last_hidden_state=one)) == [one]


def test_containers_of_dynamic_shapes() -> None:
    made, one = mixed(), torch.ones(1)
    assert flatten_unflatten_for_dynamic_shapes(made) == flatten_object(made)
    found = flatten_unflatten_for_dynamic_shapes({"x": (one, [2]), "c": made})
    assert found == {"x": (one, [2]), "c": flatten_object(made)}
    assert flatten_unflatten_for_dynamic_shapes({"x": one}, use_dict=False) == [one]
    both = make_encoder_decoder_cache(mixed(), mixed())
    assert [len(part) for part in flatten_unflatten_for_dynamic_shapes(both)] == [4, 4]


def test_replacement_before_exporting() -> None:
    output, made, one = BaseModelOutput(last_hidden_state=torch.ones(1)), mixed(), torch.ones(1)
    for same in (None, 3, 2.5, "s", one, output, made):
        assert replacement_before_exporting(same) is same
    given = {"a": [one, (output, made)]}
    found = replacement_before_exporting(given)
    assert found["a"][0] is one
    assert found["a"][1][0] is output
    assert found is not given
    assert found["a"] is not given["a"]
