"""Rotary embeddings of type ``dynamic`` whose frequencies depend on the positions alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..patch import LOADED, Patch

__all__ = ["rope_patches"]


def _stateless(original: Any) -> Any:
    rope_forward = inspect.unwrap(original)

    @torch.no_grad()
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        rope_type = self.rope_type if layer_type is None else self.rope_type[layer_type]
        named = {} if layer_type is None else {"layer_type": layer_type}
        if "dynamic" not in rope_type:
            return original(self, x, position_ids, **named)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix = "" if layer_type is None else f"{layer_type}_"
        length = torch.max(position_ids) + 1
        scaled, _ = ROPE_INIT_FUNCTIONS[rope_type](
            self.config, x.device, seq_len=length, layer_type=layer_type
        )
        plain = getattr(self, f"{prefix}original_inv_freq").to(x.device)
        name = f"{prefix}inv_freq"
        before = self._buffers[name]
        # The function reads the buffer; what it is given here must not outlive the call.
        self._buffers[name] = torch.where(length > self.original_max_seq_len, scaled, plain)
        try:
            return rope_forward(self, x, position_ids, **named)
        finally:
            self._buffers[name] = before

    return forward


def _is_dynamic(function: Any) -> bool:
    """Whether `function` is decorated with ``dynamic_rope_update``."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if (
            code is not None
            and code.co_name == "wrapper"
            and code.co_filename.endswith("modeling_rope_utils.py")
        ):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _classes(model: Any) -> Iterator[type]:
    if model is None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        yield LlamaRotaryEmbedding
        return
    if model is LOADED:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models."):
                own = [value for value in vars(module).values() if isinstance(value, type)]
                yield from (cls for cls in own if cls.__module__ == name and hasattr(cls, "forward"))
        return
    seen = set()
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        named = types.values() if isinstance(types, dict) else [types]
        if type(module) not in seen and any("dynamic" in str(name) for name in named):
            seen.add(type(module))
            yield type(module)


def rope_patches(model: Any, target: str) -> list[Patch]:
    """The rotary embeddings of `model` that are of type ``dynamic`` (without a model: llama's)."""
    return [
        Patch(
            f"{cls.__module__}.{cls.__qualname__}.forward",
            _stateless,
            why="dynamic_frequency_update asks in Python whether a position exceeds the cached length",
            versions=(("transformers", ">=5.24"),),
            wraps=True,
            owner=cls,
            depends=("transformers.modeling_rope_utils.dynamic_rope_update",),
        )
        for cls in _classes(model)
        if _is_dynamic(cls.forward)  # type: ignore[attr-defined]
    ]
