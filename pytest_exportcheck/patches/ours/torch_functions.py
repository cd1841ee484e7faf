"""Patches of torch itself. Each cures an export that fails, or gives wrong numbers, without it."""

from __future__ import annotations

from typing import Any

import torch

from ..patch import Patch

__all__ = ["loops_in_onnx", "torch_patches"]

_TORCH = (("torch", ">=2.13"),)


def _masked_rows_are_zero(original: Any) -> Any:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        output: torch.Tensor = original(query, key, value, attn_mask, *args, **kwargs)
        if attn_mask is None:
            return output
        allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
        return output.masked_fill(~allowed.any(-1, keepdim=True), 0.0)

    return scaled_dot_product_attention


def _repeat_by_expanding(original: Any) -> Any:
    def repeat_interleave(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        repeats = args[0] if args else kwargs.get("repeats")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(repeats, (int, torch.SymInt)):
            return original(input, *args, **kwargs)  # type: ignore[no-any-return]
        if dim is None:
            input, dim = input.flatten(), 0
        axis = dim % input.dim()
        shape = [*input.shape[: axis + 1], repeats, *input.shape[axis + 1 :]]
        # A copy, as of the operator, also where nothing is repeated.
        return input.unsqueeze(axis + 1).expand(shape).clone().flatten(axis, axis + 1)

    return repeat_interleave


def _all_of_it(original: Any) -> Any:
    def _is_all_true(self: torch.Tensor) -> torch.Tensor:
        # The operator takes booleans only, and says so.
        return self.all() if self.dtype == torch.bool else original(self)

    return _is_all_true


#: Of the functions that torch.onnx makes of the bodies of `torch.cond` and of loops.
_SUBGRAPHS = "pkg.torch.__subgraph__"


def _one_version_of_subgraphs(original: Any) -> Any:
    def call_op(op_type: str, *args: Any, _domain: str = "", **kwargs: Any) -> Any:
        outputs = original(op_type, *args, _domain=_domain, **kwargs)
        if _domain == _SUBGRAPHS and outputs:
            outputs[0].producer().version = None
        return outputs

    return call_op


def loops_in_onnx() -> Patch:
    """For models with `torch.while_loop`, also where the loop was rewritten."""
    return Patch(
        "torch.onnx._internal.exporter._torchlib.ops.hop.call_op",
        _one_version_of_subgraphs,
        why="beside torch.while_loop no torch.cond in a loop or a branch is converted: the first call of "
        "the test has another version of the domain of subgraphs",
        versions=_TORCH,
        wraps=True,
        runtimes=("onnx",),
    )


def torch_patches(model: Any, target: str) -> list[Patch]:
    """Every patch of torch."""
    why_repeat = (
        "the ONNX graph of aten.repeat_interleave.self_int fails to run with a dynamic number of repeats"
    )
    return [
        Patch(
            "torch.nn.functional.scaled_dot_product_attention",
            _masked_rows_are_zero,
            why="a row whose mask allows nothing is 0 in torch, and something else in the ONNX graph",
            versions=_TORCH,
            wraps=True,
            runtimes=("onnx",),
        ),
        Patch(
            "torch.Tensor._is_all_true",
            _all_of_it,
            why="torch.onnx has no function for aten._is_all_true, which torch._check_tensor_all asks",
            versions=_TORCH,
            wraps=True,
            runtimes=("onnx",),
        ),
        *(
            Patch(path, _repeat_by_expanding, why=why_repeat, versions=_TORCH, wraps=True, runtimes=("onnx",))
            for path in ("torch.repeat_interleave", "torch.Tensor.repeat_interleave")
        ),
        loops_in_onnx(),
    ]
