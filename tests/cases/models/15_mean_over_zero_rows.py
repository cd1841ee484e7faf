# Origin: pytorch/pytorch#86789, NVIDIA-NeMo/Speech#6381
# Lesson: a zero-size dimension reduced: torch mean -> NaN, sum -> 0, prod -> 1; onnxruntime
#         mean -> 0. max over an empty difference is an exception in numpy and NaN in torch: a
#         checker must treat empty arrays explicitly, and still see this mismatch.
import torch
import torch.nn as nn


class Stats(nn.Module):
    def forward(self, rows):
        return rows.sum(0), rows.mean(0), rows * 2.0


def build_model():
    return Stats().eval()


def calls():
    g = torch.Generator().manual_seed(15)
    return [((torch.randn(4, 2, generator=g),), {}), ((torch.zeros(0, 2),), {})]


EXPECT = {
    "dynamic": {"rows": {0: "n"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "mismatch"],
    "verdict": "fail",
    "why": "mean of nothing: NaN against 0; the two other outputs agree",
}
