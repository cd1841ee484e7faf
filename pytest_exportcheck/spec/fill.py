"""Tensor descriptions -> tensors.

Values are drawn on the CPU from a generator seeded by the spec's seed and the argument's path, then moved:
two runs, two workers and two devices see the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ObserveError
from .imports import UserCodeError, call_user, load_callable
from .names import choices
from .seeding import stable_seed
from .tensors import (
    Arange,
    Below,
    Between,
    By,
    Constant,
    FromFile,
    Padded,
    TensorSpec,
    TensorSyntaxError,
    Values,
)

if TYPE_CHECKING:
    import torch

__all__ = ["resolve_tensor"]

#: What `random` draws integers from: small enough to be an index into anything.
_RANDOM_HIGH = 10


def resolve_tensor(
    tensor_spec: TensorSpec,
    dims: Mapping[str, int],
    seed_key: str,
    device: str | torch.device,
    dtype: str | torch.dtype,
) -> torch.Tensor:
    """Build the tensor of a description.

    Parameters
    ----------
    tensor_spec:
        The description.
    dims:
        Sizes of the names in it.
    seed_key:
        Text that the values depend on, such as ``"0/call 1/input_ids"``.
    device:
        Where the tensor goes.
    dtype:
        The dtype of the case; ``float`` and ``float32`` descriptions are cast to it.

    Raises
    ------
    ObserveError
        A name has no size, a file or its key is missing, or the values do not fit the shape.
    """
    import torch

    try:
        shape = tensor_spec.shape(dims)
        tensor = _fill(tensor_spec, shape, seed_key)
    except (TensorSyntaxError, UserCodeError) as error:
        details = getattr(error, "details", [])
        raise ObserveError(f"tensor '{tensor_spec.text}': {error.message}", details=details) from error
    if tensor_spec.follows_case:
        tensor = tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return tensor.to(device)


def _fill(spec: TensorSpec, shape: tuple[int, ...], seed_key: str) -> torch.Tensor:
    import torch

    dtype = torch.float32 if spec.dtype == "float" else getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(stable_seed(seed_key))
    match spec.fill:
        case Below(high):
            return torch.randint(0, high, shape, generator=generator, dtype=torch.int64).to(dtype)
        case Between(low, high):
            if not dtype.is_floating_point:
                return torch.randint(int(low), int(high), shape, generator=generator).to(dtype)
            # Drawn in float64 so that float32 and float64 descriptions hold the same numbers.
            unit = torch.rand(shape, generator=generator, dtype=torch.float64)
            return (low + (high - low) * unit).to(dtype)
        case Constant(value):
            return torch.full(shape, value, dtype=dtype)
        case Arange():
            count = torch.Size(shape).numel()
            return torch.arange(count, dtype=torch.int64).reshape(shape).to(dtype)
        case Values(values):
            return torch.tensor(values, dtype=dtype).reshape(shape)
        case Padded(side, count):
            mask = torch.ones(shape, dtype=dtype)
            row = mask if mask.dim() == 1 else mask[0]
            if count:
                row[..., slice(None, count) if side == "left" else slice(-count, None)] = 0
            return mask
        case FromFile(file, key):
            return _checked(_from_file(spec.folder / file, file, key), shape, dtype, "the file")
        case By(ref):
            return _checked(_by(ref, spec.folder, shape, dtype, generator), shape, dtype, ref)
        case _:
            return _random(shape, dtype, generator)


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    import torch

    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, _RANDOM_HIGH, shape, generator=generator).to(dtype)


def _checked(value: object, shape: tuple[int, ...], dtype: torch.dtype, source: str) -> torch.Tensor:
    import torch

    if not isinstance(value, torch.Tensor):
        raise UserCodeError(f"{source} gives a {type(value).__name__}, not a torch.Tensor")
    if tuple(value.shape) != shape:
        raise UserCodeError(f"{source} gives shape {list(value.shape)}, the description says {list(shape)}")
    if value.dtype != dtype:
        raise UserCodeError(f"{source} gives {value.dtype}, the description says {dtype}")
    return value.detach()


def _from_file(path: Path, shown: str, key: str) -> torch.Tensor:
    import torch

    if not path.is_file():
        raise UserCodeError(f"there is no file {shown} next to the spec")
    try:
        if path.suffix == ".npz":
            import numpy as np

            # allow_pickle stays off: a data file must not run code.
            with np.load(path, allow_pickle=False) as arrays:
                names = list(arrays)
                if key in names:
                    return torch.from_numpy(np.ascontiguousarray(arrays[key]).copy())
        else:
            from safetensors import safe_open

            with safe_open(path, framework="pt") as tensors:
                names = list(tensors.keys())
                if key in names:
                    found: torch.Tensor = tensors.get_tensor(key)
                    return found
    except Exception as error:
        raise UserCodeError(f"{shown} cannot be read: {type(error).__name__}: {error}") from error
    raise UserCodeError(f"{shown} has no {key!r}{choices(key, names)}")


def _by(
    ref: str, folder: Path, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> object:
    function = load_callable(ref, folder)
    offered: dict[str, Any] = {"shape": shape, "dtype": dtype, "generator": generator}
    return call_user(function, ref, folder, **accepted(function, offered))


def accepted(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `offered` that `function` takes by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in offered.items() if name in names}
