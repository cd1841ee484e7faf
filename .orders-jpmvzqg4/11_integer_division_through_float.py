# Origin: microsoft/onnxscript#2342, pytorch/pytorch#44692
# Lesson: torch.div(int, int, rounding_mode=...) goes through float32: off by one above 2**24,
#         by millions above 2**53. Integer outputs must be compared exactly, never with a
#         relative tolerance (rtol 1e-3 hides it).
import torch
import torch.nn as nn


class Buckets(nn.Module):
    def forward(self, ids, width):
        return torch.div(ids, width, rounding_mode="floor")


def build_model():
    return Buckets().eval()


def calls():
    return [
        ((torch.tensor([-7, 7, 100]), torch.tensor([2, -2, 7])), {}),
        ((torch.tensor([-7, 7, 16777217, 2**53 + 1]), torch.tensor([2, -2, 1, 3])), {}),
    ]


EXPECT = {
    "dynamic": {"ids": {0: "n"}, "width": {0: "n"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "mismatch"],
    "verdict": "fail",
    "why": "int64 values above 2**24 lose their last bits",
}
