# Origin: pytorch/pytorch#105242, pytorch/pytorch#140748
# Lesson: the same dict argument with its keys in another order in the second call. torch.export
#         re-orders by key; a flat positional feed for ONNX swaps two tensors of the same shape.
#         Map leaves by path, not by rank.
import torch
import torch.nn as nn


class FromDict(nn.Module):
    def forward(self, batch):
        return batch["q"] - 2.0 * batch["k"]


def build_model():
    return FromDict().eval()


def calls():
    g = torch.Generator().manual_seed(39)

    def t(n):
        return torch.randn(n, 3, generator=g)

    return [((), {"batch": {"q": t(2), "k": t(2)}}), ((), {"batch": {"k": t(5), "q": t(5)}})]


EXPECT = {
    "dynamic": {"batch": {"q": {0: "n"}, "k": {0: "n"}}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "onnx_input_names": ["batch_q", "batch_k"],
    "verdict": "pass",
    "naive": "flattening call 1 in insertion order feeds k as q",
}
