"""Where the values of recorded calls are kept: where they were, in the memory of the host, or on disk."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Collection
from typing import Any, Literal, cast, get_args

import torch

from ..pytrees import clone_tree, register_flattening_functions
from ..pytrees.strides import copied

__all__ = ["PLACES", "Place", "Placed"]

#: ``device``: on the device of the caller's tensors. ``cpu``: in host memory. ``disk``: in memory-mapped
#: files without a name in the folder for temporary files (``TMPDIR``), freed with the call.
Place = Literal["device", "cpu", "disk"]

PLACES: tuple[str, ...] = get_args(Place)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return copied(tensor, None if tensor.is_meta else torch.device("cpu"))


def _to_disk(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return _to_cpu(tensor)
    source = _to_cpu(tensor).resolve_conj().resolve_neg()
    if not source.numel() or type(tensor) is not torch.Tensor:
        return _to_cpu(tensor)
    handle, path = tempfile.mkstemp(prefix="exportcheck-")
    try:
        with os.fdopen(handle, "wb") as file:
            # As bytes: numpy has no bfloat16.
            held = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage())
            held.numpy().tofile(file)
        # A private mapping: nobody can change the file through it, and its pages can be dropped.
        storage = cast(
            torch.UntypedStorage,
            torch.UntypedStorage.from_file(path, False, held.numel()),
        )
    finally:
        # The mapping outlives the name. Where a mapped file cannot be deleted (Windows) the folder for
        # temporary files keeps it.
        with contextlib.suppress(PermissionError):
            os.unlink(path)
    return torch.empty(0, dtype=source.dtype).set_(storage, 0, source.shape, source.stride())


_KEEPERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"cpu": _to_cpu, "disk": _to_disk}


class Placed:
    """Values by name whose tensors are kept elsewhere.

    Parameters
    ----------
    value:
        A dict of arguments, or outputs.
    place:
        ``cpu`` or ``disk``.
    """

    def __init__(self, value: Any, place: str) -> None:
        # Of every tensor, in the order in which `clone_tree` meets them.
        self._devices: list[torch.device] = []
        self._without: frozenset[str] = frozenset()
        keep = _KEEPERS[place]

        def put(tensor: torch.Tensor) -> torch.Tensor:
            self._devices.append(tensor.device)
            return keep(tensor)

        self._kept = clone_tree(value, put)

    def load(self) -> Any:
        """A copy, every tensor on the device that it came from."""
        devices = iter(self._devices)
        with register_flattening_functions(None):
            value = clone_tree(self._kept, lambda tensor: copied(tensor, next(devices)))
        if self._without:
            return {name: item for name, item in value.items() if name not in self._without}
        return value

    def without(self, names: Collection[str]) -> Placed:
        """The same arguments but those of `names`; shares the memory."""
        twin = copy.copy(self)
        twin._without = self._without | set(names)
        return twin
