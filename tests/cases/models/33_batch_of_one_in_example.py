# Origin: pytorch/pytorch#151582, pytorch/pytorch#157621, pytorch/pytorch#149065, hqucms/weaver-core#29
# Lesson: example with batch 1 and a dynamic batch: torch.export(Dim.DYNAMIC) raises,
#         torch.export(Dim.AUTO) silently makes it static, torch.onnx.export(dynamo=True) of
#         2.13 keeps it dynamic and is right. Three exporters, three answers on the same
#         arguments: pick another call (batch 3) as the example for torch.export.
import torch
import torch.nn as nn


class Project(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


def build_model():
    torch.manual_seed(33)
    return Project().eval()


def calls():
    g = torch.Generator().manual_seed(33)
    return [((torch.randn(1, 4, generator=g),), {}), ((torch.randn(3, 4, generator=g),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["export_error", "export_error"],
    "from_call_1": {"torch_export": ["ok", "ok"], "onnx_dynamo": ["ok", "ok"]},
    "onnx_dynamo": ["ok", "ok"],
    "verdict": "pass",
}
