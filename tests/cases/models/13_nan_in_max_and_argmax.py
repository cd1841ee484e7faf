# Origin: microsoft/onnxruntime#10514, pytorch/pytorch#72307, pytorch/pytorch#130826
# Lesson: torch max/argmax/max_pool propagate NaN, onnxruntime ignores it depending on its
#         position. Clip, Min, Max, Relu, Sort are consistent now. equal_nan=True alone is
#         right; 'skip NaN entries' is wrong.
import torch
import torch.nn as nn
import torch.nn.functional as F


class Peaks(nn.Module):
    def forward(self, x):
        return x.amax(1), x.argmax(1), F.max_pool1d(x.unsqueeze(1), 2), x.clamp(-1.0, 1.0)


def build_model():
    return Peaks().eval()


def calls():
    nan = float("nan")
    clean = torch.tensor([[1.0, 4.0, -3.0, 2.0], [0.5, 0.0, 2.0, -1.0]])
    dirty = torch.tensor([[1.0, nan, -3.0, 2.0], [nan, nan, 2.0, -1.0], [0.0, 1.0, 5.0, -7.0]])
    return [((clean,), {}), ((dirty,), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "mismatch"],
    "verdict": "fail",
    "why": "NaN lost in ReduceMax / MaxPool, other index in ArgMax",
}
