# Origin: pytorch/pytorch#126127, pytorch/pytorch#148629
# Lesson: the example has 4 rows in both inputs by accident; other calls show they are
#         independent. Inferring one shared symbol from a single call is wrong. With distinct
#         names both exporters keep them apart.
import torch
import torch.nn as nn


class Pair(nn.Module):
    def forward(self, left, right):
        return left @ right.transpose(0, 1), left.sum(1), right.sum(1)


def build_model():
    return Pair().eval()


def calls():
    g = torch.Generator().manual_seed(47)
    return [
        ((torch.randn(4, 3, generator=g), torch.randn(4, 3, generator=g)), {}),
        ((torch.randn(2, 3, generator=g), torch.randn(6, 3, generator=g)), {}),
    ]


EXPECT = {
    "dynamic": {"left": {0: "n"}, "right": {0: "m"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
}
