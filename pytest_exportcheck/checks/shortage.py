"""Want of memory: at a size of ours it says nothing of an export, unless the program wants absurdly much."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..observe.targets import Target
from ..pytrees import clone_tree

__all__ = ["MOST_TIMES", "Shortage", "bytes_text", "largest_of_eager", "shortage"]

#: A program that asks for more at once than so many times the largest tensor of eager is wrong or unusable
#: in itself. Right ones: a mask that eager broadcasts is written out for each head, a convolution is a
#: product with the 49 shifts of its input, a distance between all pairs is taken of differences in all
#: features. What an operator of attention never writes down, its scores, counts as a tensor of eager.
MOST_TIMES = 64

#: What allocators say: ONNX Runtime's arenas (CPU, CUDA), C++, torch, CUDA.
_SAID = re.compile(
    r"failed to allocate memory|bad allocation|bad_alloc|can't allocate memory|cannot allocate memory"
    r"|out of memory|smaller than requested bytes|OUT_OF_MEMORY|ALLOC_FAILED",
    re.IGNORECASE,
)

_ASKED = re.compile(
    r"requested buffer of size (\d+)|tried to allocate (\d+) bytes|requested bytes of (\d+)"
    r"|(?:tried|unable) to allocate ([\d.]+) ([KMGTPE]?)i?(?:B\b|bytes)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Shortage:
    """There was no memory for something.

    Attributes
    ----------
    asked:
        Bytes that were asked for at once; ``None`` where nobody says.
    """

    asked: int | None = None

    def is_absurd(self, largest: int | None) -> bool:
        """Whether it is far from what eager needs there, whose largest tensor has `largest` bytes."""
        return self.asked is not None and largest is not None and self.asked > MOST_TIMES * max(largest, 1)

    def __str__(self) -> str:
        return "" if self.asked is None else f" (it asks for {bytes_text(self.asked)} at once)"


def shortage(error: BaseException) -> Shortage | None:
    """What an exception, or one it was made from, says of memory; ``None`` if it is of something else."""
    for each in _chain(error):
        text = str(each)
        known = isinstance(each, MemoryError | torch.OutOfMemoryError)
        # Not whatever has the words: a ValueError of the model may tell of memory, too.
        foreign = isinstance(each, RuntimeError) or type(each).__module__.startswith("onnxruntime")
        if known or (foreign and _SAID.search(text)):
            return Shortage(_asked(text))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        seen.append(each)
        yield each
        each = each.__cause__


def _asked(text: str) -> int | None:
    found = _ASKED.search(text)
    if found is None:
        return None
    *whole, number, unit = found.groups()
    plain = next((each for each in whole if each is not None), None)
    return int(plain) if plain else int(float(number) * 1024 ** " KMGTPE".index(unit.upper() or " "))


def bytes_text(count: int) -> str:
    """``2.5 GiB``; small numbers as they are."""
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB", "PiB"]
    if size < 1024:
        return f"{count} bytes"
    while size >= 1024 and units:
        size, unit = size / 1024, units.pop(0)
    return f"{size:.1f} {unit}" if size < 1e4 else f"{size:.1e} {unit}"


def largest_of_eager(target: Target, arguments: Mapping[str, Any]) -> int | None:
    """Bytes of the largest tensor that one call of eager has in memory; ``None`` where it cannot be told."""
    watch = _Largest()
    try:
        copies = clone_tree(dict(arguments))
        with torch.compiler.set_stance("force_eager"), watch:
            target.call(copies)
    except Exception:
        # It has answered before: what it lacks now is most likely the memory.
        return None
    return watch.bytes


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what operators take and return. A view is as large as what it is a view of, however expanded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, _in_memory(leaf))
        if "scaled_dot_product" in str(func):
            self.bytes = max(self.bytes, _scores(*args[:2]))
        return out


def _in_memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        # Sparse ones, and others that have no memory of their own.
        return 0


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    return math.prod(query.shape[:-1]) * key.shape[-2] * query.element_size()
