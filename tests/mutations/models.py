"""Right models, small: each is exported once, and then broken in many ways."""

from __future__ import annotations

__all__ = ["MODELS", "SOURCE"]

#: What the factories of `MODELS` name; written beside the specs.
SOURCE = '''
import torch
from torch import nn


def g():
    return torch.Generator().manual_seed(5)


class Mlp(nn.Module):
    """Two inputs and two outputs of one shape, and a square one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, a, b):
        y = self.norm(nn.functional.gelu(self.first(a)) - b)
        return {"y": y, "z": self.second(y), "gram": y.T @ b}


def mlp_calls():
    draw = g()
    return [
        ((torch.randn(n, 6, generator=draw), torch.randn(n, 6, generator=draw) * 3), {}) for n in (3, 5)
    ]


class Detector(nn.Module):
    """Coordinates in pixels and scores below one in one output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, image):
        x = torch.relu(self.norm(self.conv(image)))
        x = nn.functional.avg_pool2d(x, 2, padding=1, count_include_pad=False)
        return torch.cat([self.boxes(x) * 1000, self.scores(x).sigmoid()], 1).flatten(2)


def detector_calls():
    draw = g()
    return [((torch.rand(n, 3, 2 * h, 2 * h + 8, generator=draw),), {}) for n, h in ((2, 6), (3, 8))]


class Odd(nn.Module):
    """Integers, booleans, infinities and None among the outputs."""

    def forward(self, x, threshold):
        hit = x > threshold
        scores = torch.where(hit, x, torch.full_like(x, float("-inf")))
        return {
            "ids": x.argmax(-1),
            "hit": hit,
            "scores": scores,
            "none": None,
            "count": hit.sum(-1),
            "last": torch.softmax(x, -1).cumsum(-1),
        }


class Variance(nn.Module):
    """Differences of large numbers: eager and runtime round them otherwise by more than the tolerance."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        with torch.no_grad():
            self.first.bias.fill_(60)
            self.first.weight.mul_(3)

    def forward(self, x, weights, attention_mask):
        y = self.first(torch.where(attention_mask > 0, x, -x))
        weights = torch.softmax(weights, -1)
        square = (y * y).sum(-1)
        return {
            "variance": (weights * y * y).sum(-1) - (weights * y).sum(-1) ** 2,
            "distances": square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * y @ y.transpose(-1, -2),
            "kept": attention_mask.sum(-1),
            "second": self.second(y),
        }


def variance_calls():
    draw = g()
    made = []
    for n in (17, 23):
        x, weights = torch.randn(3, n, 24, generator=draw), torch.randn(3, n, 24, generator=draw)
        made.append(((x, weights, (torch.rand(3, n, 24, generator=draw) > 0.4).long()), {}))
    return made


def bert():
    """With biases: those of a random model are zero, and one that is dropped would change nothing."""
    from transformers import AutoModel, BertConfig

    # With the usual 0.02 a random model attends nearly evenly, and a scale that is off by 1% does not show.
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model, draw = AutoModel.from_config(config), g()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    return model


def odd_calls():
    made = []
    for n in (2, 4):
        x = (torch.randn(n, 7, generator=g()) * 2).round()
        made.append(((x, torch.zeros(n, 1)), {}))
    return made
'''

_HEAD = "exportcheck: 1\n"

#: Name -> text of its spec.
MODELS = {
    "mlp": _HEAD + 'model: {factory: "models.py:Mlp"}\nobserve: {calls: "models.py:mlp_calls"}\n',
    "detector": _HEAD
    + 'model: {factory: "models.py:Detector"}\nobserve: {calls: "models.py:detector_calls"}\n',
    "variance": _HEAD
    + 'model: {factory: "models.py:Variance"}\nobserve: {calls: "models.py:variance_calls"}\n',
    "odd": _HEAD + 'model: {factory: "models.py:Odd"}\nobserve: {calls: "models.py:odd_calls"}\n',
    "llama": _HEAD
    + """
model:
  type: llama
  auto_class: AutoModelForCausalLM
  config: {vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, pad_token_id: 0,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, bos_token_id: 1,
           eos_token_id: 2}
observe:
  calls:
    - generate:
        input_ids: "int64[3, 7] < 64"
        attention_mask: "int64[3, 7] padded left 2"
        max_new_tokens: 3
        min_new_tokens: 3
        do_sample: false
  batch_dims: true
compare:
  logits: {where: attention_mask}
""",
    "bert": _HEAD
    + """
model: {factory: "models.py:bert"}
observe:
  calls:
    - forward: {input_ids: "int64[2, 9] < 64", attention_mask: "int64[2, 9] padded right 3",
                token_type_ids: "int64[2, 9] < 2"}
    - forward: {input_ids: "int64[3, 6] < 64", attention_mask: "int64[3, 6] padded right 2",
                token_type_ids: "int64[3, 6] < 2"}
""",
    "t5": _HEAD
    + """
model:
  type: t5
  auto_class: AutoModelForSeq2SeqLM
  config: {vocab_size: 64, d_model: 32, d_kv: 8, d_ff: 48, num_layers: 1, num_decoder_layers: 1, num_heads: 4,
           relative_attention_num_buckets: 8, decoder_start_token_id: 0, pad_token_id: 0, use_cache: false}
observe:
  calls:
    - forward: {input_ids: "int64[2, 9] < 64", attention_mask: "int64[2, 9] padded right 3",
                decoder_input_ids: "int64[2, 5] < 64"}
    - forward: {input_ids: "int64[3, 6] < 64", attention_mask: "int64[3, 6] padded right 2",
                decoder_input_ids: "int64[3, 7] < 64"}
""",
}
