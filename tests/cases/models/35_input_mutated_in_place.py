# Origin: pytorch/pytorch#112429, pytorch/pytorch#95050, pytorch/pytorch#74801
# Lesson: forward modifies its input in place. If the observer stores references, the stored
#         inputs are already modified when they are replayed, and eager, ExportedProgram and
#         ONNX get three different inputs. Clone before the call, and clone again for each
#         replay.
import torch
import torch.nn as nn


class Clean(nn.Module):
    def forward(self, x):
        x[:, 0] = 0.0
        x.add_(1.0)
        return x.cumsum(1)


def build_model():
    return Clean().eval()


def calls():
    g = torch.Generator().manual_seed(35)
    return [((torch.randn(2, 3, generator=g),), {}), ((torch.randn(5, 3, generator=g),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
    "naive": "reusing the same tensors adds 1 once more per run",
}
