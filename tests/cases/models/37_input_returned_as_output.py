# Origin: pytorch/pytorch#173076, pytorch/pytorch#167848, microsoft/onnxruntime#26339
# Lesson: the model returns one of its inputs. 2.9 wrote a graph onnxruntime answered wrongly;
#         2.13 is right but renames the INPUT to 'x_orig' (the output keeps 'x'). Feeding by
#         parameter name fails with 'missing required input'.
import torch
import torch.nn as nn


class Through(nn.Module):
    def forward(self, x, y):
        return x, x + y


def build_model():
    return Through().eval()


def calls():
    g = torch.Generator().manual_seed(37)
    return [
        ((torch.randn(2, 3, generator=g), torch.randn(2, 3, generator=g)), {}),
        ((torch.randn(5, 3, generator=g), torch.randn(5, 3, generator=g)), {}),
    ]


EXPECT = {
    "dynamic": {"x": {0: "n"}, "y": {0: "n"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["ok", "ok"],
    "onnx_input_names": ["x_orig", "y"],
    "verdict": "pass",
    "naive": "feed {'x': ..., 'y': ...} misses x_orig",
}
