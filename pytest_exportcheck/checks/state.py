"""What a model holds besides its code (weights, buffers, modes, attributes), and what changed of it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "OWN_ATTRIBUTES",
    "Held",
    "differences",
    "gradients_of",
    "kept_gradients",
    "model_state",
    "replaced_or_written",
    "tensor_key",
    "tensors_of",
    "text_of",
    "training_modules",
    "version_of",
]

#: Tensors of at most so many elements are shown by value.
_SHOWN = 4

#: Attributes of `torch.nn.Module` itself: they are read in their own way, or say nothing about numbers.
OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | {"forward"}


@dataclass(frozen=True)
class Held:
    """One thing that a model holds: `key` is compared, `text` is shown."""

    key: Any
    text: str


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(label, tensor) of every parameter and buffer: ``buffer `bn.running_mean```."""
    for name, parameter in module.named_parameters():
        yield f"parameter `{name}`", parameter
    # Under every name: a buffer that is put back to another one (inv_freq to original_inv_freq) is that one.
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"buffer `{name}`", buffer


def gradients_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(label, tensor) of every gradient that a parameter or buffer holds: a call may keep anything there."""
    for label, tensor in tensors_of(module):
        if tensor.is_leaf and tensor.grad is not None:
            yield f"gradient of {label}", tensor.grad


@contextlib.contextmanager
def kept_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Gradients are those of before after the block: the trace of a call that writes them leaves its own."""
    before = [(tensor, tensor.grad) for _, tensor in tensors_of(module) if tensor.is_leaf]
    try:
        yield
    finally:
        for tensor, gradient in before:
            if tensor.grad is not gradient:
                tensor.grad = gradient


def version_of(tensor: torch.Tensor) -> int:
    """Version counter; -1 for a tensor of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def replaced_or_written(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Label -> (tensor, version counter), to be compared with a later one: costs no look at the values.

    Gradients are among them. The tensors are kept alive, so that a new one at the address of an old one is
    not taken for it. Writes through ``.data`` are not counted by torch.
    """
    return {
        label: (tensor, version_of(tensor)) for label, tensor in (*tensors_of(module), *gradients_of(module))
    }


def training_modules(module: torch.nn.Module) -> list[str]:
    """Paths of the modules in train mode."""
    return [name for name, part in module.named_modules() if part.training]


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bytes; 0 for what has none (a meta tensor)."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_meta or not tensor.numel():
        return 0
    return zlib.crc32(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)


def tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors of equal shape, dtype, device and bytes."""
    return (tuple(tensor.shape), tensor.dtype, tensor.device, _checksum(tensor))


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= _SHOWN:
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in _flat(tensor)]
        return values[0] if not tensor.dim() else f"[{', '.join(values)}]"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _key(value: Any, depth: int = 4) -> Any:
    """What of an attribute is compared: tensors by value, containers and plain objects by what they hold."""
    if isinstance(value, torch.Tensor):
        return tensor_key(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return type(value), repr(value)
    if depth and isinstance(value, Mapping):
        return tuple((repr(key), _key(item, depth - 1)) for key, item in value.items())
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_key(item, depth - 1) for item in value)
    if depth and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
        return id(value), _key(vars(value), depth - 1)
    return id(value)


#: Text of a `torch.Generator`.
GENERATOR = "a generator of random numbers"


def _flat(tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = tensor.detach().reshape(-1).tolist()
    return values


def text_of(value: Any) -> str:
    """What is held, short: small tensors by value."""
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    if isinstance(value, torch.Generator):
        return GENERATOR
    try:
        return f"{value!r:.60}"
    except Exception:
        # Somebody's class, of which a message is not worth an error.
        return f"a {type(value).__name__}"


def model_state(module: torch.nn.Module, attributes: bool = True) -> dict[str, Held]:
    """Label -> what the model holds. Reads every weight: about a second for each 1 to 2 GB.

    Parameters
    ----------
    attributes:
        Also the Python attributes of every module.
    """
    held = {
        label: Held(tensor_key(tensor), _tensor_text(tensor))
        for label, tensor in (*tensors_of(module), *gradients_of(module))
    }
    for path, part in module.named_modules():
        name = f"`{path}`" if path else "the model"
        held[f"mode of {name}"] = Held(part.training, "train" if part.training else "eval")
        for key, value in vars(part).items() if attributes else ():
            if key not in OWN_ATTRIBUTES:
                dotted = f"{path}.{key}" if path else key
                held[f"attribute `{dotted}`"] = Held(_key(value), text_of(value))
    return held


def differences(
    before: Mapping[str, Held], after: Mapping[str, Held], ignore: Iterable[str] = ()
) -> dict[str, str]:
    """Label -> sentence, for everything that is not the same: ``buffer `steps` changed from 3 to 4``."""
    found = {}
    ignored = set(ignore)
    for label in dict.fromkeys([*before, *after]):
        was, now = before.get(label), after.get(label)
        if label in ignored or (was and now and was.key == now.key):
            continue
        if was is None:
            assert now is not None
            found[label] = f"{label} is new ({now.text})"
        elif now is None:
            found[label] = f"{label} is gone (was {was.text})"
        elif was.text == now.text:
            found[label] = f"{label} changed ({now.text})"
        else:
            found[label] = f"{label} changed from {was.text} to {now.text}"
    return found
