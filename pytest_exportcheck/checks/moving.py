"""A mode in which operators round otherwise: results are moved at random by a unit in the last place.

What is moved is what right implementations may answer otherwise: sums and products of many terms, whose order
is free, functions such as ``exp``, a division that a device may make a product, and operators that exporters
take apart. One sum, difference or product of two numbers is correctly rounded by IEEE 754, in every runtime
alike; programs rely on it (rounding by a large constant, compensated sums), and it is not moved.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .tolerance import below_fill_values
from .trace import address

__all__ = ["Moving", "is_rounded", "kept_generators"]

#: A move is what is left of larger numbers if it is at most so many roundings of the largest number that was
#: computed with (and, in half precision, at most this share of it). Right programs: up to 30 roundings.
_ROUNDINGS, _SHARE = 64, 0.0625

#: Numbers that are all whole and below this share of 1 / eps were not rounded: they are not moved.
_WHOLE = 0.125

#: Operators that only move values, or whose result is exact.
_EXACT = frozenset(
    """
    _local_scalar_dense _to_copy _unsafe_index _unsafe_index_put _unsafe_view abs amax amin cat ceil
    clamp clamp_max clamp_min clone constant_pad_nd copy copysign cummax cummin diag diag_embed
    embedding empty_like fill flip floor fmax fmin full_like gather hardtanh im2col index index_copy
    index_fill index_put index_select lift_fresh lift_fresh_copy masked_fill masked_scatter
    masked_select max max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum mode
    nan_to_num neg new_empty new_full new_ones new_zeros ones_like pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d reflection_pad3d relu repeat replication_pad1d replication_pad2d
    replication_pad3d resize roll round scatter select_scatter set sgn sign slice_scatter sort
    split_with_sizes_copy stack take threshold topk tril triu trunc unsafe_split unsafe_split_with_sizes
    upsample_nearest1d upsample_nearest2d upsample_nearest3d where zero zeros_like
    """.split()  # noqa: SIM905
)

#: Operators that write one number to many places: large ones of these are fill values.
_FILLS = frozenset(("fill", "full", "full_like", "masked_fill", "new_full", "scalar_tensor", "where"))

#: A number is a fill value that was seen before if they differ by at most this share.
_SAME_FILL = 0.11

#: Pointwise operators with an intermediate result that is rounded, and may cancel. So are sums and
#: differences with an `alpha`: its product may be rounded or not.
_FUSED = frozenset(("addcdiv", "addcmul", "lerp", "remainder"))

#: Sums of numbers that are divided by their sum: no implementation ends above 1.
_RANGED = frozenset(("_softmax",))

#: Made from nothing but numbers, by a sum and a product that may be rounded once or twice.
_MADE = frozenset(("arange", "linspace", "logspace"))

#: Single sums, of two numbers.
_SUMS = frozenset(("add", "sub", "rsub"))

#: Functions with a bound at which they end, or have an infinite slope: how far a value is from it.
_BOUNDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("acos", "asin", "atanh"), lambda x: 1 - x.abs()),
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "pow"), lambda x: x),
    "acosh": lambda x: x - 1,
    "log1p": lambda x: x + 1,
    "logit": lambda x: torch.minimum(x, 1 - x),
}

#: Beside the numbers that a call computes, each operator costs as much as so many.
_NUMBERS_PER_CALL = 4096

#: Products take as long for so many terms as a move takes for a number.
_TERMS_PER_MOVE = 64

#: Products: how many terms are summed for an element of the result.
_TERMS: Mapping[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear"), lambda args: args[0].shape[-1]),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), lambda args: args[1].shape[-1]),
    **dict.fromkeys(("convolution", "_convolution"), lambda args: args[1][0].numel()),
    "cumsum": lambda args: args[0].shape[args[1]] if args[0].dim() else 1,
}


def is_rounded(value: Any) -> bool:
    """Whether `value` is a tensor of numbers that were rounded: floating or complex, dense, with elements."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and not value.is_meta
        and value.numel() > 0
        and value.element_size() > 1
    )


@functools.cache
def _rounds(func: Any) -> str:
    """What an operator rounds: nothing (``""``), its ``result``, or ``inside`` also what it is made of."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return ""
    name = func.overloadpacket.__name__.rstrip("_")
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    if view or not func._schema.returns or (func.namespace == "aten" and name in _EXACT):
        return ""
    return "result" if torch.Tag.pointwise in func.tags and name not in _FUSED else "inside"


def _is_correctly_rounded(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether every right implementation of an operator gives the same result, to the last digit.

    Half precision is out: a runtime computes in single precision, and may round once after several operators.
    """
    leaves = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if is_rounded(leaf)]
    if any(torch.finfo(leaf.dtype).eps > 1e-5 for leaf in leaves):
        return False
    match name:
        case _ if name in _SUMS:
            return _alpha(args, kwargs) in (1, -1)
        case "mul":
            return not any(leaf.is_complex() for leaf in leaves)
        case "pow":
            return args[1] is not None and _number(args[1]) == 2 and not leaves[0].is_complex()
        case "div":
            divisor = _number(args[1])
            # By a power of two: the product with the inverse is the same.
            return divisor is not None and math.frexp(abs(divisor))[0] == 0.5
    return False


