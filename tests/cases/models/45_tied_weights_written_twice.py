# Origin: huggingface/optimum#1326, onnx/onnx#3278, onnxruntime/mobius#488
# Lesson: embedding and head share one parameter. The numbers are right, but the exporter's
#         constant folding writes a transposed second copy of the tensor: the file holds the
#         weight twice. Numerical verdict pass; a size or initializer budget in the golden
#         record is the only thing that can see it.
import torch
import torch.nn as nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 16)
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def build_model():
    torch.manual_seed(45)
    return Tied().eval()


def calls():
    return [
        ((torch.tensor([[1, 2, 3, 4], [7, 8, 9, 299]]),), {}),
        ((torch.tensor([[5, 6], [0, 1], [2, 2]]),), {}),
    ]


EXPECT = {
    "dynamic": {"ids": {0: "batch", 1: "length"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
    "weight_copies_in_file": 2,
}
