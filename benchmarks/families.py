"""Model families of transformers, each built tiny with random weights from its config.

`FAMILIES` maps a name to a builder; a builder returns a `Family`. Sizes are the smallest that keep each family's own
parts in play: sliding windows, experts, convolutions, grids, two towers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "Family"]

VOCABULARY = 99
IMAGE_TOKEN = 95

Kwargs = dict[str, Any]


@dataclass
class Family:
    """A model and the calls that people make.

    Attributes
    ----------
    kind:
        ``decoder``, ``encoder``, ``seq2seq``, ``vision``, ``audio``, ``vlm``, ``dual``.
    forward:
        Keyword arguments of two plain calls, of different sizes.
    generate:
        Keyword arguments of ``generate``; empty for models that do not generate.
    """

    model: torch.nn.Module
    kind: str
    forward: list[Kwargs]
    generate: list[Kwargs] = field(default_factory=list)

    def run(self) -> None:
        """Make the calls: ``generate`` for generators, ``forward`` for the others."""
        with torch.no_grad():
            if self.generate:
                for kwargs in self.generate:
                    self.model.generate(**kwargs)
            else:
                for kwargs in self.forward:
                    self.model(**kwargs)


FAMILIES: dict[str, Callable[[], Family]] = {}


def ids(batch: int, length: int, low: int = 5, high: int = 90) -> torch.Tensor:
    return torch.randint(low, high, (batch, length))


def mask(batch: int, length: int, left: bool) -> torch.Tensor:
    made = torch.ones(batch, length, dtype=torch.int64)
    made[0, :2] = 0 if left else 1
    made[0, length - 2 :] = 1 if left else 0
    return made


GENERATE: Kwargs = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}

TEXT: Kwargs = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VISION: Kwargs = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def build(config: str, model: str, values: Kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**values)).eval()
    settings = getattr(made, "generation_config", None)
    if settings is not None:
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = 0, 1, 2
    return made


def decoder(name: str, config: str, model: str, drop: tuple[str, ...] = (), **more: Any) -> None:
    def family() -> Family:
        values = {key: value for key, value in TEXT.items() if key not in drop} | more
        made = build(config, model, values)

        def call(batch: int, length: int) -> Kwargs:
            return {"input_ids": ids(batch, length), "attention_mask": mask(batch, length, left=True)}

        generate = [{**call(2, 7), **GENERATE}, {**call(3, 5), **GENERATE}]
        return Family(made, "decoder", [call(2, 7), call(3, 11)], generate)

    FAMILIES[name] = family


def encoder(
    name: str, config: str, model: str, drop: tuple[str, ...] = (), types: bool = False, **more: Any
) -> None:
    def family() -> Family:
        left_out = (*drop, "num_key_value_heads")
        made = build(config, model, {key: value for key, value in TEXT.items() if key not in left_out} | more)

        def call(batch: int, length: int) -> Kwargs:
            kwargs = {"input_ids": ids(batch, length), "attention_mask": mask(batch, length, left=False)}
            return kwargs | (
                {"token_type_ids": torch.zeros(batch, length, dtype=torch.int64)} if types else {}
            )

        return Family(made, "encoder", [call(2, 7), call(3, 11)])

    FAMILIES[name] = family


def seq2seq(name: str, config: str, model: str, **values: Any) -> None:
    def family() -> Family:
        made = build(config, model, values)
        settings = made.generation_config
        settings.forced_eos_token_id = settings.forced_bos_token_id = None
        if settings.decoder_start_token_id is None:
            settings.decoder_start_token_id = 1

        def call(batch: int, length: int) -> Kwargs:
            return {"input_ids": ids(batch, length), "attention_mask": mask(batch, length, left=False)}

        forward = [
            {**call(2, 7), "decoder_input_ids": ids(2, 5)},
            {**call(3, 11), "decoder_input_ids": ids(3, 6)},
        ]
        return Family(made, "seq2seq", forward, [{**call(2, 7), **GENERATE}, {**call(3, 11), **GENERATE}])

    FAMILIES[name] = family


def vision(
    name: str,
    config: str,
    model: str,
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (32, 32)),
    **values: Any,
) -> None:
    def family() -> Family:
        made = build(config, model, values)
        calls = [
            {"pixel_values": torch.randn(batch, 3, *size)} for batch, size in zip((2, 3), sizes, strict=True)
        ]
        return Family(made, "vision", calls)

    FAMILIES[name] = family


def audio(name: str, config: str, model: str) -> None:
    def family() -> Family:
        values = {
            "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64, "conv_dim": (16, 16, 16), "conv_stride": (4, 4, 2), "conv_kernel": (8, 4, 4),
            "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "pad_token_id": 0,
        }  # fmt: skip
        made = build(config, model, values)

        def call(batch: int, length: int) -> Kwargs:
            valid = torch.ones(batch, length, dtype=torch.int64)
            valid[0, -200:] = 0
            return {"input_values": torch.randn(batch, length), "attention_mask": valid}

        return Family(made, "audio", [call(2, 1600), call(3, 2400)])

    FAMILIES[name] = family


def dual(name: str, config: str, text: str, tower: str, model: str, **more: Any) -> None:
    def family() -> Family:
        words = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"} | {
            "max_position_embeddings": 64
        }
        values = {
            "text_config": getattr(transformers, text)(**words).to_dict(),
            "vision_config": getattr(transformers, tower)(**VISION).to_dict(),
            **more,
        }
        made = build(config, model, values)

        def call(texts: int, length: int, images: int) -> Kwargs:
            tokens = ids(texts, length)
            tokens[:, -1] = 2
            kwargs = {"input_ids": tokens, "pixel_values": torch.randn(images, 3, 32, 32)}
            return kwargs | {"attention_mask": torch.ones_like(tokens)}

        return Family(made, "dual", [call(2, 7, 3), call(3, 9, 2)])

    FAMILIES[name] = family


def vlm(
    name: str, make: Callable[[], torch.nn.Module], images: Callable[[int], torch.Tensor], tokens: int
) -> None:
    def family() -> Family:
        torch.manual_seed(0)
        made = make().eval()
        settings = made.generation_config
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = 0, 1, 2

        def call(batch: int, length: int) -> Kwargs:
            start = torch.full((batch, 1), 1)
            picture = torch.full((batch, tokens), IMAGE_TOKEN)
            text = torch.cat([start, picture, ids(batch, length)], 1)
            return {"input_ids": text, "pixel_values": images(batch), "attention_mask": torch.ones_like(text)}

        return Family(
            made, "vlm", [call(2, 6), call(3, 9)], [{**call(2, 6), **GENERATE}, {**call(3, 9), **GENERATE}]
        )

    FAMILIES[name] = family


# Text decoders
decoder("llama", "LlamaConfig", "LlamaForCausalLM")
decoder("mistral", "MistralConfig", "MistralForCausalLM", sliding_window=16)
decoder("qwen2", "Qwen2Config", "Qwen2ForCausalLM")
decoder("qwen3", "Qwen3Config", "Qwen3ForCausalLM", head_dim=8)
decoder(
    "qwen3_moe",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
decoder("mixtral", "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
decoder("gemma", "GemmaConfig", "GemmaForCausalLM", head_dim=8)
decoder("gemma2", "Gemma2Config", "Gemma2ForCausalLM", head_dim=8, sliding_window=16, query_pre_attn_scalar=8)
decoder("gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=8, sliding_window=16, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"])  # fmt: skip
decoder("phi", "PhiConfig", "PhiForCausalLM")
decoder("phi3", "Phi3Config", "Phi3ForCausalLM", original_max_position_embeddings=128)
decoder("olmo2", "Olmo2Config", "Olmo2ForCausalLM")
decoder("stablelm", "StableLmConfig", "StableLmForCausalLM")
decoder("cohere", "CohereConfig", "CohereForCausalLM")
decoder("granite", "GraniteConfig", "GraniteForCausalLM")
_GPT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings")  # fmt: skip
decoder("gpt2", "GPT2Config", "GPT2LMHeadModel", drop=_GPT, n_embd=32, n_layer=2, n_head=4, n_positions=128)
decoder("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", drop=("num_key_value_heads",))
decoder(
    "opt",
    "OPTConfig",
    "OPTForCausalLM",
    drop=("num_key_value_heads", "intermediate_size"),
    ffn_dim=64,
    word_embed_proj_dim=32,
)
decoder("bloom", "BloomConfig", "BloomForCausalLM", n_layer=2, n_head=4,
        drop=("num_key_value_heads", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"))  # fmt: skip
decoder(
    "falcon",
    "FalconConfig",
    "FalconForCausalLM",
    drop=("num_key_value_heads", "intermediate_size"),
    ffn_hidden_size=64,
)
decoder("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)  # fmt: skip
# State space and hybrids
_NO_ATTENTION = ("num_key_value_heads", "intermediate_size", "num_attention_heads", "max_position_embeddings")
decoder(
    "mamba",
    "MambaConfig",
    "MambaForCausalLM",
    drop=_NO_ATTENTION,
    state_size=8,
    conv_kernel=4,
    expand=2,
    time_step_rank=4,
)
decoder("mamba2", "Mamba2Config", "Mamba2ForCausalLM", drop=_NO_ATTENTION, state_size=8, conv_kernel=4, expand=2, num_heads=8,
        head_dim=8, n_groups=1, chunk_size=4)  # fmt: skip
decoder(
    "lfm2",
    "Lfm2Config",
    "Lfm2ForCausalLM",
    layer_types=["conv", "full_attention"],
    block_multiple_of=8,
    conv_L_cache=3,
)
decoder("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])  # fmt: skip
decoder("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])  # fmt: skip
_SSM = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_SSM2 = {**_SSM, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
decoder("granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"],
        num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=16, **_SSM2)  # fmt: skip
decoder("bamba", "BambaConfig", "BambaForCausalLM", attn_layer_indices=[1], **_SSM2)
decoder(
    "falcon_h1",
    "FalconH1Config",
    "FalconH1ForCausalLM",
    mamba_d_ssm=32,
    **{**_SSM2, "mamba_n_heads": 4, "mamba_expand": 1},
)
decoder("jamba", "JambaConfig", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_dt_rank=4, use_mamba_kernels=False, **_SSM)  # fmt: skip
decoder("zamba2", "Zamba2Config", "Zamba2ForCausalLM", layers_block_type=["mamba", "hybrid"], mamba_ngroups=1, n_mamba_heads=8,
        mamba_headdim=8, chunk_size=4, use_mamba_kernels=False, use_mem_eff_path=False, **_SSM)  # fmt: skip
decoder("nemotron_h", "NemotronHConfig", "NemotronHForCausalLM", layers_block_type=["mamba", "attention"], mamba_num_heads=8,
        mamba_head_dim=8, ssm_state_size=8, n_groups=1, conv_kernel=4, chunk_size=4, head_dim=8)  # fmt: skip
decoder("minimax", "MiniMaxConfig", "MiniMaxForCausalLM", head_dim=8, layer_types=["linear_attention", "full_attention"],
        num_local_experts=2, num_experts_per_tok=1, block_size=4)  # fmt: skip
decoder("recurrent_gemma", "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=16, conv1d_width=4,
        block_types=["recurrent", "attention"], head_dim=8)  # fmt: skip
decoder("deepseek_v4", "DeepseekV4Config", "DeepseekV4ForCausalLM")
# Encoders
encoder("bert", "BertConfig", "BertForSequenceClassification", types=True)
encoder("roberta", "RobertaConfig", "RobertaForSequenceClassification")
encoder("albert", "AlbertConfig", "AlbertForSequenceClassification", types=True, embedding_size=16)
encoder("electra", "ElectraConfig", "ElectraForSequenceClassification", types=True, embedding_size=32)
encoder("distilbert", "DistilBertConfig", "DistilBertForSequenceClassification", dim=32, hidden_dim=64, n_layers=2, n_heads=4,
        drop=("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))  # fmt: skip
encoder("deberta_v2", "DebertaV2Config", "DebertaV2ForSequenceClassification", types=True, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=8, type_vocab_size=2)  # fmt: skip
encoder("modernbert", "ModernBertConfig", "ModernBertForMaskedLM", local_attention=8, global_attn_every_n_layers=2, cls_token_id=1,
        sep_token_id=2)  # fmt: skip
# Encoder-decoders
seq2seq("t5", "T5Config", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2,
        num_decoder_layers=2, num_heads=4, relative_attention_num_buckets=8, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0)  # fmt: skip
_BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}  # fmt: skip
seq2seq("bart", "BartConfig", "BartForConditionalGeneration", **_BART, forced_eos_token_id=None)
seq2seq("marian", "MarianConfig", "MarianMTModel", **_BART, forced_eos_token_id=None)
seq2seq("mbart", "MBartConfig", "MBartForConditionalGeneration", **_BART, forced_eos_token_id=None)


def _whisper() -> Family:
    values = {
        "vocab_size": VOCABULARY, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_source_positions": 30, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    made = build("WhisperConfig", "WhisperForConditionalGeneration", values)
    settings = made.generation_config
    settings.decoder_start_token_id, settings.is_multilingual, settings.return_timestamps = 3, False, False
    settings.suppress_tokens = settings.begin_suppress_tokens = settings.forced_decoder_ids = None
    forward = [
        {"input_features": torch.randn(b, 16, 60), "decoder_input_ids": ids(b, n)}
        for b, n in ((2, 5), (3, 7))
    ]
    return Family(
        made, "seq2seq", forward, [{"input_features": torch.randn(b, 16, 60), **GENERATE} for b in (2, 3)]
    )


FAMILIES["whisper"] = _whisper
# Vision
vision("vit", "ViTConfig", "ViTForImageClassification", **VISION)
vision("deit", "DeiTConfig", "DeiTForImageClassification", **VISION)
vision("dinov2", "Dinov2Config", "Dinov2ForImageClassification", sizes=((48, 64), (64, 40)), hidden_size=32, num_hidden_layers=2,
       num_attention_heads=4, image_size=32, patch_size=8)  # fmt: skip
vision("resnet", "ResNetConfig", "ResNetForImageClassification", sizes=((32, 48), (64, 40)), embedding_size=8, hidden_sizes=[8, 16],
       depths=[1, 1], layer_type="basic")  # fmt: skip
vision("convnext", "ConvNextConfig", "ConvNextForImageClassification", sizes=((64, 32), (32, 96)), hidden_sizes=[8, 16, 16, 16],
       depths=[1, 1, 1, 1])  # fmt: skip
vision("swin", "SwinConfig", "SwinForImageClassification", image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 2],
       window_size=4)  # fmt: skip
# Audio
audio("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForCTC")
audio("hubert", "HubertConfig", "HubertForCTC")
# Text and image
dual("clip", "CLIPConfig", "CLIPTextConfig", "CLIPVisionConfig", "CLIPModel", projection_dim=16)
dual("siglip", "SiglipConfig", "SiglipTextConfig", "SiglipVisionConfig", "SiglipModel")


def _llava() -> torch.nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION).to_dict(),
        text_config=transformers.LlamaConfig(**TEXT).to_dict(),
        image_token_id=IMAGE_TOKEN, image_token_index=IMAGE_TOKEN, image_seq_length=16, vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def _idefics3() -> torch.nn.Module:
    config = transformers.Idefics3Config(
        vision_config=dict(VISION), text_config={**TEXT, "model_type": "llama"}, image_token_id=IMAGE_TOKEN, scale_factor=2,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config)


vlm("llava", _llava, lambda batch: torch.randn(batch, 3, 32, 32), 16)
vlm("idefics3", _idefics3, lambda batch: torch.randn(batch, 1, 3, 32, 32), 4)
