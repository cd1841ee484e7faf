# Origin: pytorch/pytorch#160150, pytorch/pytorch#115431
# Lesson: outputs that are python numbers or booleans: torch.export returns them, the ONNX
#         conversion crashes ('int' object has no attribute 'name'). Worth an own diagnosis:
#         name the output path that holds a constant.
import torch
import torch.nn as nn


class WithMeta(nn.Module):
    def forward(self, x):
        return {"y": x * 2.0, "layers": 3, "cached": True}


def build_model():
    return WithMeta().eval()


def calls():
    g = torch.Generator().manual_seed(25)
    return [((torch.randn(2, 3, generator=g),), {}), ((torch.randn(5, 3, generator=g),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["export_error", "export_error"],
    "verdict": "fail",
    "why": "constant outputs are not supported by the converter",
}
