# Origin: pytorch/pytorch#136179, pytorch/pytorch#119180
# Lesson: a python int/float/bool argument becomes a constant of the example call. torch.export
#         keeps a guard (k == 2) and refuses the second call; the ONNX model has no input for k
#         and answers with the old value, without any error. A checker must compare non-tensor
#         leaves between calls and must replay EVERY call.
import torch
import torch.nn as nn


class Head(nn.Module):
    """Keeps the first k columns and scales them by k."""

    def forward(self, scores, k: int):
        return scores[:, :k] * k


def build_model():
    return Head().eval()


def calls():
    g = torch.Generator().manual_seed(1)
    return [
        ((torch.randn(2, 6, generator=g), 2), {}),
        ((torch.randn(5, 6, generator=g), 4), {}),
    ]


EXPECT = {
    "dynamic": {"scores": {0: "batch"}, "k": None},
    "torch_export": ["ok", "run_error"],
    "onnx_dynamo": ["ok", "mismatch"],
    "verdict": "fail",
    "why": "k is baked; call 1 comes back with 2 columns instead of 4",
}