def _alpha(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get("alpha", args[2] if len(args) > 2 else 1)


def _number(value: Any) -> float | None:
    """A real number as such, also from a tensor with no axes."""
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex() or value.is_meta:
            return None
        value = value.item()
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _faithful(value: torch.Tensor, moved: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """`moved`, what a function returned, on the side of 1 and -1 on which it was.

    An implementation with an error below a unit in the last place crosses no number that has a float: a
    probability is at most 1, and ``1 - p`` not negative.
    """
    if value.is_complex():
        return moved
    size = value.abs()
    crosses = ((size <= 1) & (moved.abs() > 1)) | ((size > 1) & (moved.abs() < 1))
    given = args[0] if args else None
    if isinstance(given, torch.Tensor) and given.shape == value.shape:
        # exp(0), cosh(0), sqrt(1), x / x
        exact = (given == 0) | (given.abs() == 1)
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].device == given.device:
            exact = exact | (given.abs() == args[1].abs())
        if exact.shape == value.shape:
            crosses = crosses | (exact & (size == 1))
    return torch.where(crosses, value.sign(), moved)


def _terms(name: str, args: Sequence[Any], out: Any) -> int:
    """How many rounded values are summed for an element of `out`."""
    if name in _TERMS:
        return int(_TERMS[name](args))
    given, made = (
        max((leaf.numel() for leaf in _pytree.tree_leaves(some) if is_rounded(leaf)), default=1)
        for some in (args, out)
    )
    return max(given // made, 1)


class Moving(TorchDispatchMode):
    """Moves what operators return; without a seed, only looks at it.

    Parameters
    ----------
    shared:
        Addresses of memory that must not be written to.
    strength:
        Results are moved by so many units.

    Attributes
    ----------
    limit:
        Of a move, by the largest number that was computed with, fill values left out; only without a seed.
    at_bound:
        Whether a function was given what rounding may take across the end of its domain, or to where its
        slope is infinite (``acos`` of 1, the root or logarithm of what is left of larger numbers); only
        without a seed.
    work:
        How many numbers a replay moves, and what takes as long; only without a seed.
    """

    supports_higher_order_operators = True

    def __init__(self, shared: frozenset[int], seed: int | None = None, strength: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._seed = seed
        self._strength = strength
        self._generators: dict[torch.device, torch.Generator] = {}
        self.limit = 0.0
        self.at_bound = False
        self.work = 0
        #: Sizes of the fill values that were seen.
        self._fills: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            # `torch.cond` and the like: what they call is to be seen, too.
            return func(*_pytree.tree_map(self._within, args), **kwargs)
        self._refuse_writes(func, args, kwargs)
        if self._seed is None and func.overloadpacket.__name__.rstrip("_") in _FILLS:
            self._note_fills(_pytree.tree_leaves((args, kwargs)))
        rounds = _rounds(func)
        name = func.overloadpacket.__name__
        base = name.rstrip("_")
        given = any(map(is_rounded, _pytree.tree_leaves((args, kwargs))))
        if not rounds or not (given or base in _MADE):
            return func(*args, **kwargs)
        if self._seed is None:
            self._note_bound(base, args)
            out = func(*args, **kwargs)
            self._measure(name, args, _pytree.tree_leaves((args, kwargs, out)))
            return out
        if _is_correctly_rounded(base, args, kwargs):
            return func(*args, **kwargs)
        if base in _SUMS and _alpha(args, kwargs) != 1:
            rounds = "inside"
        # A function crosses no 1, see `_faithful`; of some arguments (`known`) its result is exact.
        ranged = (rounds == "result" and base not in _SUMS and base != "mul") or base in _RANGED | _MADE
        known = args if rounds == "result" else ()
        if func._schema.is_mutable:
            if rounds == "result":
                known = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in args[:2]]
            elif base in _FUSED or base in _SUMS:
                args = (args[0], *_pytree.tree_map(self._moved, args[1:]))
            out = func(*args, **kwargs)
            for leaf in _pytree.tree_leaves(out):
                if is_rounded(leaf):
                    moved = self._moved(leaf)
                    leaf.copy_(_faithful(leaf, moved, known) if ranged else moved)
            return out
        scale = 1.0
        if rounds == "inside":
            scale = _scale(_terms(name, args, None if name in _TERMS else func(*args, **kwargs)))
            args, kwargs = _pytree.tree_map(lambda leaf: self._moved(leaf, scale), (args, kwargs))

        def move(leaf: Any) -> Any:
            moved = self._moved(leaf, scale)
            return _faithful(leaf, moved, known) if ranged and is_rounded(leaf) else moved

        return _pytree.tree_map(move, func(*args, **kwargs))

    def _note_bound(self, name: str, args: Sequence[Any]) -> None:
        if name not in _BOUNDS or not is_rounded(given := args[0]) or given.is_complex():
            return
        exponent = _number(args[1]) if name == "pow" else None
        if name == "pow" and (exponent is None or exponent == round(exponent)):
            return
        far = _BOUNDS[name](given.detach())
        self.at_bound = self.at_bound or (self.limit > 0 and bool((far.abs() <= self.limit).any()))

    def _measure(self, name: str, args: Sequence[Any], leaves: Sequence[Any]) -> None:
        numbers = [leaf for leaf in leaves if is_rounded(leaf)]
        self.work += _NUMBERS_PER_CALL + sum(leaf.numel() for leaf in numbers)
        if name in _TERMS:
            self.work += numbers[-1].numel() * _TERMS[name](args) // _TERMS_PER_MOVE
        sizes: list[float] = []
        filled = False
        for leaf in numbers:
            size, has_fill = self._size_of_numbers(leaf, filled)
            sizes.append(size)
            filled = filled or has_fill
        if name in _TERMS and name != "cumsum":
            # The products that are summed are larger than what they are made of.
            sizes[-1] = max(sizes[-1], math.prod(sorted(sizes[:-1])[-2:]) * math.sqrt(_TERMS[name](args)))
        for leaf, size in zip(numbers, sizes, strict=True):
            eps = float(torch.finfo(leaf.dtype).eps)
            self.limit = max(self.limit, min(_ROUNDINGS * eps, _SHARE) * size)

    def _note_fills(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not leaf.dim() and is_rounded(leaf):
                leaf = abs(leaf.item())
            if isinstance(leaf, int | float) and math.isfinite(leaf) and leaf:
                self._fills.add(abs(float(leaf)))

    def _size_of_numbers(self, tensor: torch.Tensor, filled: bool) -> tuple[float, bool]:
        """(largest absolute value without fill values, whether there are any).

        One row of features may stand off from all others as fill values do: these come from an operator that
        fills, from a tensor of zeros and one other value (a mask to be added), or from one that has some
        (`filled`).
        """
        flat = tensor.detach().flatten().abs().to(torch.float64)
        flat = flat[torch.isfinite(flat) & (flat > 0)]
        if not flat.numel():
            return 0.0, False
        if flat.numel() > 1 and bool(flat.min() == flat.max()):
            self._fills.add(float(flat[0]))
            return 0.0, True
        found = False
        while (below := below_fill_values(flat)) is not None:
            top = float(flat.max())
            if not filled and not any(abs(top / each - 1) < _SAME_FILL for each in self._fills):
                break
            self._fills.add(top)
            flat, found = below, True
        return float(flat.max()), found

    def _within(self, value: Any) -> Any:
        """A function that runs under this mode."""
        if not callable(value) or isinstance(value, torch.Tensor):
            return value

        def call(*args: Any) -> Any:
            with self:
                return value(*args)

        return call

    def _refuse_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not func._schema.is_mutable:
            return
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for leaf in _pytree.tree_leaves(value):
                    if isinstance(leaf, torch.Tensor) and address(leaf) in self._shared:
                        raise RuntimeError("a call writes to parameters")

    def _moved(self, value: Any, scale: float = 1.0) -> Any:
        """`value` moved by up to a unit in the last place, times `scale`; itself if it is not rounded."""
        if not is_rounded(value):
            return value
        eps = torch.finfo(value.dtype).eps
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj().resolve_neg())
            noise = torch.view_as_complex(self._noise(parts) * (eps * scale))
            moved = value + value * noise
            return moved.where(moved.isfinite(), value)
        # Half precision is summed in a finer one.
        moved = value + value * (self._noise(value) * eps * (scale if eps < 1e-5 else 1.0))
        if bool(((value.abs() < _WHOLE / eps) & (value == value.round())).all()):
            return value
        return moved.where(moved.isfinite(), value)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform in [-1, 1) times the strength, of the shape, dtype and device of `like`."""
        if like.device not in self._generators:
            assert self._seed is not None
            self._generators[like.device] = torch.Generator(like.device).manual_seed(self._seed)
        drawn = torch.rand(like.shape, generator=self._generators[like.device], device=like.device)
        return (self._strength * (2 * drawn - 1)).to(like.dtype)


def _scale(terms: int) -> float:
    """Roundings of a sum of so many terms of any sign, one after the other, by those of each term alone."""
    return max(1.0, math.sqrt(terms) / 6)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """What is drawn inside the block from global generators is drawn again after it."""
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
