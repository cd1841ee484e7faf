"""How far eager itself moves when its operators round otherwise: Monte Carlo arithmetic.

A runtime sums in another order than eager. Where a model subtracts large numbers from each other, what is
left is mostly rounding, and two right programs differ by more than any tolerance that is relative to the
output. Eager is replayed with what its operators return moved at random by a unit in the last place: its
outputs spread over what rounding alone can do. The idea is that of D. S. Parker, "Monte Carlo Arithmetic",
UCLA CSD-970002 (1997).

Nothing is run unless a comparison of numbers has failed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..observe.records import RecordedCall
from ..observe.targets import Target
from ..pytrees import clone_tree, flatten_with_paths
from .compare import LeafComparison, compare_leaf, compare_leaves
from .ties import Ties
from .tolerance import Tolerances, size_of
from .trace import address
from .writes import WriteWatch, in_place

__all__ = ["MovedEager", "compare_rounded", "note_rounding"]

#: So many replays of eager; after the first few it is seen whether more of them can help.
_REPLAYS, _FIRST, _HOPELESS = 12, 3, 8.0

#: So many times the largest move over the replays is allowed: a runtime may be further off than they are (up
#: to 2.2 times, over cancellations in sums, products and normalizations of 64 to 4096 terms).
_FACTOR = 4.0

#: A move is what is left of larger numbers if it is at most so many roundings of the largest number that was
#: computed with (and, in half precision, at most this share of it)...
_ROUNDINGS, _SHARE = 64, 0.0625

#: ... or if what is allowed is at most this share of the output. Larger ones are of an ill-conditioned eager,
#: or one near a branch: a fault could hide in what is allowed.
_OF_OUTPUT = 0.05

#: Where rounding decides for so many elements, the root mean square of their errors is at most so many times
#: that of the moves: a fault is in all of them (right programs: up to 1.2 for running sums, 0.7 for others).
_MANY, _AS_A_WHOLE = 16, 2.0

#: Numbers that are all whole and below this share of 1 / eps were not rounded: they are not moved.
_WHOLE = 0.125

#: Operators that only move values, or whose result is exact.
_EXACT = frozenset(
    """
    _local_scalar_dense _to_copy _unsafe_index _unsafe_index_put _unsafe_view abs amax amin cat ceil
    clamp clamp_max clamp_min clone constant_pad_nd copy copysign cummax cummin diag diag_embed
    embedding empty_like fill flip floor fmax fmin full_like gather hardtanh im2col index index_copy
    index_fill index_put index_select leaky_relu lift_fresh lift_fresh_copy masked_fill masked_scatter
    masked_select max max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum mode
    nan_to_num neg new_empty new_full new_ones new_zeros ones_like pixel_shuffle pixel_unshuffle prelu
    reflection_pad1d reflection_pad2d reflection_pad3d relu repeat replication_pad1d replication_pad2d
    replication_pad3d resize roll round scatter select_scatter set sgn sign slice_scatter sort
    split_with_sizes_copy stack take threshold topk tril triu trunc unsafe_split unsafe_split_with_sizes
    upsample_nearest1d upsample_nearest2d upsample_nearest3d where zero zeros_like
    """.split()  # noqa: SIM905
)

#: Pointwise operators with an intermediate result that is rounded, and may cancel.
_FUSED = frozenset(("addcdiv", "addcmul", "lerp"))

#: Products: how many terms are summed for an element of the result.
_TERMS: Mapping[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear"), lambda args: args[0].shape[-1]),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), lambda args: args[1].shape[-1]),
    **dict.fromkeys(("convolution", "_convolution"), lambda args: args[1][0].numel()),
    "cumsum": lambda args: args[0].shape[args[1]] if args[0].dim() else 1,
}


def _is_rounded(value: Any) -> bool:
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


def _terms(name: str, args: Sequence[Any], out: Any) -> int:
    """How many rounded values are summed for an element of `out`."""
    if name in _TERMS:
        return int(_TERMS[name](args))
    given, made = (
        max((leaf.numel() for leaf in _pytree.tree_leaves(some) if _is_rounded(leaf)), default=1)
        for some in (args, out)
    )
    return max(given // made, 1)


class _Moving(TorchDispatchMode):
    """Moves what operators return; without a seed, only looks at it.

    Parameters
    ----------
    shared:
        Addresses of memory that must not be written to.

    Attributes
    ----------
    largest:
        The largest number that was computed with, fill values left out; of a mode without a seed.
    """

    supports_higher_order_operators = True

    def __init__(self, shared: frozenset[int], seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            # `torch.cond` and the like: what they call is to be seen, too.
            return func(*_pytree.tree_map(self._within, args), **kwargs)
        self._refuse_writes(func, args, kwargs)
        rounds = _rounds(func)
        if not rounds or not any(map(_is_rounded, _pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if self._seed is None:
            out = func(*args, **kwargs)
            given = [
                _size_of_numbers(leaf) for leaf in _pytree.tree_leaves((args, kwargs)) if _is_rounded(leaf)
            ]
            if name in _TERMS and name != "cumsum":
                # The products that are summed are larger than what they are made of.
                given.append(math.prod(sorted(given)[-2:]) * math.sqrt(_TERMS[name](args)))
            made = [_size_of_numbers(leaf) for leaf in _pytree.tree_leaves(out) if _is_rounded(leaf)]
            self.largest = max(self.largest, *given, *made)
            return out
        if func._schema.is_mutable:
            out = func(*args, **kwargs)
            for leaf in _pytree.tree_leaves(out):
                if _is_rounded(leaf):
                    leaf.copy_(self._moved(leaf))
            return out
        scale = 1.0
        if rounds == "inside":
            scale = _scale(_terms(name, args, None if name in _TERMS else func(*args, **kwargs)))
            args, kwargs = _pytree.tree_map(lambda leaf: self._moved(leaf, scale), (args, kwargs))
        return _pytree.tree_map(lambda leaf: self._moved(leaf, scale), func(*args, **kwargs))

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
        if not _is_rounded(value):
            return value
        eps = torch.finfo(value.dtype).eps
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj().resolve_neg())
            noise = torch.view_as_complex(self._noise(parts) * eps * scale)
            moved = value + value * noise
            return moved.where(moved.isfinite(), value)
        # Half precision is summed in a finer one.
        moved = value + value * (self._noise(value) * eps * (scale if eps < 1e-5 else 1.0))
        if bool(((value.abs() < _WHOLE / eps) & (value == value.round())).all()):
            return value
        return moved.where(moved.isfinite(), value)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform in [-1, 1), of the shape, dtype and device of `like`."""
        if like.device not in self._generators:
            assert self._seed is not None
            self._generators[like.device] = torch.Generator(like.device).manual_seed(self._seed)
        drawn = torch.rand(like.shape, generator=self._generators[like.device], device=like.device)
        return (2 * drawn - 1).to(like.dtype)


