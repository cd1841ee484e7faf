"""Small models of transformers under `generate`: every cache class, observed and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pytest_exportcheck import InputObserver, ObserverWarning, max_diff, register_flattening_functions

from .helpers import DYNAMIC as D

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")

SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))


def lfm2() -> Any:
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1, vocab_size=32))


def t5() -> Any:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=32,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def generated(build: Callable[[], Any], length: int = 6, **options: Any) -> tuple[Any, InputObserver]:
    torch.manual_seed(0)
    model, observer = build().eval(), InputObserver()
    prompt = torch.randint(1, 31, (2, length))
    with torch.no_grad(), observer(model, store_n_calls=4):
        model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, min_new_tokens=5,
            do_sample=False, **options,
        )  # fmt: skip
    return model, observer


@pytest.mark.parametrize("build", [llama, mistral, lfm2, mamba, t5])
def test_every_recorded_call_replays_in_eager(build: Callable[[], Any]) -> None:
    model, observer = generated(build)
    assert observer.num_obs() == 4
    shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)
    for index, recorded in enumerate(observer.info.calls):
        if build is t5 and index == 0:
            continue  # it computes the cross attention, which later calls read from the cache
        arguments = observer.infer_arguments(index)
        assert list(arguments) == list(shapes)
        with torch.no_grad():
            again = model(**arguments)
        assert max_diff(recorded.outputs["logits"], again["logits"])["abs"] < 1e-5, index


def test_a_decoder() -> None:
    _, observer = generated(llama)
    shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)
    assert shapes["input_ids"] == {0: D, 1: D}
    assert shapes["cache"] == [{0: D, 2: D}] * 4
    # Not the flags that repeat what the config says: `**kwargs` cannot be exported with dynamic shapes.
    assert set(shapes) == {"input_ids", "position_ids", "cache", "logits_to_keep"}
    assert observer.infer_arguments()["cache"].get_seq_length() == 6, (
        "a decode call, the first that has a cache"
    )
    with pytest.warns(
        ObserverWarning, match="input_ids axis 1.*torch.export needs backed_size_oblivious.*export_safe"
    ):
        observer.infer_arguments()
    assert observer.needs_backed_size_oblivious(shapes)


@pytest.mark.parametrize("build", [llama, mistral])
def test_the_safe_arguments_of_a_decoder_export_and_every_call_replays(build: Callable[[], Any]) -> None:
    model, observer = generated(build)
    with register_flattening_functions():
        shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)
        arguments = observer.infer_arguments(export_safe=True, set_batch_dimension_for=True)
        assert not observer.info.inputs[0].needs_backed_size_oblivious(None)
        assert arguments["input_ids"].shape[1] > 1
        with torch.no_grad():
            program = torch.export.export(model, (), kwargs=arguments, dynamic_shapes=shapes, strict=False)
            for index, recorded in enumerate(observer.info.calls):
                found = program.module()(**observer.infer_arguments(index))
                assert max_diff(recorded.outputs["logits"], found["logits"])["abs"] < 1e-5, index


def test_a_sliding_window_keeps_its_window_and_counter() -> None:
    _, observer = generated(mistral)
    layer = observer.infer_arguments(2)["cache"].layers[0]
    assert (layer.sliding_window, layer.cumulative_length, layer.keys.shape[2]) == (4, 7, 3)
    empty = observer.infer_arguments(0)["cache"].layers[0]
    assert (empty.sliding_window, empty.cumulative_length, empty.keys.shape[2]) == (4, 0, 0)


def test_the_prefill_of_an_encoder_decoder_is_no_example_and_completing_it_is_said() -> None:
    _, observer = generated(t5)
    assert observer.infer_arguments()["cache"].self_attention_cache.get_seq_length() > 0
    with pytest.warns(ObserverWarning, match="cross_attention_cache.* not among the inputs"):
        arguments = observer.infer_arguments(0)
    for part in (arguments["cache"].self_attention_cache, arguments["cache"].cross_attention_cache):
        assert part.layers[0].keys.shape[2] == 0


def test_a_static_cache() -> None:
    _, observer = generated(llama, cache_implementation="static")
    assert observer.num_obs() == 4
    assert observer.infer_dynamic_shapes(set_batch_dimension_for=True)
    assert type(observer.infer_arguments()["cache"]).__name__ == "StaticCache"


def test_flags_that_say_what_the_config_says_are_no_constants() -> None:
    model, observer = llama(), InputObserver()
    ids = torch.ones(2, 3, dtype=torch.int64)
    with torch.no_grad(), observer(model):
        model(input_ids=ids, use_cache=True, return_dict=None)
        model(input_ids=ids[:, :2], use_cache=None, return_dict=True)
        model(input_ids=ids[:, :2])
    assert observer.infer_dynamic_shapes() == {"input_ids": {1: D}}
    observer = InputObserver()
    with torch.no_grad(), observer(model):
        model(input_ids=ids, use_cache=False)
        model(input_ids=ids, use_cache=True)
    with pytest.raises(RuntimeError, match="argument use_cache"):
        observer.infer_dynamic_shapes()


def test_generate_needs_no_block_and_the_observer_leaves_no_trace() -> None:
    model, observer = generated(llama, length=3)
    assert "forward" not in vars(model)
    assert "DynamicCache" in observer.info.inputs[1].str_obs()
    assert len(observer.info.inputs[0].flat_list) < len(observer.info.inputs[1].flat_list)
