"""Conversions of earlier runs: what one depends on, and an ONNX model without weights and paths for each.

Weights that the model shares with the program are not in an entry: they are those of the program that asks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .cache_files import CacheFiles, Refused
from .fingerprint import version_of
from .guards import Comparison, Decided
from .tables import only_known_functions

__all__ = ["ConversionCache", "Found"]

#: Distributions whose version decides what a conversion makes.
_PACKAGES = (
    *("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "transformers"),
    *("numpy", "sympy", "ml-dtypes", "torchvision"),
)

#: Variables that torch.onnx and onnxscript read.
_VARIABLES = ("TORCHLIB_", "TORCH_ONNX", "TORCHONNX", "ONNX")

#: Notes at nodes with lines of source: the paths in them are those of one machine.
_PATHS = "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class Found:
    """A conversion of an earlier run."""

    model: Any
    decided: Decided


class ConversionCache:
    """The entries of one directory.

    Parameters
    ----------
    folder:
        Made at the first entry.
    limit:
        Bytes; beyond it the entries that were not used for longest are removed.
    salt:
        More that every key depends on.
    """

    def __init__(self, folder: Path, limit: int, salt: str = "") -> None:
        self._files = CacheFiles(folder, limit, "conversion", "model.onnx")
        self._salt = salt
        #: Weights are the same tensors in every case of a spec: (how often written to, digest).
        self._digests: Any = WeakIdKeyDictionary()

    def key(
        self, *, graph: str, weights: Mapping[str, torch.Tensor], settings: str, patches: str, exporter: str
    ) -> dict[str, Any] | None:
        """All that a conversion depends on; ``None`` where functions of the user's take part in it."""
        if not only_known_functions():
            return None
        return {
            "graph": graph,
            "weights": {name: self._digest(tensor) for name, tensor in weights.items()},
            "exporter": exporter,
            "settings": settings,
            "patches": patches,
            "code": _code_digest(),
            "versions": _versions(),
            "variables": {n: v for n, v in sorted(os.environ.items()) if n.startswith(_VARIABLES)},
            # A warning that is an error is a failure of the conversion.
            "errors": sorted(_filters()),
            "salt": self._salt,
        }

    def _digest(self, tensor: torch.Tensor) -> str:
        version = version_of(tensor)
        known = self._digests.get(tensor)
        if known is None or known[0] != version:
            known = self._digests[tensor] = (version, _digest(tensor))
        return str(known[1])

    def read(
        self, key: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> tuple[Found | None, list[str]]:
        """(the conversion, or ``None``; a word on an entry that is there and cannot be used)."""

        def use(manifest: dict[str, Any], data: bytes) -> Found:
            decided = {
                str(label): list(map(Comparison.from_plain, comparisons))
                for label, comparisons in manifest["comparisons"].items()
            }
            return Found(_from_bytes(data, manifest["weights"], weights), decided)

        return self._files.read(key, use)

    def write(
        self,
        key: Mapping[str, Any],
        model: Any,
        weights: Mapping[str, torch.Tensor],
        decided: Decided,
    ) -> list[str]:
        """Keep a conversion; a word if that cannot be done, once per reason."""

        def make() -> tuple[dict[str, Any], bytes]:
            data, shared = _to_bytes(model, weights)
            # Places are lines of one machine's files.
            texts = {
                label: [{**comparison.to_plain(), "place": ""} for comparison in comparisons]
                for label, comparisons in decided.items()
            }
            return {"weights": shared, "comparisons": texts}, data

        return self._files.write(key, make)

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of an entry."""
        return self._files.path(key)


@contextlib.contextmanager
def _without_weights(model: Any, shared: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the initializers of `shared` say that their values are elsewhere."""
    import onnx_ir

    kept = {name: model.graph.initializers[name].const_value for name in shared}
    try:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = onnx_ir.ExternalTensor(
                f"weight:{shared[name]}",
                0,
                int(tensor.nbytes),
                tensor.dtype,
                shape=tensor.shape,
                name=name,
            )
        yield
    finally:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = tensor


def _to_bytes(model: Any, weights: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, str]]:
    """(the model without the weights that it shares with the program, initializer -> name of the weight)."""
    import onnx_ir

    places = {_place(tensor): name for name, tensor in weights.items() if tensor.is_contiguous()}
    shared = {}
    for name, value in model.graph.initializers.items():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.is_contiguous() and raw.numel() and _place(raw) in places:
            shared[str(name)] = places[_place(raw)]
    with _without_weights(model, shared):
        proto = onnx_ir.to_proto(model)
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _drop_paths(nodes)
    return proto.SerializeToString(deterministic=True), shared


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.device


def _drop_paths(nodes: Any) -> None:
    for node in nodes:
        kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key != _PATHS]
        del node.metadata_props[:]
        for name, value in kept:
            node.metadata_props.add(key=name, value=value)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _drop_paths(graph.node)


def _from_bytes(data: bytes, shared: Mapping[str, str], weights: Mapping[str, torch.Tensor]) -> Any:
    """The model, with the weights of the program; copies none of them."""
    import onnx
    import onnx_ir
    from onnx_ir.tensor_adapters import TorchTensor

    model = onnx_ir.from_proto(onnx.load_from_string(data))
    missing = [
        name
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, onnx_ir.ExternalTensor) and name not in shared
    ]
    if missing:
        raise Refused(f"the values of {missing[0]} are not in it")
    for name, weight in shared.items():
        value = model.graph.initializers[name]
        tensor = TorchTensor(weights[weight].detach(), name=name)
        if value.const_value is None or (tensor.dtype, tensor.shape) != (
            value.const_value.dtype,
            value.const_value.shape,
        ):
            raise Refused(f"{name} is another weight than {weight}")
        value.const_value = tensor
    return model


def _digest(tensor: torch.Tensor) -> str:
    data = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())}".encode())
    if tensor.numel():
        values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        data.update(values)
    return data.hexdigest()


def _filters() -> Iterator[str]:
    filters: list[Any] = list(warnings.filters)
    for action, text, category, module, line in filters:
        if action == "error":
            patterns = [p.pattern if isinstance(p, re.Pattern) else str(p) for p in (text, module)]
            yield f"{patterns} {category.__module__}.{category.__qualname__} {line}"


@functools.cache
def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch build": str(torch.version.git_version),
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def _code_digest() -> str:
    """Of our own code that a conversion goes through."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for room in ("exporters", "patches", "pytrees"):
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\n" + file.read_bytes())
    return digest.hexdigest()
