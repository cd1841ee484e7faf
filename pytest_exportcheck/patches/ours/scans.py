"""State space models over prompts of any length: the loop over time as a scan.

The mode ``rewrite`` finds this loop by itself where the state keeps its dtype; in float16 its first round
widens it, which no scan carries, and the mode ``transformers`` must cure it alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..edits import edited
from ..operators import scan
from ..patch import Patch, module_loaded

__all__ = ["scan_patches"]

_LOOP = """        scan_outputs = []
        for index in range(seq_len):
            # State calculation
            ssm_state = discrete_A[:, :, index] * ssm_state + deltaB_u[:, :, index]

            # Subsequent output
            scan_output = torch.matmul(ssm_state.to(input_dtype), C[:, index, :].unsqueeze(-1))
            scan_outputs.append(scan_output[:, :, 0])
        scan_output = torch.stack(scan_outputs, dim=-1)
"""

_SCAN = """        ssm_state, scan_output = over_time(ssm_state, discrete_A, deltaB_u, C, input_dtype)
"""


def _over_time(
    state: torch.Tensor, decay: torch.Tensor, added: torch.Tensor, read: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Last state [batch, width, n] and outputs [batch, width, time].

    `decay` and `added` are [batch, width, time, n], `read` is [batch, time, n].
    """

    def step(carried: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        kept, new, weights = inputs
        carried = kept * carried + new
        return carried, torch.matmul(carried.to(dtype), weights.unsqueeze(-1))[:, :, 0]

    # The loop widens the state in its first step, a scan wants one dtype throughout.
    state = state.to(torch.promote_types(torch.promote_types(decay.dtype, added.dtype), state.dtype))
    last, outputs = scan(step, state, (decay.movedim(2, 0), added.movedim(2, 0), read.movedim(1, 0)))
    return last, outputs.movedim(0, 2)


def _scanned(original: Any) -> Any:
    return edited(
        inspect.unwrap(original), (_LOOP, _SCAN), names={"over_time": _over_time}, drop_decorators=True
    )


def scan_patches(model: Any, target: str) -> list[Patch]:
    """The selective scans of mamba and of what is built from it."""
    patches = [
        Patch(
            f"transformers.models.{name}.modeling_{name}.mamba_selective_scan",
            _scanned,
            why="a Python loop over the prompt fixes its length in the graph",
            versions=(("transformers", ">=5.24"),),
            wraps=True,
            runtimes=("torch", "onnx"),
        )
        for name in ("mamba", "falcon_mamba", "jamba")
    ]
    return [patch for patch in patches if model is None or module_loaded(patch.target)]
