# Origin: pytorch/pytorch#186146
# Lesson: wrong in mid 2026 (values scattered in the wrong order, multimodal models were hit),
#         right on this stack. Regression guard: must pass, with two different numbers of
#         injected rows.
import torch
import torch.nn as nn


class Inject(nn.Module):
    """Writes image rows at the places of the image tokens."""

    def forward(self, embeds, mask, rows):
        return embeds.masked_scatter(mask.unsqueeze(-1), rows)


def build_model():
    return Inject().eval()


def calls():
    g = torch.Generator().manual_seed(41)

    def one(length, n):
        mask = torch.zeros(1, length, dtype=torch.bool)
        mask[0, 1 : 1 + n] = True
        return (torch.randn(1, length, 6, generator=g), mask, torch.randn(n, 6, generator=g)), {}

    return [one(8, 3), one(11, 5)]


EXPECT = {
    "dynamic": {"embeds": {1: "length"}, "mask": {1: "length"}, "rows": {0: "n"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
}
