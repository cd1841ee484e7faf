# Origin: pytorch/pytorch#148980, pytorch/pytorch#151582
# Lesson: a python loop over a dimension is unrolled. With Dim.DYNAMIC (or a string name) export
#         refuses, which is honest; with Dim.AUTO the dimension is silently specialised in the
#         ExportedProgram (guard x.size()[1] == 3), yet the ONNX input still shows a symbol and
#         longer inputs give wrong numbers. Never use AUTO to decide 'exports with dynamic
#         shapes'.
import torch
import torch.nn as nn


class Accumulate(nn.Module):
    def forward(self, x):
        h = torch.zeros(x.shape[0], x.shape[2])
        for step in range(x.shape[1]):
            h = torch.tanh(h + x[:, step])
        return h


def build_model():
    return Accumulate().eval()


def calls():
    g = torch.Generator().manual_seed(3)
    return [
        ((torch.randn(2, 3, 4, generator=g),), {}),
        ((torch.randn(3, 5, 4, generator=g),), {}),
    ]


EXPECT = {
    "dynamic": {"x": {0: "batch", 1: "steps"}},
    "dims_mode": "AUTO",
    "torch_export": ["ok", "run_error"],
    "onnx_dynamo": ["ok", "mismatch"],
    "with_dim_dynamic": {"torch_export": "export_error", "onnx_dynamo": "export_error"},
    "verdict": "fail",
    "why": "5 steps are answered with the 3-step program",
}
