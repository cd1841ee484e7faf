"""The rules that make a configuration small."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_exportcheck.authoring.reduce import filled, reduced, with_chained_widths, with_its_widths

DECODER = {
    "model_type": "some_decoder", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "pad_token_id": None, "bos_token_id": 128000,
    "eos_token_id": [128001, 128009], "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def test_a_decoder() -> None:
    assert reduced(DECODER) == {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 100,
        "eos_token_id": [101, 102],
    }  # fmt: skip


@pytest.mark.parametrize(("heads", "kv", "expected"), [(32, 32, 4), (32, 8, 2), (32, 1, 1)])
def test_heads_of_keys(heads: int, kv: int, expected: int) -> None:
    made = reduced({**DECODER, "num_attention_heads": heads, "num_key_value_heads": kv})
    assert made.get("num_key_value_heads", kv) == expected


def test_one_layer_of_each_kind_stays_with_what_belongs_to_it() -> None:
    kinds = ["linear", "linear", "linear", "full"] * 2
    made = reduced({**DECODER, "num_hidden_layers": 8, "layer_types": kinds, "widths": list(range(8))})
    assert made["num_hidden_layers"] == len(made["layer_types"]) == len(made["widths"])
    two = reduced({**DECODER, "num_hidden_layers": 8, "layer_types": kinds})
    assert (two["num_hidden_layers"], two["layer_types"]) == (2, ["linear", "full"])


def test_indices_of_layers_stay_below_their_number() -> None:
    made = reduced({**DECODER, "deepstack_visual_indexes": [8, 16, 24], "mlp_only_layers": [-1]})
    assert made["deepstack_visual_indexes"] == [1]
    assert "mlp_only_layers" not in made


def test_widths_that_are_equal_stay_equal_across_parts() -> None:
    config: dict[str, Any] = {
        "model_type": "some_vlm",
        "text_config": DECODER,
        "vision_config": {
            "model_type": "some_tower", "hidden_size": 1280, "out_hidden_size": 4096, "depth": 24,
            "num_heads": 16, "patch_size": 14, "image_size": 336, "num_channels": 3,
        },
        "projection_dim": 4096, "image_token_id": 128256, "image_seq_length": 576,
    }  # fmt: skip
    made = reduced(config)
    vision, text = made["vision_config"], made["text_config"]
    assert (vision["model_type"], text["model_type"]) == ("some_tower", "some_decoder")
    assert vision["out_hidden_size"] == text["hidden_size"] == made["projection_dim"] == 32
    assert (vision["image_size"], vision["patch_size"], made["image_seq_length"]) == (32, 8, 16)
    assert (vision["depth"], vision["num_heads"]) == (2, 4)
    ids = [text["bos_token_id"], *text["eos_token_id"], made["image_token_id"]]
    assert len(set(ids)) == 4
    assert all(100 <= value < 128 for value in ids)


def test_equal_token_ids_stay_equal_and_small_ones_stay() -> None:
    made = reduced({"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 1, "sep_token_id": -1})
    assert made == {"bos_token_id": 100, "eos_token_id": 100}


def test_a_staged_vision_model() -> None:
    made = reduced(
        {
            "model_type": "some_swin",
            "image_size": 224,
            "patch_size": 4,
            "depths": [2, 2, 18, 2],
            "num_layers": 4,
            "num_heads": [3, 6, 12, 24],
            "embed_dim": 96,
            "hidden_sizes": [96, 192, 384, 768],
        }
    )
    assert made["depths"] == [1, 1, 1, 1]
    assert made["num_heads"] == [2, 4, 4, 4]
    assert made["hidden_sizes"] == [16, 32, 64, 64]
    assert made["image_size"] == 64
    assert "num_layers" not in made
    assert "patch_size" not in made


def test_experts_and_latent_attention() -> None:
    made = reduced(
        {
            **DECODER,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "qk_head_dim": 192,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
        }
    )
    assert (made["n_routed_experts"], made["num_experts_per_tok"]) == (4, 2)
    assert made["n_routed_experts"] % made["n_group"] == 0
    assert made["qk_head_dim"] == made["qk_nope_head_dim"] + made["qk_rope_head_dim"]
    assert made["first_k_dense_replace"] == 1


def test_sections_of_rope_fill_half_a_head() -> None:
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    made = reduced({**DECODER, "rope_parameters": rope})
    assert sum(made["rope_parameters"]["mrope_section"]) == made["head_dim"] // 2
    assert rope["mrope_section"] == [16, 24, 24]


def test_what_is_small_already_stays() -> None:
    small = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 99,
        "use_cache": True,
    }
    assert reduced(small) == {}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, {"attn_layer_period": 2, "attn_layer_offset": 1}),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, {}),
        ({"full_attention_interval": 4}, {"full_attention_interval": 2}),
        ({"attn_layer_indices": None}, {"attn_layer_indices": [1]}),
        (
            {"block_types": ["recurrent", "recurrent", "attention"]},
            {"block_types": ["recurrent", "attention"]},
        ),
        (
            {"layer_types": ["linear_attention"] * 32},
            {"layer_types": ["linear_attention", "full_attention"]},
        ),
    ],
)
def test_kinds_of_layers_that_follow_from_an_index(kinds: dict[str, Any], expected: dict[str, Any]) -> None:
    made = reduced({**DECODER, **kinds})
    assert made["num_hidden_layers"] == 2
    assert {key: made[key] for key in kinds if key in made} == expected


def test_a_backbone_has_as_many_layers_as_it_hands_out() -> None:
    made = reduced(
        {
            "model_type": "some_vit", "hidden_size": 384, "num_hidden_layers": 12,
            "out_indices": [3, 6, 9, 12], "out_features": ["stage3", "stage6", "stage9", "stage12"],
        }
    )  # fmt: skip
    assert (made["num_hidden_layers"], made["out_indices"]) == (4, [1, 2, 3, 4])
    assert made["out_features"] == ["stage1", "stage2", "stage3", "stage4"]


def test_windows_fit_into_the_last_stage() -> None:
    swin = {"image_size": 224, "patch_size": 4, "depths": [2, 2, 6, 2], "window_size": 7}
    made = reduced(swin)
    assert (made["image_size"], made["window_size"]) == (64, 2)


def test_groups_divide_the_heads_of_a_state_space_model() -> None:
    made = reduced({"hidden_size": 4096, "expand": 2, "num_heads": 128, "head_dim": 64, "n_groups": 8})
    assert made["num_heads"] * made["head_dim"] == 2 * made["hidden_size"]
    assert made["num_heads"] % made["n_groups"] == 0


def test_the_head_size_that_is_that_of_queries_stays_so() -> None:
    made = reduced(
        {
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "qk_head_dim": 128,
            "head_dim": 128,
            "v_head_dim": 128,
        }
    )
    assert made["head_dim"] == made["qk_head_dim"] == 16


def test_stages_that_follow_each_other_stay_chained() -> None:
    stages = {
        "hidden_size": 384, "stem_channels": [3, 32, 48], "stage_in_channels": [48, 128, 512],
        "stage_out_channels": [128, 512, 1024], "num_attention_heads": 12, "vocab_size": 1000,
    }  # fmt: skip
    made = with_chained_widths(stages, reduced(stages))
    assert made["stem_channels"] == [3, 32, 32]
    assert made["stage_in_channels"] == [32, 64, 64]
    assert made["stage_out_channels"] == [64, 64, 64]
    assert (made["hidden_size"], made["num_attention_heads"], made["vocab_size"]) == (64, 4, 128)


def test_fewer_layers_alone() -> None:
    config = {
        **DECODER,
        "model_type": "some",
        "part": {"model_type": "other", "hidden_size": 512, "depth": 9},
    }
    assert with_its_widths(config, reduced(config)) == {
        "vocab_size": 128, "num_hidden_layers": 2, "bos_token_id": 100, "eos_token_id": [101, 102],
        "part": {"model_type": "other", "depth": 2},
    }  # fmt: skip


def test_what_is_none_is_filled_for_all_and_for_each() -> None:
    part = {"model_type": "other", "num_experts_per_tok": None, "note": None}
    config = {"model_type": "some", "head_dim": None, "part": part}
    both = {"hidden_size": 32, "head_dim": 8, "part": {"model_type": "other", "num_experts_per_tok": 2}}
    one, other = {"hidden_size": 32, "head_dim": 8}, {"hidden_size": 32, "part": both["part"]}
    assert list(filled(config, {"hidden_size": 32})) == [both, one, other]
    assert list(filled({"note": None}, {})) == []
