# Origin: pytorch/pytorch#103749, microsoft/onnxscript#2992, onnx/onnx#8068
# Lesson: same as the boolean mask but with an additive -inf mask: eager gives 0, ONNX gives
#         NaN. A max-abs-diff computed over finite values only reports 2e-7 and passes: NaN
#         positions must be compared as positions.
import torch
import torch.nn as nn
import torch.nn.functional as F


class BiasedAttention(nn.Module):
    def forward(self, query, key, value, bias):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def build_model():
    return BiasedAttention().eval()


def calls():
    g = torch.Generator().manual_seed(7)

    def one(batch, lq, lk):
        q = torch.randn(batch, 2, lq, 8, generator=g)
        k, v = (torch.randn(batch, 2, lk, 8, generator=g) for _ in range(2))
        bias = torch.zeros(batch, 1, lq, lk)
        bias[0, 0, 0] = float("-inf")
        return (q, k, v, bias), {}

    return [one(2, 5, 6), one(3, 4, 7)]


EXPECT = {
    "dynamic": {
        "query": {0: "batch", 2: "lq"},
        "key": {0: "batch", 2: "lk"},
        "value": {0: "batch", 2: "lk"},
        "bias": {0: "batch", 2: "lq", 3: "lk"},
    },
    "torch_export": ["ok", "ok"],
    "onnx_dynamo": ["mismatch", "mismatch"],
    "opset_23": ["ok", "ok"],
    "verdict": "fail",
    "why": "NaN where eager has 0",
}
