# Origin: pytorch/pytorch#47738, huggingface/transformers#13526
# Lesson: boolean indexing that selects nothing: the output has 0 elements, .max() of an empty
#         difference raises. Same shape and dtype is the whole comparison.
import torch
import torch.nn as nn


class Select(nn.Module):
    def forward(self, x):
        return x[x > 0], (x > 0).nonzero()


def build_model():
    return Select().eval()


def calls():
    g = torch.Generator().manual_seed(31)
    return [
        ((torch.randn(4, 2, generator=g),), {}),
        ((torch.full((3, 2), -1.0),), {}),
    ]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
    "naive": "zero-size array to reduction operation maximum",
}
