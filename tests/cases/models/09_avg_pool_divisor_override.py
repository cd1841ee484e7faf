# Origin: related: pytorch/pytorch#183528, pytorch/pytorch#13934 (pooling semantics gap); found
#         while writing this set
# Lesson: divisor_override is dropped by the converter: static shapes, no warning, every number
#         off by the same factor. Verifying on the example call alone is enough here, and many
#         projects do not even do that.
import torch
import torch.nn as nn
import torch.nn.functional as F


class SumPool(nn.Module):
    """divisor_override=1 turns average pooling into sum pooling."""

    def forward(self, x):
        return F.avg_pool2d(x, 2, divisor_override=1)


def build_model():
    return SumPool().eval()


def calls():
    g = torch.Generator().manual_seed(9)
    return [
        ((torch.randn(2, 3, 8, 8, generator=g),), {}),
        ((torch.randn(3, 3, 6, 4, generator=g),), {}),
    ]


EXPECT = {
    "dynamic": {"x": {0: "batch", 2: "height", 3: "width"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["mismatch", "mismatch"],
    "verdict": "fail",
    "why": "results are 4 times too small",
}
