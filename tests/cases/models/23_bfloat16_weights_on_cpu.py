# Origin: microsoft/onnxruntime#26311, microsoft/onnxruntime#28768, pytorch/pytorch#143643
# Lesson: bfloat16 exports; the CPU provider has no arithmetic for it (NOT_IMPLEMENTED Gemm).
#         Inputs and outputs here are float32, so numpy feeding is not the obstacle. Expected
#         failure on CPU, to be decided separately on CUDA.
import torch
import torch.nn as nn


class Compressed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3).bfloat16()

    def forward(self, x):
        return self.inner(x.bfloat16()).float()


def build_model():
    torch.manual_seed(23)
    return Compressed().eval()


def calls():
    g = torch.Generator().manual_seed(23)
    return [((torch.randn(2, 4, generator=g),), {}), ((torch.randn(5, 4, generator=g),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["load_error", "load_error"],
    "verdict": "xfail",
    "why": "CPUExecutionProvider has no bfloat16 Gemm",
}
