# Origin: pytorch/pytorch#139646, pytorch/pytorch#120075
# Lesson: nn.MultiheadAttention tests `k is v` and `q is k`: object identity is control flow. An
#         example f(x, x, x) exports the self-attention branch; a later cross-attention call
#         with another key length breaks at run time. The same-object pattern of every observed
#         call is part of the signature.
import torch
import torch.nn as nn


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, query, key, value):
        return self.attention(query, key, value, need_weights=False)[0]


def build_model():
    torch.manual_seed(5)
    return Attend().eval()


def calls():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2, 5, 8, generator=g)
    memory = torch.randn(3, 6, 8, generator=g)
    return [((x, x, x), {}), ((torch.randn(3, 4, 8, generator=g), memory, memory), {})]


EXPECT = {
    "dynamic": {"query": {0: "batch", 1: "lq"}, "key": {0: "batch", 1: "lk"}, "value": {0: "batch", 1: "lk"}},
    "torch_export": ["ok", "run_error"],
    "onnx_dynamo": ["ok", "run_error"],
    "from_call_1": {"torch_export": ["ok", "ok"], "onnx_dynamo": ["ok", "ok"]},
    "cloned_leaves": {"torch_export": ["ok", "ok"], "onnx_dynamo": ["ok", "ok"], "verdict": "pass"},
    "verdict": "fail",
    "why": "example call 0 fixes lq == lk; exported from call 1 both calls pass",
}
