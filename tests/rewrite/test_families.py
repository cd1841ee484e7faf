"""Encoder layers in float16, whose test of infinite values stops the export: cured by the mode ``rewrite``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.helpers import make_run

from .helpers import verdict

pytestmark = pytest.mark.filterwarnings("ignore")

# The layer's own weights are chosen so that one call overflows, and the other does not.
_HEAD = """
import transformers as T


class Layer(nn.Module):
    def __init__(self, layer, **more):
        super().__init__()
        self.layer = layer
        self.more = more

    def forward(self, hidden_states):
        out = self.layer(hidden_states, **self.more)
        return out[0] if isinstance(out, tuple) else out


SIZES = dict(
    vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)


def normed(layer):
    '''Twice the layer norm: 0 for a row of equal numbers, beyond float16 for others.'''
    torch.nn.init.zeros_(layer.fc2.weight)
    torch.nn.init.zeros_(layer.fc2.bias)
    for name, value in layer.self_attn.named_parameters():
        if "out" in name:
            torch.nn.init.zeros_(value)
    torch.nn.init.constant_(layer.final_layer_norm.weight, 6e4)
    torch.nn.init.constant_(layer.final_layer_norm.bias, 0.5)
    return layer.eval()


def eager(config):
    config._attn_implementation = "eager"
    return config


def calls():
    one = torch.ones(2, 7, 16)
    return [((one.half(),), {}), ((torch.arange(16.0).expand(3, 9, 16).half() * SCALE,), {})]

"""

_FAMILIES = {
    "bart": "SCALE = 1\n\n\ndef build_model():\n    torch.manual_seed(0)\n    from transformers.models.bart "
    "import modeling_bart as m\n    c = eager(T.BartConfig(**SIZES))\n    return Layer(normed(m.BartEncoderLayer(c)), "
    "attention_mask=None)\n",
    "marian": "SCALE = 1\n\n\ndef build_model():\n    from transformers.models.marian import modeling_marian as m\n"
    "    c = eager(T.MarianConfig(**SIZES))\n    return Layer(normed(m.MarianEncoderLayer(c)), attention_mask=None)\n",
    "plbart": "SCALE = 1\n\n\ndef build_model():\n    from transformers.models.plbart import modeling_plbart as m\n"
    "    c = eager(T.PLBartConfig(**SIZES))\n    return Layer(normed(m.PLBartEncoderLayer(c)), attention_mask=None)\n",
    "blenderbot_small": "SCALE = 1\n\n\ndef build_model():\n    from transformers.models.blenderbot_small import "
    "modeling_blenderbot_small as m\n    c = eager(T.BlenderbotSmallConfig(**SIZES))\n"
    "    return Layer(normed(m.BlenderbotSmallEncoderLayer(c)), attention_mask=None)\n",
    "mvp": "SCALE = 1\n\n\ndef build_model():\n    from transformers.models.mvp import modeling_mvp as m\n"
    "    c = eager(T.MvpConfig(**SIZES))\n    return Layer(normed(m.MvpEncoderLayer(c)), attention_mask=None)\n",
    "led": "SCALE = 1\n\n\ndef build_model():\n    from transformers.models.led import modeling_led as m\n"
    "    c = eager(T.LEDConfig(**SIZES, attention_window=[4], max_encoder_position_embeddings=64))\n"
    "    return Layer(normed(m.LEDEncoderLayer(c, 0)), attention_mask=None)\n",
    "longt5": "SCALE = 4e3\n\n\ndef build_model():\n    torch.manual_seed(0)\n"
    "    from transformers.models.longt5 import modeling_longt5 as m\n"
    "    c = T.LongT5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,\n"
    "        encoder_attention_type='local', local_radius=2)\n"
    "    layer = m.LongT5LayerFF(c)\n"
    "    block = m.LongT5Block(c, has_relative_attention_bias=True)\n"
    "    torch.nn.init.ones_(block.layer[-1].DenseReluDense.wo.weight)\n"
    "    return Layer(block)\n",
    "nllb_moe": "SCALE = 4e3\n\n\ndef build_model():\n    torch.manual_seed(0)\n"
    "    from transformers.models.nllb_moe import modeling_nllb_moe as m\n"
    "    c = eager(T.NllbMoeConfig(**SIZES, num_experts=2))\n"
    "    layer = m.NllbMoeEncoderLayer(c, is_sparse=False)\n"
    "    torch.nn.init.constant_(layer.ffn.fc2.bias, 3e4)\n"
    "    return Layer(layer, attention_mask=None)\n",
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_encoder_layer(family: str, tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        _HEAD + _FAMILIES[family],
        "matrix: {exporters: [torch-export], patch_modes: [none], dtypes: [float16]}\n",
        name=family,
    )
    stage, failure, _ = verdict(run, "torch-export", "none", "float16")
    assert stage == "export"
    assert failure is not None
    assert "data-dependent" in failure.message
    calls = run.observe("cpu", "float16").calls
    limits = [max(leaf.abs().max().item() for _, leaf in call.output_leaves()) for call in calls]
    assert limits[0] < limits[1] == 64512.0  # clamped to 64504 in float16: both branches are in the observed calls
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, failure, record = verdict(run, exporter, "rewrite", "float16")
        assert stage == "pass", failure
        rewritten = record["patches"]["rewritten"]
        assert all(f"modeling_{family}." in name for name in rewritten)
        assert {target for targets in rewritten.values() for target in targets} == {"torch.where"}
        assert set(rewritten) <= set(record["patches"]["nodes"])
