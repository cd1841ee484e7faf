# Origin: pytorch/pytorch#189225, pytorch/pytorch#191855, pytorch/pytorch#126339,
#         microsoft/onnxscript#2674; the order effect was found while writing this set
# Lesson: GRU with a free number of steps. In a FRESH process torch.onnx.export(dynamo=True)
#         passes and is right for every length (although the declared output shape still says 7
#         steps). After any earlier export of a GRU in the same process (torch.export.export, or
#         the same onnx export once more) it fails: 'specialized it to be a constant (7)'. The
#         exporter swaps a python kernel of aten.gru without clearing
#         OpOverload._dispatch_cache; clearing that cache, or one process per export, restores
#         the pass. Verdicts must not depend on test order.
import torch
import torch.nn as nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 5, batch_first=True)

    def forward(self, x):
        return self.cell(x)


def build_model():
    torch.manual_seed(43)
    return Recurrent().eval()


def calls():
    g = torch.Generator().manual_seed(43)
    return [((torch.randn(2, 7, 4, generator=g),), {}), ((torch.randn(3, 9, 4, generator=g),), {})]


EXPECT = {
    "dynamic": {"x": {0: "batch", 1: "steps"}},
    "onnx_first": True,  # torch.export before it would change the verdict
    "torch_export": ["export_error", "export_error"],
    "onnx_dynamo": ["ok", "ok"],
    "onnx_second_time": ["export_error", "export_error"],
    "onnx_after_clearing_caches": ["ok", "ok"],
    "with_dim_auto": {"torch_export": ["ok", "run_error"], "onnx_dynamo": ["ok", "ok"]},
    "verdict": "pass",
    "naive": "fails when another recurrent model was exported before in the same process",
}
