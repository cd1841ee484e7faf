# Origin: pytorch/pytorch#137428
# Lesson: the repaired version of the data dependent `if`: torch.cond exports and both branches
#         are right. One call per branch is needed to prove it.
import torch
import torch.nn as nn


class Choose(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda t: t * 2.0, lambda t: t - 1.0, (x,))


def build_model():
    return Choose().eval()


def calls():
    return [((torch.full((2, 3), 4.0),), {}), ((torch.full((4, 3), -4.0),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
}
