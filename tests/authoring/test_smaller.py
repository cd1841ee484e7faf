"""Configurations that are searched by what refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_exportcheck.authoring import fit
from pytest_exportcheck.authoring.known import Unknown
from pytest_exportcheck.authoring.reduce import reduced
from pytest_exportcheck.authoring.smaller import shrunk
from pytest_exportcheck.spec.configs import ConfigError, build_config

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("config", "values", "shape", "expected"),
    [
        # what a dimension is, or a multiple of
        ({"d_latents": 1280}, {}, (1280, 1280), {"d_latents": 32}),
        ({"hash_vocab": 500002, "width": 32}, {"width": 32}, (3000012, 32), {"width": 32, "hash_vocab": 32}),
        ({"num_filters": 32, "ratios": [2, 2]}, {}, (2048, 1024, 16), {"num_filters": 2}),
        # in a part
        (
            {"vocoder": {"model_type": "v", "channels": 1536}},
            {},
            (1536, 768, 11),
            {"vocoder": {"model_type": "v", "channels": 32}},
        ),
        # what the rules chose, a token, a flag: of none of these
        ({"width": 64}, {"width": 32}, (2048, 1024), None),
        ({"pad_token_id": 1024}, {}, (1024, 1024), None),
        ({"flag": True}, {}, (1024, 1024), None),
        # nothing large is left
        ({"width": 128}, {}, (128, 128), None),
    ],
)
def test_what_the_largest_parameter_comes_from(
    config: dict[str, Any], values: dict[str, Any], shape: tuple[int, ...], expected: dict[str, Any] | None
) -> None:
    before = {**values}
    assert shrunk(config, values, [(2, 2), shape]) == expected
    assert values == before


def small_enough(model_type: str, auto_class: str) -> dict[str, Any]:
    values = fit.fitted(model_type, auto_class)
    assert sum(map(fit.math.prod, fit._shapes(model_type, auto_class, values))) <= fit.PARAMETERS
    return values


@pytest.mark.parametrize(
    ("model_type", "auto_class", "key"),
    [
        # one parameter is large
        ("perceiver", "AutoModelForMaskedLM", "d_latents"),
        # channels that double at each stage
        ("vibevoice_acoustic_tokenizer_decoder", "AutoModel", "num_filters"),
        # two counts of layers, taken back one after the other
        ("dory", "AutoModelForCausalLM", "n_input_layers"),
        # what its code reads and its class does not have
        ("moonshine_streaming", "AutoModelForSpeechSeq2Seq", "num_key_value_heads"),
    ],
)
def test_a_model_type(model_type: str, auto_class: str, key: str) -> None:
    assert key in small_enough(model_type, auto_class)


def test_a_change_that_leads_to_another_refusal_is_built_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(
        model_type: str, auto_class: str, values: Mapping[str, Any], most: int = 0
    ) -> Exception | None:
        if "a" in values:
            return ValueError("a is refused, as 1 would be")
        return ValueError("b is refused") if "b" in values else None

    monkeypatch.setattr(fit, "_refusal", refusal)
    monkeypatch.setattr(fit, "_first", lambda *given: {"c": 1, "b": 2, "a": 3})
    monkeypatch.setattr(fit, "_default", lambda name: {})
    assert fit.fitted("x", "AutoModel") == {"c": 1}


def test_a_library_that_is_missing_is_no_matter_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refusal(model_type: str, auto_class: str, values: Mapping[str, Any], most: int = 0) -> Exception:
        tried.append(values)
        return ImportError("x needs the y library")

    monkeypatch.setattr(fit, "_refusal", refusal)
    monkeypatch.setattr(fit, "alternatives", lambda *given: iter(()))
    with pytest.raises(Unknown, match="needs the y library"):
        fit.fitted("bert", "AutoModelForMaskedLM")
    assert len(tried) == 1


def test_other_classes_are_those_of_every_task() -> None:
    assert "MusicgenForConditionalGeneration" not in fit.model_classes("musicgen")
    assert "MusicgenForConditionalGeneration" in fit.other_classes("musicgen")


def test_layers_that_differ_keep_their_place() -> None:
    made = reduced(
        {
            "model_type": "some", "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
            "layer_types": ["full", "full", "sliding"] * 4,
            "per_layer_config": {"02": {"num_attention_heads": 16, "rate": 0.5}, "05": {"rate": 0.1}},
        }
    )  # fmt: skip
    assert made["layer_types"] == ["full", "sliding"]
    assert made["per_layer_config"] == {"01": {"num_attention_heads": 4, "rate": 0.5}}


def test_numbers_for_each_layer_are_no_pattern_of_words() -> None:
    made = reduced(
        {
            "num_hidden_layers": 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "block_pattern": ["a", "b", "a"],
        }
    )
    assert made["activation_sparsity_pattern"] == [0.5, 0.0]
    assert made["block_pattern"] == ["a", "b"]


def test_channels_of_an_image_stay() -> None:
    assert reduced({"stem_channels": [3, 48, 96]})["stem_channels"] == [3, 32, 64]


def test_a_value_that_differs_from_layer_to_layer_can_be_given() -> None:
    config = build_config(
        "gemma4_text",
        {"head_dim": 8, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    )
    assert config.num_hidden_layers == 2
    with pytest.raises(ConfigError, match="does not know 'head_dimm'"):
        build_config("gemma4_text", {"head_dimm": 8})
