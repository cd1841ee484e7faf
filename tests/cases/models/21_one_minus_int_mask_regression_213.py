# Origin: pytorch/pytorch#194381, huggingface/transformers#48191
# Lesson: `1.0 - attention_mask` (int64) exported with torch 2.11 and 2.12, and raises a
#         ConversionError in 2.13.0. The canonical version-upgrade regression: the golden file
#         says pass, the new stack says fail, and the report must name the versions. `1.0 -
#         mask.float()` passes.
import torch
import torch.nn as nn


class ExtendMask(nn.Module):
    def forward(self, x, mask):
        return x + (1.0 - mask) * -10000.0


def build_model():
    return ExtendMask().eval()


def calls():
    g = torch.Generator().manual_seed(21)
    return [
        ((torch.randn(2, 3, generator=g), torch.tensor([[1, 1, 0], [1, 1, 1]])), {}),
        ((torch.randn(3, 3, generator=g), torch.ones(3, 3, dtype=torch.int64)), {}),
    ]


EXPECT = {
    "dynamic": {"x": {0: "batch"}, "mask": {0: "batch"}},
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["export_error", "export_error"],
    "verdict": "fail",
    "why": "type promotion pass of torch 2.13.0",
}
