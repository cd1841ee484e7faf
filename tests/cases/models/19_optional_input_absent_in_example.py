# Origin: pytorch/pytorch#156673, pytorch/pytorch#143124
# Lesson: mask=None in the example, a tensor later. The ONNX model has no mask input, so a
#         positional feed either errors or silently ignores the mask. The union of the inputs
#         over all calls is the signature; export needs the fullest call.
import torch
import torch.nn as nn


class MaybeMask(nn.Module):
    def forward(self, x, mask=None):
        y = x + 1.0
        return y if mask is None else y * mask


def build_model():
    return MaybeMask().eval()


def calls():
    g = torch.Generator().manual_seed(19)
    return [
        ((torch.randn(2, 3, generator=g),), {}),
        ((torch.randn(4, 3, generator=g),), {"mask": torch.zeros(4, 3)}),
    ]


EXPECT = {
    "dynamic": {"x": {0: "batch"}},
    "dynamic_full": {"x": {0: "batch"}, "mask": {}},
    "torch_export": ["ok", "run_error"],
    "onnx_dynamo": ["ok", "run_error"],
    "verdict": "fail",
    "why": "the second call has an input the exported model does not know; dropping it gives wrong numbers",
}