def _scale(terms: int) -> float:
    """Roundings of a sum of so many terms of any sign, one after the other, by those of each term alone."""
    return max(1.0, math.sqrt(terms) / 6)


def _size_of_numbers(tensor: torch.Tensor) -> float:
    """Largest absolute value; 0 for a tensor of zeros and one other value, such as a mask to be added."""
    sizes = tensor.detach().abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    if not sizes.numel() or (sizes.numel() > 1 and bool(sizes.min() == sizes.max())):
        return 0.0
    return size_of(tensor)


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
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


class MovedEager:
    """One call of eager, again with results that are rounded otherwise. Nothing runs until it is asked for.

    A copy of the module is called, so that what a call keeps (a counter, a table) stays as it was.

    Parameters
    ----------
    arguments:
        Makes the arguments of the call, by name.

    Attributes
    ----------
    plain:
        Path of an output, or of an input that was written to -> what is in it when nothing is moved.
    replays:
        How many there are.
    largest:
        The largest number that was computed with.
    problem:
        Why there are no replays.
    """

    def __init__(self, target: Target, arguments: Callable[[], Mapping[str, Any]]) -> None:
        self._target = target
        self._arguments = arguments
        self.plain: dict[str, torch.Tensor] = {}
        # By path, over the replays: the largest move of each element, and the sum of the squares.
        self._moves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.replays = 0
        self.largest = 0.0
        self.problem = ""

    @classmethod
    def of(cls, target: Target, call: RecordedCall) -> MovedEager:
        """Of an observed call."""
        return cls(target, lambda: call.arguments)

    def replay(self, count: int) -> bool:
        """Have `count` replays or more; False if eager cannot be replayed."""
        if self.problem:
            return False
        try:
            # What torch.compile makes of a call under a mode would be used for later calls, without one.
            with _kept_generators(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not self.plain:
                    self.plain = self._call()
                while self.replays < count:
                    self._add(self._call(self.replays + 1))
        except Exception as error:
            # A module that cannot be copied, a branch in which moved values end in an error.
            self.problem = f"{type(error).__name__}: {error}"
            return False
        return True

    def _call(self, seed: int | None = None) -> dict[str, torch.Tensor]:
        module = self._target.module
        # Buffers are copied, weights are shared.
        weights = {id(each): each for each in module.parameters()}
        mode = _Moving(frozenset(filter(None, map(address, weights.values()))), seed)
        copied = copy.deepcopy(module, weights)
        forward: Any = vars(copied).get("forward")
        if hasattr(forward, "replaced"):
            # While it is exported, the module has a forward that calls the original module.
            vars(copied).pop("forward")
            if forward.replaced is not None:
                vars(copied)["forward"] = forward.replaced
        target = replace(self._target, module=copied)
        arguments = clone_tree(dict(self._arguments()))
        watch = WriteWatch(arguments)
        with mode:
            outputs = target.call(arguments)
        self.largest = max(self.largest, mode.largest)
        leaves = [*flatten_with_paths(outputs), *((in_place(p), v) for p, v in watch.written().items())]
        count = Counter(path for path, _ in leaves)
        return {
            path: leaf.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
            for path, leaf in leaves
            if count[path] == 1 and _is_rounded(leaf)
        }

    def _add(self, moved: Mapping[str, torch.Tensor]) -> None:
        known = self._moves if self.replays else None
        self._moves = {}
        self.replays += 1
        for path, plain in self.plain.items():
            other = moved.get(path)
            if other is None or (other.shape, other.dtype) != (plain.shape, plain.dtype):
                continue
            move = (other - plain).abs()
            move = move.to(torch.promote_types(move.dtype, torch.float32))
            # A number that rounding makes infinite, or NaN; what is not finite anyway must stay as it is.
            move = move.nan_to_num(nan=math.inf, posinf=math.inf).where(plain.isfinite(), 0.0)
            if known is None:
                self._moves[path] = (move, move.square())
            elif path in known:
                largest, squares = known[path]
                self._moves[path] = (largest.maximum(move), squares + move.square())

    def spread(self, path: str, expected: torch.Tensor) -> _Spread | None:
        """How far the output at `path` moves; ``None`` where a replay without moves is not `expected`."""
        plain = self.plain.get(path)
        if path not in self._moves or plain is None:
            return None
        if not compare_leaf(path, expected, plain, Tolerances()).ok:
            return None
        largest, squares = self._moves[path]
        eps = float(torch.finfo(plain.dtype).eps)
        limit = min(_ROUNDINGS * eps, _SHARE) * self.largest
        limit = max(limit, _OF_OUTPUT / _FACTOR * size_of(plain))
        return _Spread(largest, (squares / self.replays).sqrt(), limit)


@dataclass(frozen=True)
class _Spread:
    """How far an output moves, by element: at most, and the root mean square. Not negative.

    Attributes
    ----------
    limit:
        A larger one is no rounding.
    """

    largest: torch.Tensor
    mean: torch.Tensor
    limit: float

    @property
    def allowed(self) -> torch.Tensor:
        """The error of each element that rounding explains."""
        return (_FACTOR * self.largest).where(self.largest <= self.limit, 0.0).to(torch.float64)


def compare_rounded(
    expected: Sequence[tuple[str, Any]],
    got: Sequence[tuple[str, Any]],
    tolerances: Tolerances,
    where: Mapping[str, torch.Tensor | Ties] | None,
    eager: MovedEager | None,
) -> list[LeafComparison]:
    """`compare_leaves`; where numbers alone differ, what rounding does to eager itself is allowed.

    The larger of both is allowed, not the sum: where eager hardly moves the tolerance stays what it is.
    """
    results = compare_leaves(expected, got, tolerances, where)
    failed = [result for result in results if not result.ok]
    # What no tolerance makes up for is no rounding.
    if not failed or eager is None or any(each.reason or each.would_need is None for each in failed):
        return results
    left, right = dict(expected), dict(got)
    for count in (_FIRST, _REPLAYS):
        if not eager.replay(count):
            return results
        spreads = {result.path: eager.spread(result.path, left[result.path]) for result in failed}
        if all(_is_hopeless(result, spreads[result.path]) for result in failed):
            break
    judged = []
    for result in results:
        spread = None if result.ok else spreads[result.path]
        if spread is not None:
            mask = (where or {}).get(result.path)
            assert not isinstance(mask, Ties)
            result = _judged(result, left[result.path], right[result.path], tolerances, mask, spread)
        judged.append(result)
    return judged


def _is_hopeless(result: LeafComparison, spread: _Spread | None) -> bool:
    assert result.would_need is not None
    return spread is None or result.would_need > _HOPELESS * _FACTOR * float(spread.largest.max())


def _judged(
    result: LeafComparison,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: _Spread,
) -> LeafComparison:
    """The comparison that failed, with what is known of eager's own rounding."""
    assert result.would_need is not None
    moves = float(spread.largest.max())
    result = replace(result, eager_moves=moves)
    said = f"eager itself moves by up to {moves:.1e} when its operators round otherwise"
    again = compare_leaf(result.path, expected, got, tolerances, where, spread.allowed)
    if tolerances.is_given(result.path):
        note = f"{said}; the tolerance is the one of the spec" if again.ok else ""
    elif again.ok and not _is_shifted(result.path, expected, got, tolerances, where, spread):
        note = f"the difference is rounding: {said}"
        result = replace(result, ok=True)
    elif _FACTOR * moves <= result.atol:
        note = ""
    else:
        note = f"{said}, which does not explain the difference"
    return replace(result, note="; ".join(filter(None, [result.note, note])))


def _is_shifted(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: _Spread,
) -> bool:
    """Whether the errors of the elements that rounding decides are too large as a whole."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (value.detach().to("cpu", wide).resolve_conj().resolve_neg() for value in (got, expected))
    tolerance = tolerances.of(path, expected)
    plain = tolerances.by_element(path, expected.to("cpu"), tolerance) + tolerance.rtol * b.abs()
    decided = (spread.allowed > plain) & a.isfinite() & b.isfinite()
    if where is not None:
        decided &= where
    if int(decided.sum()) < _MANY:
        return False
    excess = ((a - b).abs() - plain).clamp_min(0.0)[decided]
    return float(excess.square().sum()) > _AS_A_WHOLE**2 * float(spread.mean[decided].double().square().sum())


def note_rounding(record: dict[str, Any], results: Sequence[LeafComparison], what: str) -> None:
    """Put down in the record which outputs agree only because eager itself moves as far."""
    found = [
        f"{what}: {result.path} is off by {result.max_abs:.1e} (atol {result.atol:.1e}), eager itself moves "
        f"by up to {result.eager_moves:.1e} when its operators round otherwise"
        for result in results
        if result.ok and result.eager_moves is not None
    ]
    if found:
        record.setdefault("rounding", []).extend(found)
