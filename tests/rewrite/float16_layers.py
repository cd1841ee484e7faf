"""Encoder layers of transformers that clamp infinite values in float16, small, as the parts of one model."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import transformers

__all__ = ["BART_LIKE", "FAMILIES", "Layers", "calls"]

_SIZES = {
    "vocab_size": 99,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "attn_implementation": "eager",
}
_ROWS = 24


def _modeling(family: str) -> Any:
    return import_module(f"transformers.models.{family}.modeling_{family}")


def _overflowing(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer as a layer norm: 0.5 for a row of equal numbers, beyond float16 for others."""
    for module in (layer.self_attn, layer.fc2):
        for name, value in module.named_parameters():
            if module is layer.fc2 or "out" in name:
                torch.nn.init.zeros_(value)
    torch.nn.init.constant_(layer.final_layer_norm.weight, 6e4)
    torch.nn.init.constant_(layer.final_layer_norm.bias, 0.5)
    return layer


def _bart_like(family: str, name: str, **more: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        config = getattr(transformers, f"{name}Config")(**_SIZES, **more)
        return _overflowing(getattr(_modeling(family), f"{name}EncoderLayer")(config))

    return make


def _led() -> torch.nn.Module:
    config = transformers.LEDConfig(**_SIZES, attention_window=[4], max_encoder_position_embeddings=64)
    return _overflowing(_modeling("led").LEDEncoderLayer(config, 0))


def _longt5() -> torch.nn.Module:
    config = transformers.LongT5Config(
        vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, local_radius=2
    )
    return _modeling("longt5").LongT5Block(config, has_relative_attention_bias=True)


def _nllb_moe() -> torch.nn.Module:
    config = transformers.NllbMoeConfig(**_SIZES, num_experts=2)
    return _modeling("nllb_moe").NllbMoeEncoderLayer(config, is_sparse=False)


_NO_MASK = {"attention_mask": None}

#: How each layer is made, and what it is called with beside the hidden states.
FAMILIES: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "bart": (_bart_like("bart", "Bart"), _NO_MASK),
    "marian": (_bart_like("marian", "Marian"), _NO_MASK),
    "plbart": (_bart_like("plbart", "PLBart"), _NO_MASK),
    "blenderbot_small": (_bart_like("blenderbot_small", "BlenderbotSmall"), _NO_MASK),
    "mvp": (_bart_like("mvp", "Mvp"), {**_NO_MASK, "self_attn_prompt": None}),
    "led": (
        _led,
        {
            "attention_mask": torch.zeros(1, _ROWS, dtype=torch.float16),
            "is_index_masked": torch.zeros(1, _ROWS, dtype=torch.bool),
            "is_index_global_attn": torch.zeros(1, _ROWS, dtype=torch.bool),
            "is_global_attn": False,
        },
    ),
    "longt5": (_longt5, {}),
    "nllb_moe": (_nllb_moe, _NO_MASK),
}

#: Those that overflow in the second call.
BART_LIKE = ("bart", "marian", "plbart", "blenderbot_small", "mvp", "led")


class Layers(torch.nn.Module):
    """The layers of some families, on the same hidden states ``float16[batch, 24, 16]``."""

    def __init__(self, *families: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({family: FAMILIES[family][0]() for family in families})
        self.half().eval()

    def forward(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for family, layer in self.layers.items():
            more = {
                name: value.expand(hidden_states.shape[0], -1) if isinstance(value, torch.Tensor) else value
                for name, value in FAMILIES[family][1].items()
            }
            out = layer(hidden_states, **more)
            found[family] = out[0] if isinstance(out, tuple) else out
        return found


def calls() -> list[tuple[tuple[torch.Tensor], dict[str, Any]]]:
    """Rows of equal numbers, and of different ones."""
    same = torch.ones(2, _ROWS, 16)
    different = torch.arange(16.0).expand(3, _ROWS, 16)
    return [((same.half(),), {}), ((different.half(),), {})]
