# Origin: pytorch/pytorch#160150
# Lesson: None outputs (loss when no labels, caches when disabled) disappear from the ONNX
#         outputs: 4 leaves in eager, 2 outputs in ONNX. Drop the None leaves before zip(), and
#         check that the same leaves are None in every call.
import torch
import torch.nn as nn


class Outputs(nn.Module):
    def forward(self, x):
        return {"loss": None, "logits": x * 2.0, "hidden": (x + 1.0, None)}


def build_model():
    return Outputs().eval()


def calls():
    g = torch.Generator().manual_seed(29)
    return [((torch.randn(2, 3, generator=g),), {}), ((torch.randn(5, 3, generator=g),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
    "naive": "4 eager leaves against 2 ONNX outputs",
}
