"""Prove in eager that a rewritten function computes what the original does, under both outcomes of every
test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType

import torch
from torch.utils import _pytree

from .equality import Outcome, outcomes_differ, replay
from .probe import Call, Endless, Probe
from .source import target_name
from .tests_in import Branch
from .values import BranchProof, Place, Proof, RewriteRefused

__all__ = ["explored", "prove"]

_Pair = tuple[int, bool]
_CALLS = 2  # how many recorded calls are changed, or run with forced outcomes
_COMBINATIONS = 64  # how many combinations of forced outcomes are tried


def explored(
    function: FunctionType, calls: Sequence[Call], probe: Probe, forces: Callable[[int], bool]
) -> None:
    """Run an instrumented function on all calls, and with the outcomes of its tests forced.

    Parameters
    ----------
    forces:
        Whether the test of a number is forced. A branch inside a branch needs two forced outcomes.
    """
    queue: list[dict[int, bool]] = [{}]
    tried: set[_Pair] = set()
    rounds = 0
    natural: dict[int, dict[bool, int]] = {}
    while queue and rounds < _COMBINATIONS:
        forced = queue.pop(0)
        rounds += 1
        probe.outcomes, probe.forced = {}, forced
        for call in calls:
            probe.used = set()
            with probe.active(function):
                got = replay(function, call)
            if got.error is not None and not forced:
                raise RewriteRefused(
                    f"{target_name(function)} raises {type(got.error).__name__} when a recorded call is "
                    f"repeated: "
                    f"{got.error}",
                    "it depends on more than its arguments: rewrite this function by hand",
                )
        natural = probe.outcomes if not forced else natural
        for number in list(probe.outcomes):
            for outcome in (True, False):
                if forces(number) and number not in forced and (number, outcome) not in tried:
                    tried.add((number, outcome))
                    queue.append({**forced, number: outcome})
    probe.outcomes, probe.forced = natural, {}


def _perturbations(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.numel() == 0 or tensor.is_complex():
        return
    if tensor.dtype == torch.bool:
        yield "all True", torch.ones_like(tensor)
        yield "all False", torch.zeros_like(tensor)
        return

    def first(value: float) -> torch.Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        made.view(-1)[0] = value
        return made

    yield "one zero", first(0)
    yield "zeros", torch.zeros_like(tensor)
    yield "ones", torch.ones_like(tensor)
    if tensor.is_floating_point():
        for text in ("inf", "-inf", "nan"):
            yield f"one {text}", first(float(text))
        yield "times 1000", tensor * 1000
        yield "times 0.001", tensor * 0.001
    yield "absolute values", tensor.abs()
    yield "negative values", -tensor.abs()
    yield "negated", -tensor
    yield "plus 3", tensor + 3
    yield "minus 3", tensor - 3


def _made_calls(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with one tensor, or all tensors, of its arguments changed."""
    found, spec = _pytree.tree_flatten_with_path(dict(call.values))
    leaves = [leaf for _, leaf in found]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for place in places[:8]:
        where = _pytree.keystr(found[place][0])
        for text, tensor in _perturbations(leaves[place]):
            made = [tensor if i == place else leaf for i, leaf in enumerate(leaves)]
            yield f"{text} in {where}", Call(_pytree.tree_unflatten(made, spec))
    if len(places) > 1:
        for text in ("zeros", "times 1000", "absolute values", "negative values"):
            made = [
                dict(_perturbations(leaf)).get(text, leaf) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
            yield f"{text} in all arguments", Call(_pytree.tree_unflatten(made, spec))


def _place(function: FunctionType) -> Place:
    return Place(function.__code__.co_filename, function.__code__.co_firstlineno)


class _Prover:
    """Collects what is proven; one `prove` each."""

    def __init__(
        self,
        original: FunctionType,
        rewritten: FunctionType,
        branches: Sequence[Branch],
        watched: FunctionType,
        forced: FunctionType,
        new_probe: Callable[[], Probe],
    ) -> None:
        self.original = original
        self.rewritten = rewritten
        self.branches = branches
        self.watched = watched
        self.forced = forced
        self.new_probe = new_probe
        self.wanted = {(branch.number, outcome) for branch in branches for outcome in (True, False)}
        self.how: dict[_Pair, str] = {}
        self.missed: dict[_Pair, str] = {}
        self.runs = 0

    def outcomes(self, call: Call, force: dict[int, bool] | None = None) -> tuple[set[_Pair], Outcome]:
        """The outcomes that a call has, and what the instrumented original gives."""
        probe = self.new_probe()
        probe.forced = force or {}
        with probe.active(self.watched):
            got = replay(self.watched, call)
        return {(n, o) for n, counts in probe.outcomes.items() for o in counts} & self.wanted, got

    def compare(self, reference: Outcome, function: FunctionType, call: Call, text: str) -> None:
        """Refuse where the results differ."""
        got = replay(function, call, both=True)
        found = outcomes_differ(reference, got)
        if found is not None:
            raise RewriteRefused(
                f"the rewritten {target_name(self.original)} differs from the original ({text}): {found}",
                "rewrite this function by hand",
                self.branches[0].place if self.branches else _place(self.original),
            )
        self.runs += 1

    def means(self, reference: Outcome, pairs: set[_Pair]) -> bool:
        """Whether a call says something about outcomes: it ends well, or in the error that they stand for."""
        raising = {(b.number, b.raises) for b in self.branches if b.raises is not None}
        return reference.error is None or bool(raising & pairs)

    def observed(self, calls: Sequence[Call]) -> None:
        for position, call in enumerate(calls):
            reached, _ = self.outcomes(call)
            self.compare(replay(self.original, call), self.rewritten, call, f"observed call {position}")
            for pair in reached:
                self.how.setdefault(pair, "observed")

    def made(self, calls: Sequence[Call]) -> None:
        for call in calls[:_CALLS]:
            for text, made in _made_calls(call):
                if self.wanted <= set(self.how):
                    return
                reached, got = self.outcomes(made)
                if isinstance(got.error, Endless):
                    continue  # nor would the original end
                new = reached - set(self.how)
                reference = replay(self.original, made) if new else None
                if reference is not None and self.means(reference, new):
                    self.compare(reference, self.rewritten, made, f"made: {text}")
                    self.how.update(dict.fromkeys(new, f"made: {text}"))

    def force(self, calls: Sequence[Call]) -> None:
        queue: list[dict[int, bool]] = [{n: o} for n, o in sorted(self.wanted - set(self.how))]
        tried: list[dict[int, bool]] = []
        while queue and len(tried) < _COMBINATIONS:
            force = queue.pop(0)
            tried.append(force)
            for call in calls[:_CALLS]:
                reached, reference = self.outcomes(call, force)
                if not set(force.items()) <= reached:
                    # The test is inside another branch: take that one first.
                    for number, outcome in sorted(reached - set(force.items())):
                        other = {number: not outcome, **force}
                        if number not in force and other not in tried and other not in queue:
                            queue.append(other)
                    continue
                new = set(force.items()) - set(self.how)
                if not self.means(reference, set(force.items())):
                    assert reference.error is not None
                    text = (str(reference.error).splitlines() or [""])[0]
                    self.missed.update(dict.fromkeys(new, f"{type(reference.error).__name__}: {text}"))
                    continue
                probe = self.new_probe()
                probe.forced = force
                with probe.active(self.forced):
                    self.compare(reference, self.forced, call, f"outcome forced: {sorted(force.values())}")
                self.how.update(dict.fromkeys(new, "forced"))

    def proof(self) -> Proof:
        """One entry for each test in the source; a test that was duplicated is proven when all copies are."""
        found: dict[tuple[str, str, bool], BranchProof] = {}
        for branch in self.branches:
            for outcome in (True, False):
                pair = (branch.number, outcome)
                missed = self.missed.get(pair, "no observed, made or forced call takes it")
                proof = BranchProof(
                    branch.place, branch.test, outcome, self.how.get(pair) or f"not reached: {missed}"
                )
                key = (str(branch.place), branch.test, outcome)
                if key not in found or not proof.proven:
                    found[key] = proof
        return Proof(tuple(found.values()), self.runs)


def prove(
    original: FunctionType,
    rewritten: FunctionType,
    branches: Sequence[Branch],
    calls: Sequence[Call],
    *,
    watched: FunctionType,
    forced: FunctionType,
    new_probe: Callable[[], Probe],
) -> Proof:
    """Compare a rewritten function with its original: on observed calls, on made ones, with forced outcomes.

    Parameters
    ----------
    original:
        A function of its own with the original's code: not one whose code is exchanged meanwhile.
    watched:
        The instrumented original, which says what outcomes a call has and takes forced ones.
    forced:
        The rewritten function that takes forced outcomes.
    new_probe:
        Makes a probe for one run.

    Raises
    ------
    RewriteRefused
        A result, a changed argument or an attribute differs.
    """
    prover = _Prover(original, rewritten, branches, watched, forced, new_probe)
    prover.observed(calls)
    prover.made(calls)
    prover.force(calls)
    return prover.proof()
