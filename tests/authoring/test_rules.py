"""Rules for configurations and calls, each with model types that it cures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_exportcheck.authoring import fit, new
from pytest_exportcheck.authoring.fit import LARGE, PARAMETERS, alternatives, fitted
from pytest_exportcheck.authoring.known import Unknown
from pytest_exportcheck.authoring.new import draft
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import parse_spec

pytestmark = pytest.mark.filterwarnings("ignore")


def observed(tmp_path: Path, model_type: str) -> tuple[dict[str, Any], str]:
    made = draft(model_type, tmp_path / "spec.yaml")
    assert made.observed, made.problems
    assert made.text is not None
    return yaml.safe_load(made.text), made.text


@pytest.mark.parametrize(
    ("model_type", "in_config"),
    [
        # one layer of each kind
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
        ("bamba", {"attn_layer_indices": [1]}),
        # groups, windows
        ("mamba2", {"n_groups": 2}),
        ("swin", {"window_size": 2}),
        # channels of stages that follow each other
        ("textnet", {"hidden_sizes": [64, 64, 64, 64, 64]}),
        # what pretrained models set
        ("ministral", {"head_dim": 8}),
        ("dots1", {"num_experts_per_tok": 2}),
    ],
)
def test_a_configuration(tmp_path: Path, model_type: str, in_config: dict[str, Any]) -> None:
    spec, _ = observed(tmp_path, model_type)
    config = spec["model"]["config"]
    assert {key: config[key] for key in in_config} == in_config


def test_what_a_class_works_out_is_left_to_it(tmp_path: Path) -> None:
    spec, _ = observed(tmp_path, "zamba2")
    # Twice the hidden size, whatever is given.
    assert "attention_hidden_size" not in spec["model"]["config"]


def test_a_part_keeps_what_it_has_otherwise_than_its_type(tmp_path: Path) -> None:
    spec, _ = observed(tmp_path, "depth_anything")
    backbone = spec["model"]["config"]["backbone_config"]
    assert backbone["reshape_hidden_states"] is False
    assert len(backbone["out_features"]) == 4


@pytest.mark.parametrize(
    ("model_type", "in_text"),
    [
        ("qwen3_vl_vision", ["hidden_states: float32[32, 384]", "grid_thw: int64[2, 3] values"]),
        ("kimi_k25_vision", ["pixel_values: float32[32, 3, 8, 8]"]),
        ("siglip2", ["pixel_values: float32[4, 16, 192]", "spatial_shapes: int64[4, 2] = 4"]),
        ("mistral3", ["image_sizes: int64[3, 2] values [[32, 64], [32, 64], [32, 64]]"]),
        ("lxmert", ["visual_feats: float32[2, 5, 32]", "visual_pos: float32[3, 4, 4]"]),
        ("informer", ["past_values: float32[2, 11]", "past_time_features: float32[2, 11, 0]"]),
        ("patchtst", ["past_values: float32[2, 32, 1]"]),
        ("decision_transformer", ["actions: float32[2, 9, 4]", "timesteps: int64[2, 9] < 16"]),
        ("audio-spectrogram-transformer", ["input_values: float32[2, 1024, 128]"]),
        ("dac", ["input_values: float32[2, 1, 3200]"]),
        ("qwen2_audio_encoder", ["input_features: float32[2, 128, 3000]"]),
    ],
)
def test_calls(tmp_path: Path, model_type: str, in_text: list[str]) -> None:
    _, text = observed(tmp_path, model_type)
    for part in in_text:
        assert part in text


def test_no_word_of_a_prompt_is_a_special_token(tmp_path: Path) -> None:
    # Its image token has a small id, which is not changed.
    spec, _ = observed(tmp_path, "exaone4_5")
    counts = []
    for call in spec["observe"]["calls"]:
        rows = yaml.safe_load(call["generate"]["input_ids"].partition("values ")[2])
        counts.append([row.count(67) for row in rows])
    # Two images of four tokens and one; then one of eight for each prompt.
    assert counts == [[8, 4], [8, 8, 8]]


def test_a_large_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "PARAMETERS", 1000)
    monkeypatch.setattr(new, "PARAMETERS", 1000)
    monkeypatch.setattr(fit._refusal, "__defaults__", (1000,))
    _, text = observed(tmp_path, "gpt2")
    assert text.startswith("# The model has 6")
    assert "no rule made it smaller" in text.partition("\n")[0]


def test_alternatives_differ_and_are_small() -> None:
    made = list(alternatives("textnet", "AutoModelForImageClassification"))
    assert made[0] == fitted("textnet", "AutoModelForImageClassification")
    assert len(made) >= 2
    assert all(values not in made[:position] for position, values in enumerate(made))
    assert PARAMETERS < LARGE


def test_more_parameters_than_any_rule_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "LARGE", 100)
    monkeypatch.setattr(fit._refusal, "__defaults__", (100,))
    with pytest.raises(Unknown, match="parameters are left"):
        fitted("gpt2", "AutoModelForCausalLM")


def test_of_a_model_without_known_arguments_one_configuration_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def none(*given: Any) -> Any:
        tried.append(given)
        return iter(())

    monkeypatch.setattr(new, "alternatives", none)
    made = draft("sam2_video", tmp_path / "spec.yaml")
    assert "nothing is known of the arguments" in made.problems[0]
    assert tried == []


def calls_of(tmp_path: Path, model_type: str) -> list[dict[str, Any]]:
    spec, _ = observed(tmp_path, model_type)
    return [next(iter(call.values())) for call in spec["observe"]["calls"]]


def rows_of(call: dict[str, Any]) -> list[list[int]]:
    rows: list[list[int]] = yaml.safe_load(call["input_ids"].partition("values ")[2])
    return rows


def graphs_of(text: str, path: Path) -> Any:
    run = SpecRun(parse_spec(text, path))
    try:
        return run.observe("cpu", "float32").graphs
    finally:
        run.close()


@pytest.mark.parametrize(("model_type", "token", "count"), [("llava", 100, 3), ("qwen2_vl", 102, 3)])
def test_both_calls_have_as_many_images_where_each_is_a_thing_of_its_own(
    tmp_path: Path, model_type: str, token: int, count: int
) -> None:
    spec, text = observed(tmp_path, model_type)
    calls = [next(iter(call.values())) for call in spec["observe"]["calls"]]
    for call in calls:
        # A run of the token for each image.
        runs = [
            len(re.findall(f"(?<!{token} )(?:{token} )+", " ".join(map(str, row)) + " "))
            for row in rows_of(call)
        ]
        assert sum(runs) == count
    assert len(rows_of(calls[0])) != len(rows_of(calls[1]))
    graphs = graphs_of(text, tmp_path / "spec.yaml")
    assert all(len(graph.seen) > 1 for graph in graphs.values())
    dims = {leaf.path: leaf.dims for leaf in graphs["prefill"].shapes.tensors()}
    assert not isinstance(dims["input_ids"][0], int)


def test_images_of_one_tensor_are_as_many_as_the_prompts(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, "aya_vision")
    assert [call["pixel_values"].partition(",")[0] for call in calls] == ["float32[2", "float32[3"]


def test_images_do_not_make_both_texts_equally_long(tmp_path: Path) -> None:
    lengths = [len(rows_of(call)[0]) for call in calls_of(tmp_path, "internvl")]
    assert lengths[0] != lengths[1]


def test_a_mask_that_is_shorter_than_the_cache_limits_no_comparison(tmp_path: Path) -> None:
    # The tokens of its image stand in the cache before the text that the mask is of.
    spec, text = observed(tmp_path, "git")
    graphs = graphs_of(text, tmp_path / "spec.yaml")
    dims = {leaf.path: leaf.dims for leaf in graphs["decode"].shapes.tensors()}
    assert dims["attention_mask"][1] != dims["cache.layers.0.keys"][2]
    assert "compare" not in spec


def test_a_tower_that_is_not_there_leaves_the_text(tmp_path: Path) -> None:
    _, text = observed(tmp_path, "gemma4")
    assert text.startswith("# Text alone: no images were found that the model takes.\n")
    assert "pixel_values" not in text


@pytest.mark.parametrize("model_type", ["mobilevitv2", "clipseg"])
def test_height_and_width_of_an_image_are_two_sizes(tmp_path: Path, model_type: str) -> None:
    first, second = (
        re.search(r"(\d+), (\d+)\]", call["pixel_values"]) for call in calls_of(tmp_path, model_type)
    )
    assert first
    assert second
    assert first[1] != first[2]
    assert first.groups() == second.groups()[::-1]
