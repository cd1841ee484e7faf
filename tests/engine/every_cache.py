"""Every cache class of the installed transformers, found in its source, and a sample of each.

A sample is a cache that holds something (`make`, for a batch and a length) and what a model does with it in
one more step (`step`, which writes into the cache and returns what attention would read).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache, cache_utils

__all__ = ["INTERNAL", "MISSING_BACKENDS", "SAMPLES", "Sample", "discover", "find"]

_PACKAGE = Path(transformers.__file__).parent
_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)


@functools.cache
def discover() -> dict[str, str]:
    """Class name -> module, for every cache and every layer of one; nothing is imported."""
    found: dict[str, tuple[str, set[str]]] = {}
    files = [_PACKAGE / "cache_utils.py", *_PACKAGE.glob("generation/**/*.py")]
    for file in [
        *files,
        *_PACKAGE.glob("models/*/modeling_*.py"),
        *_PACKAGE.glob("models/*/generation_*.py"),
    ]:
        module = ".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts)
        for name, bases in _CLASS.findall(file.read_text(encoding="utf-8")):
            found[name] = (module, {base.strip() for base in bases.split(",") if base.strip()})
    caches = {
        name
        for name, (module, _) in found.items()
        if name.endswith(("Cache", "CacheLayer", "CacheLayerMixin"))
        or (module.endswith("cache_utils") and name.endswith("Layer"))
    }
    while True:
        more = {name for name, (_, bases) in found.items() if bases & caches} - caches
        if not more:
            return {name: found[name][0] for name in sorted(caches)}
        caches |= more


def find(name: str) -> Any:
    """The class."""
    return getattr(importlib.import_module(discover()[name]), name)


#: Caches that no call takes or returns: a model, a session or the generation loop keeps them for itself.
INTERNAL = {
    "AssistantVocabTranslatorCache": "of the candidate generator, not of a call",
    "EdgeTamVideoInferenceCache": "of an inference session",
    "OmDetTurboLRUCache": "of the model, across calls",
    "PagedAttentionCache": "of continuous batching",
    "Sam2VideoInferenceCache": "of an inference session",
    "Sam3TrackerVideoInferenceCache": "of an inference session",
    "Sam3VideoInferenceCache": "of an inference session",
}

#: Layers whose backend may not be installed.
MISSING_BACKENDS = {"QuantoQuantizedLayer": "optimum.quanto", "HQQQuantizedLayer": "hqq"}


@dataclass(frozen=True)
class Sample:
    """How a class is filled and used.

    Attributes
    ----------
    exports:
        ``sizes``: one program serves every size; ``one``: the context holds a counter, a program serves the
        sizes of its example; ``no``: a step does what torch.export cannot trace.
    """

    make: Callable[[int, int], Any]
    step: Callable[[Any, torch.Tensor], Any]
    exports: str = "sizes"


def kv(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, length, 4), torch.randn(batch, 2, length, 4)


def attend(cache: Any, x: torch.Tensor) -> Any:
    keys, values = cache.update(x, x + 1, 0)
    return keys * 2, values


def _cache(layer: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [layer], None
    return cache


def _layer(name: str, **options: Any) -> Callable[[int, int], Any]:
    """A cache of one layer of the class, filled by an update."""

    def make(batch: int, length: int) -> Any:
        cache = _cache(find(name)(**options))
        cache.update(*kv(batch, length), 0)
        return cache

    return make


def _llama(layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, vocab_size=16
    )


def _filled(build: Callable[[], Any]) -> Callable[[int, int], Any]:
    def make(batch: int, length: int) -> Any:
        cache = build()
        for index in range(2):
            cache.update(*kv(batch, length), index)
        return cache

    return make


def _dflash() -> Any:
    cache = find("DFlashCache")()
    cache.set_previous_accepted_tokens(2)
    return cache


def _encoder_decoder(batch: int, length: int) -> Any:
    pair = [_filled(DynamicCache)(batch, length), _filled(DynamicCache)(batch, length + 1)]
    cache = EncoderDecoderCache(*pair)
    cache.is_updated[0] = True
    return cache


def _attend_decoder(cache: Any, x: torch.Tensor) -> Any:
    return attend(cache.self_attention_cache, x), cache.cross_attention_cache.layers[0].keys * 2


def _indexed(name: str, **options: Any) -> Callable[[int, int], Any]:
    def make(batch: int, length: int) -> Any:
        cache = _layer(name, **options)(batch, length)
        cache.update_indexer(torch.randn(batch, length, 4), 0)
        return cache

    return make


def _attend_indexed(cache: Any, x: torch.Tensor) -> Any:
    return attend(cache, x), cache.update_indexer(x[:, 0], 0) * 2


def _linear(name: str, attention: bool = False, **options: Any) -> Callable[[int, int], Any]:
    def make(batch: int, length: int) -> Any:
        layer = find(name)(number_of_states=2, **options)
        for state in range(2):
            layer.update_conv_state(torch.randn(batch, 4, 5), state)
            layer.update_recurrent_state(torch.randn(batch, 2, 3, 4).double(), state)
        cache = _cache(layer)
        if attention:
            cache.update(*kv(batch, length), 0)
        return cache

    return make


def _recur(cache: Any, x: torch.Tensor) -> Any:
    conv = cache.update_conv_state(x.mean(1).transpose(1, 2), 0, 1)
    state = cache.get_recurrent_state(0, 1)
    return conv * 2, cache.update_recurrent_state(state * 0.5, 0, 1) + 1


def _attend_and_recur(cache: Any, x: torch.Tensor) -> Any:
    return attend(cache, x), _recur(cache, x)


def _dummy(batch: int, length: int) -> Any:
    cache = _filled(DynamicCache)(batch, length)
    cache.layers.insert(1, cache_utils.DummyLayer())
    return cache


# caches and layers of models


def _sparse(name: str, **options: Any) -> Callable[[int, int], Any]:
    def make(batch: int, length: int) -> Any:
        cache = _layer(name, **options)(batch, length)
        cache.layers[0].update_index(torch.randn(batch, 1, length, 4))
        return cache

    return make


def _attend_sparse(cache: Any, x: torch.Tensor) -> Any:
    return attend(cache, x), cache.layers[0].update_index(x[:, :1]) * 2


def _compressed(name: str) -> Callable[[int, int], Any]:
    rates = {"heavily_compressed_attention": 2, "compressed_sparse_attention": 2}

    def make(batch: int, length: int) -> Any:
        cache = _cache(find(name)(SimpleNamespace(sliding_window=16, compress_rates=rates)))
        cache.update(*kv(batch, length), 0)
        layer = cache.layers[0]
        for entry in layer.compressed_kv:
            chunk, gate, _ = layer.store_compression_weights(
                entry, torch.randn(batch, 2 * length + 1, 4), torch.randn(batch, 2 * length + 1, 4)
            )
            layer.update_compressor_states(entry, chunk[:, ::2])
            if hasattr(layer, "overlap_kv"):
                windows = [part.unflatten(1, (-1, 2)) for part in (chunk, gate)]
                layer.update_overlap_state(entry, *windows, 2)
        return cache

    return make


def _attend_compressed(cache: Any, x: torch.Tensor) -> Any:
    layer = cache.layers[0]
    kept = layer.update_compressor_states("compressor", x[:, 0])
    return attend(cache, x), kept * 2, layer.entry_count["compressor"] + layer.buffer_kv["compressor"]


def _minimax(batch: int, length: int) -> Any:
    cache = find("MiniMaxCache")()
    cache.update(*kv(batch, length), 1)
    cache.set_linear_cache(0, torch.randn(batch, 2, 4, 4))
    return cache


def _attend_minimax(cache: Any, x: torch.Tensor) -> Any:
    cache.set_linear_cache(0, cache.get_linear_cache(0) * 0.5)
    keys, values = cache.update(x, x + 1, 1)
    return keys * 2, values, cache.get_linear_cache(0) + 1


def _xlstm(batch: int, length: int) -> Any:
    config = transformers.xLSTMConfig(hidden_size=8, num_heads=2, num_blocks=2, vocab_size=16)
    cache = find("xLSTMCache")(config, batch, dtype=torch.float32)
    for states in cache.rnn_state.values():
        for state in states:
            state.normal_()
    cache.seqlen_offset += length
    return cache


def _recur_xlstm(cache: Any, x: torch.Tensor) -> Any:
    cache.rnn_state = {
        layer: tuple(state * 0.5 for state in states) for layer, states in cache.rnn_state.items()
    }
    cache.seqlen_offset += x.shape[-2]
    return cache.rnn_state[0][0] + cache.seqlen_offset


def _reformer(batch: int, length: int) -> Any:
    cache = find("ReformerDynamicCache")()
    cache.update(torch.randint(0, 4, (batch, 2, 1, length)), torch.randn(batch, length, 4), 0)
    cache.update(None, torch.randn(batch, length, 4), 1)
    return cache


def _attend_reformer(cache: Any, x: torch.Tensor) -> Any:
    buckets, states = cache.update((x[:, :, None, :, 0] > 0).long(), x[:, 0], 0)
    return buckets + 1, states * 2, cache.states_cache[1] * 2


def _padding(name: str) -> Callable[[int, int], Any]:
    """Padding caches with a list of states; a step asks the values of paddings, which are buffers."""

    def make(batch: int, length: int) -> Any:
        cache = find(name)(
            num_layers=2,
            per_layer_padding=[torch.tensor(3), 2],
            per_layer_padding_mode=["constant", "replicate"],
            per_layer_in_channels=[2, 2],
        )
        cache.update(torch.randn(batch, 2, length + 4), 0)
        return cache

    return make


def _pad(cache: Any, x: torch.Tensor) -> Any:
    return cache.update(x[..., 0], 0) * 2, cache.update(x[..., 1], 1) + 1


def _conv() -> SimpleNamespace:
    return SimpleNamespace(left_pad=2, in_channels=2)


def _keyed_padding(name: str) -> Callable[[int, int], Any]:
    """Padding caches with a dict of layers."""

    def make(batch: int, length: int) -> Any:
        cache = find(name)()
        cache.update(torch.randn(batch, 2, length + 2), "conv.1", _conv())
        return cache

    return make


def _pad_keyed(cache: Any, x: torch.Tensor) -> Any:
    return cache.update(x[..., 0], "conv.1", _conv()) * 2


def _streaming(batch: int, length: int) -> Any:
    cache = find("NemotronAsrStreamingEncoderCausalConvPaddingCache")()
    one, two = (find(f"NemotronAsrStreamingEncoderCausalConv{rank}CacheLayer")() for rank in ("1d", "2d"))
    cache.layers = {"one": one, "two": two}
    one.cache, one.is_initialized, one.left_pad, one.in_channels = torch.randn(batch, 2, 3), True, 3, 2
    two.cache, two.is_initialized = torch.randn(batch, 2, 3, 4), True
    return cache


def _stream(cache: Any, x: torch.Tensor) -> Any:
    for layer in cache.layers.values():
        layer.cache.mul_(0.5)
    return [layer.cache + 1 for layer in cache.layers.values()]


def _transducer(name: str) -> Callable[[int, int], Any]:
    def make(batch: int, length: int) -> Any:
        cache = find(name)(transformers.ParakeetEncoderConfig(decoder_hidden_size=4, num_decoder_layers=2))
        cache.update(torch.randn(batch, 1, 4), torch.randn(2, batch, 4), torch.randn(2, batch, 4))
        return cache

    return make


def _decode(cache: Any, x: torch.Tensor) -> Any:
    cache.update(cache.cache * 2, cache.hidden_state + 1, cache.cell_state + 2)
    return cache.cache + cache.hidden_state[:1].transpose(0, 1)


def _speakers(batch: int, length: int) -> Any:
    config = transformers.Nemotron3DiarizationStreamingConfig()
    cache = find("Nemotron3DiarizationSpeakerCache")(config)
    cache.get_embeds(torch.randn(batch, length, 4))
    cache.fifo.normal_()
    return cache


def _speak(cache: Any, x: torch.Tensor) -> Any:
    cache.fifo.mul_(0.5)
    return cache.fifo + 1, cache.num_fifo_frames + cache.embeds


_STATIC = {"max_cache_len": 12}
_STATIC_WINDOW = {"max_cache_len": 12, "sliding_window": 10}

SAMPLES: dict[str, Sample] = {
    "Cache": Sample(
        _filled(lambda: cache_utils.Cache(layer_class_to_replicate=cache_utils.DynamicLayer)), attend
    ),
    "DynamicCache": Sample(_filled(DynamicCache), attend),
    "MtpCache": Sample(_filled(lambda: find("MtpCache")()), attend),
    "DFlashCache": Sample(_filled(_dflash), attend),
    "StaticCache": Sample(_filled(lambda: StaticCache(_llama(), max_cache_len=12)), attend),
    "QuantizedCache": Sample(_filled(lambda: find("QuantizedCache")("fp8", _llama())), attend),
    "EncoderDecoderCache": Sample(_encoder_decoder, _attend_decoder),
    "DynamicLayer": Sample(_layer("DynamicLayer"), attend),
    "DynamicSlidingWindowLayer": Sample(_layer("DynamicSlidingWindowLayer", sliding_window=16), attend),
    "DynamicIndexedLayer": Sample(_indexed("DynamicIndexedLayer"), _attend_indexed),
    "StaticLayer": Sample(_layer("StaticLayer", **_STATIC), attend),
    "StaticSlidingWindowLayer": Sample(_layer("StaticSlidingWindowLayer", **_STATIC_WINDOW), attend, "one"),
    "StaticIndexedLayer": Sample(_indexed("StaticIndexedLayer", **_STATIC), _attend_indexed),
    "Fp8QuantizedLayer": Sample(_layer("Fp8QuantizedLayer"), attend),
    "QuantoQuantizedLayer": Sample(
        _layer("QuantoQuantizedLayer", q_group_size=8, residual_length=4), attend, "no"
    ),
    "HQQQuantizedLayer": Sample(
        _layer("HQQQuantizedLayer", axis_key=1, axis_value=1, q_group_size=8, residual_length=4), attend, "no"
    ),
    "LinearAttentionLayer": Sample(_linear("LinearAttentionLayer"), _recur),
    "LinearAttentionAndFullAttentionLayer": Sample(
        _linear("LinearAttentionAndFullAttentionLayer", True), _attend_and_recur
    ),
    "LinearAttentionAndSlidingWindowAttentionLayer": Sample(
        _linear("LinearAttentionAndSlidingWindowAttentionLayer", True, sliding_window=16), _attend_and_recur
    ),
    "LinearAttentionAndStaticFullAttentionLayer": Sample(
        _linear("LinearAttentionAndStaticFullAttentionLayer", True, **_STATIC), _attend_and_recur
    ),
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": Sample(
        _linear("LinearAttentionAndStaticSlidingWindowAttentionLayer", True, **_STATIC_WINDOW),
        _attend_and_recur,
        "one",
    ),
    "DummyLayer": Sample(_dummy, attend),
    "MiniMaxM3VLSparseCacheLayer": Sample(_sparse("MiniMaxM3VLSparseCacheLayer"), _attend_sparse),
    "MiniMaxM3VLSparseStaticCacheLayer": Sample(
        _sparse("MiniMaxM3VLSparseStaticCacheLayer", **_STATIC), _attend_sparse
    ),
    "DeepseekV4HCACache": Sample(_compressed("DeepseekV4HCACache"), _attend_compressed),
    "DeepseekV4CSACache": Sample(_compressed("DeepseekV4CSACache"), _attend_compressed),
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": Sample(
        _layer("UnlimitedOcrDynamicReferenceSlidingWindowLayer", sliding_window=16), attend, "one"
    ),
    "UnlimitedOcrStaticReferenceSlidingWindowLayer": Sample(
        _layer("UnlimitedOcrStaticReferenceSlidingWindowLayer", max_cache_len=16, sliding_window=8),
        attend,
        "one",
    ),
    "MiniMaxCache": Sample(_minimax, _attend_minimax),
    "xLSTMCache": Sample(_xlstm, _recur_xlstm),
    "ReformerDynamicCache": Sample(_reformer, _attend_reformer, "one"),
    "MimiConv1dPaddingCache": Sample(_padding("MimiConv1dPaddingCache"), _pad, "no"),
    "KyutaiSpeechToTextConv1dPaddingCache": Sample(
        _padding("KyutaiSpeechToTextConv1dPaddingCache"), _pad, "no"
    ),
    "PocketTTSAudioTokenizerConv1dPaddingCache": Sample(
        _padding("PocketTTSAudioTokenizerConv1dPaddingCache"), _pad, "no"
    ),
    "NemotronAsrStreamingEncoderCausalConvPaddingCache": Sample(_streaming, _stream),
    "NemotronAsrStreamingEncoderCausalConv1dCacheLayer": Sample(_streaming, _stream),
    "NemotronAsrStreamingEncoderCausalConv2dCacheLayer": Sample(_streaming, _stream),
    "Nemotron3DiarizationSpeakerCache": Sample(_speakers, _speak),
    **{
        f"{prefix}Conv1d{kind}": Sample(_keyed_padding(f"{prefix}Conv1dPaddingCache"), _pad_keyed)
        for prefix in (
            "MuseSparkAudio",
            "NemotronAsrStreaming",
            "VibeVoiceAcousticTokenizer",
            "VibeVoiceAsr",
            "VoxtralRealtime",
        )
        for kind in ("PaddingCache", "CacheLayer")
    },
    **{
        name: Sample(_transducer(name), _decode)
        for name in (
            "Nemotron3_5AsrRNNTDecoderCache",
            "NemotronAsrStreamingRNNTDecoderCache",
            "ParakeetRNNTDecoderCache",
            "ParakeetTDTDecoderCache",
        )
    },
}
