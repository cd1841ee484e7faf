"""Faults to plant: in a translation, an optimizer, a runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnxscript import opset18 as op

__all__ = ["Deep", "Gelu", "Raises", "corrupted_runtime", "wrong_gelu"]


class Raises(torch.nn.Module):
    """Branches on data: no exporter takes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x * 3


class Wrap(torch.nn.Module):
    """A level around `inner`."""

    def __init__(self, inner: torch.nn.Module, size: int = 6) -> None:
        super().__init__()
        self.first = torch.nn.Linear(size, size)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.first(x)))


class Deep(torch.nn.Module):
    """`Raises` three levels down: ``block.inner.inner``."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Wrap(Wrap(Raises()))
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


class Gelu(torch.nn.Module):
    """Linear, GELU, softmax: a node on each side of the one that the faults are planted in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(4, 5)
        self.b = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.b(torch.nn.functional.gelu(self.a(x))).softmax(-1), "mean": x.mean(-1)}


def wrong_gelu(x: Any, approximate: str = "none") -> Any:
    """SiLU: close to GELU, and not it."""
    return op.Mul(x, op.Sigmoid(x))


def corrupted_runtime(
    monkeypatch: pytest.MonkeyPatch,
    corrupt: Callable[[onnx.ModelProto], None],
    level: str = "ORT_DISABLE_ALL",
    unless: str = "",
) -> None:
    """Let ONNX Runtime run another graph, from a level of optimization on, unless one is disabled."""
    real = onnxruntime.InferenceSession
    threshold = getattr(onnxruntime.GraphOptimizationLevel, level)

    def session(model: bytes, options: Any, **keywords: Any) -> Any:
        disabled = keywords.get("disabled_optimizers") or []
        if options.graph_optimization_level.value >= threshold.value and unless not in disabled:
            proto = onnx.load_from_string(model)
            corrupt(proto)
            model = proto.SerializeToString()
        return real(model, options, **keywords)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
