"""Values inside: the first node whose output leaves the tolerance, and whether it is a jump or a slow drift.

Two questions are asked of every FX node that has a value of its name in the ONNX graph. How far is that
value from torch's? And how far would it be if torch computed this one node from the *ONNX* values of its
inputs? The second is the node's own error: where it is large, the node is wrong; where all of them are small
and the first ones grow all the same, rounding drifts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..checks.compare import LeafComparison, Tolerances, compare_leaf
from ..exporters.base import Exported
from ..plurals import counted
from .onnx_models import fx_node_of, inner_values, optimized_by_onnxruntime, proto_of, run_nodes
from .programs import Interpretation, module_path, source_line
from .subject import Clock, Sample, first_line

__all__ = ["NodeError", "NodeSearch", "first_bad_node"]

#: Values kept on both sides together; beyond it the search stops and says where.
_MOST_BYTES = 4 << 30

#: Rows of the profile that are shown.
_PROFILE = 8


@dataclass(frozen=True)
class NodeError:
    """One value inside.

    Attributes
    ----------
    name, operator:
        Of the FX node, which is also the name of the ONNX value.
    onnx_nodes:
        The ONNX nodes that were made from it: ``Gemm``, ``Mul -> Erf -> Mul``.
    module, source:
        Where in the model: ``layers.0.mlp (LlamaMLP)``, ``modeling_llama.py:180: ...``.
    error:
        Largest error, relative to the size of the value.
    own_error:
        The same for this node alone, from the ONNX values of its inputs; ``None`` if it was not measured.
    outside, own_outside:
        Whether the errors are outside the tolerance.
    reason:
        Where it is no matter of numbers: ``shape 2x3 instead of 2x4``.
    """

    name: str
    operator: str
    onnx_nodes: str = ""
    module: str = ""
    source: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    error: float = 0.0
    own_error: float | None = None
    outside: bool = False
    own_outside: bool = False
    reason: str = ""

    def text(self) -> str:
        """One line."""
        place = "; ".join(part for part in (self.module, self.source) if part)
        made = f", in ONNX {self.onnx_nodes}" if self.onnx_nodes else ""
        problem = self.reason or f"max abs {self.max_abs:.1e}, relative to its size {self.error:.1e}"
        return f"%{self.name} = {self.operator}{made}: {problem}" + (f" [{place}]" if place else "")

    def to_record(self) -> dict[str, Any]:
        """Plain builtins."""
        return {**vars(self), "shape": list(self.shape) if self.shape is not None else None}


@dataclass
class NodeSearch:
    """What the search found.

    Attributes
    ----------
    kind:
        ``jump``: `first` computes something else than its FX node does; ``drift``: every node is right on
        its own and errors add up; ``none``: no value is outside the tolerance.
    first:
        ``jump``: the node. ``drift``: the first whose value is outside the tolerance.
    kernel:
        For a jump: ``True`` if the reference evaluator computes the same ONNX nodes as torch does (a kernel
        of the runtime is wrong), ``False`` if it agrees with the runtime (the conversion is wrong), ``None``
        if that is not known; `kernel_note` says why.
    compared, nodes:
        How many values were compared, and how many call nodes the graph has.
    overflow:
        The first value that leaves the range of its float16 (bfloat16) dtype in torch, from finite inputs.
    profile:
        Every compared value in the order of the graph.
    note:
        What was left out, and why.
    """

    kind: str = "none"
    first: NodeError | None = None
    kernel: bool | None = None
    kernel_note: str = ""
    compared: int = 0
    nodes: int = 0
    overflow: NodeError | None = None
    profile: list[NodeError] = field(default_factory=list, repr=False)
    note: str = ""

    def lines(self) -> list[str]:
        """The node, and how the error grows along the graph."""
        compared = f"{self.compared} of {counted(self.nodes, 'value')} compared"
        if self.first is None:
            rest = f" ({self.note})" if self.note else ""
            return [f"first node: none is outside the tolerance, {compared}{rest}"]
        found = [f"first node ({self.kind}): {self.first.text()}"]
        if self.kind == "overflow":
            found.append("  no node is wrong: torch is infinite from there on, the program is not")
        elif self.kind == "drift":
            found.append("  no node is wrong on its own: rounding errors add up along the graph")
        elif self.kernel is not None or self.kernel_note:
            found.append(f"  {self.kernel_note}")
        found.append(f"  {compared}; error relative to the size of each value along the graph:")
        for entry in self._shown():
            own = f", own {entry.own_error:.1e}" if entry.own_error is not None else ""
            mark = " <- first" if entry.name == self.first.name else ""
            found.append(f"    {entry.error:.1e}{own}  %{entry.name} {entry.module}{mark}")
        if self.note:
            found.append(f"  {self.note}")
        return found

    def _shown(self) -> list[NodeError]:
        found = self.first.name if self.first is not None else ""
        numbers = [entry for entry in self.profile if not entry.reason or entry.name == found]
        if len(numbers) <= _PROFILE or self.first is None:
            return numbers[:_PROFILE]
        at = next(i for i, entry in enumerate(numbers) if entry.name == found)
        picked = {0, max(at - 1, 0), at, min(at + 1, len(numbers) - 1), len(numbers) - 1}
        picked |= {at * k // 3 for k in (1, 2)} | {at + (len(numbers) - at) * k // 3 for k in (1, 2)}
        return [numbers[index] for index in sorted(index for index in picked if index < len(numbers))]

    def to_record(self) -> dict[str, Any]:
        """Plain builtins."""
        return {
            "kind": self.kind,
            "first": self.first.to_record() if self.first is not None else None,
            "kernel": self.kernel,
            "kernel_note": self.kernel_note,
            "compared": self.compared,
            "nodes": self.nodes,
            "overflow": self.overflow.to_record() if self.overflow is not None else None,
            "profile": [[entry.name, entry.error, entry.own_error] for entry in self._shown()],
            "note": self.note,
        }


def first_bad_node(
    program: torch.export.ExportedProgram,
    exported: Exported,
    sample: Sample,
    tolerances: Tolerances,
    clock: Clock,
    *,
    level: str = "DISABLE_ALL",
    device: str = "cpu",
) -> NodeSearch:
    """The first ONNX value that leaves the tolerance, against the FX program it was converted from.

    Parameters
    ----------
    program:
        The decomposed program; its nodes give their names to the ONNX values.
    exported:
        The ONNX model, unoptimized or optimized.
    tolerances:
        For the values along the graph; whether a node is wrong *on its own* is judged by the defaults of its
        dtype, since a tolerance stricter than rounding makes every node wrong.
    level:
        Of ONNX Runtime's optimization that the values are to be of; the graph is taken as it makes it, since
        asking for inner values of the original would stop it from optimizing.
    """
    search = NodeSearch()
    reference = Interpretation(program)
    reference.outputs(sample.tensors, [path for path, _ in sample.expected])
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    search.nodes = len(calls)
    if level != "DISABLE_ALL":
        exported = optimized_by_onnxruntime(exported, level, device)
    size = sum(v.numel() * v.element_size() for v in reference.values.values() if _is_tensor(v))
    if 2 * size > _MOST_BYTES:
        search.note = f"not searched: the values inside take {size / 2**30:.1f} GiB"
        return search
    names = [node.name for node in calls]
    inner = inner_values(exported, sample.tensors, names, device, more=lambda: not clock.over)
    as_torch = {name: _from_parts(reference.values.get(name), value) for name, value in inner.items()}
    made = _made_from(proto_of(exported.program))
    general = Tolerances(tolerances.atol, tolerances.rtol, None, tolerances.computed_in)
    for node in calls:
        if node.name not in inner:
            continue
        if clock.over:
            search.note = f"the time budget was used up at %{node.name}"
            break
        entry = _judge(node, reference, as_torch, general, made)
        if entry is not None:
            search.compared += 1
            search.profile.append(entry)
            if search.overflow is None and (count := _overflowing(node, reference)):
                total = reference.values[node.name].numel()
                reason = f"leaves the range of {entry.dtype} in torch, in {count} of {total}"
                search.overflow = replace(entry, reason=reason, outside=True)
    wrong = next((entry for entry in search.profile if entry.own_outside), None)
    outside = next((entry for entry in search.profile if entry.outside), None)
    if wrong is not None:
        search.kind, search.first = "jump", wrong
        if level == "DISABLE_ALL":
            # Of a fused node it is known already that it is right without the optimization.
            _ask_the_evaluator(search, wrong, program, exported, reference, inner, device)
    elif outside is not None:
        search.kind, search.first = "drift", outside
    return search


def _from_parts(expected: Any, got: Any) -> Any:
    """A complex value of torch is its parts in ONNX, on one more axis."""
    if not (_is_tensor(expected) and _is_tensor(got) and expected.is_complex()):
        return got
    if got.shape != (*expected.shape, 2) or got.dtype != expected.dtype.to_real():
        return got
    return torch.view_as_complex(got.contiguous())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _made_from(proto: Any) -> dict[str, list[Any]]:
    """FX node name -> the ONNX nodes that were made from it, in order."""
    found: dict[str, list[Any]] = {}
    for node in proto.graph.node:
        name = fx_node_of(node)
        if not name:
            # A rewritten node says nothing; its output often keeps the name of the value it computes.
            name = next(iter(node.output), "")
        found.setdefault(name, []).append(node)
    return found


def _judge(
    node: torch.fx.Node,
    reference: Interpretation,
    inner: Mapping[str, Any],
    tolerances: Tolerances,
    made: Mapping[str, list[Any]],
) -> NodeError | None:
    expected, got = reference.values.get(node.name), inner[node.name]
    if not isinstance(expected, (torch.Tensor, int, float)):
        return None
    result = compare_leaf(node.name, expected, got, tolerances)
    own: LeafComparison | None = None
    maker = _maker(node)
    try:
        again = _again(node, reference, inner)
        own = compare_leaf(node.name, again, got, Tolerances(computed_in=tolerances.computed_in))
    except Exception:  # values of other shapes: the node is judged by its value alone
        own = None
    size = _size(expected)
    return NodeError(
        node.name,
        str(maker.target) if maker is node else f"{maker.target}[{node.args[1]}]",
        " -> ".join(n.op_type for n in made.get(node.name) or made.get(maker.name, [])),
        module_path(node),
        source_line(node.meta.get("stack_trace")),
        result.shape,
        result.dtype,
        result.max_abs,
        result.max_rel,
        result.max_abs / size,
        own.max_abs / size if own is not None else None,
        not result.ok,
        not own.ok if own is not None else not result.ok,
        result.reason or (own.reason if own is not None else ""),
    )


def _overflowing(node: torch.fx.Node, reference: Interpretation) -> int:
    """How many elements of torch's value are infinite, and finite when the node is computed in float64."""
    value = reference.values.get(node.name)
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float16, torch.bfloat16):
        return 0
    infinite = torch.isinf(value)
    if not bool(infinite.any()):
        return 0
    maker = _maker(node)
    kept = {n.name: reference.values.get(n.name) for n in maker.all_input_nodes}
    floats = {k: v for k, v in kept.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    wider = {name: tensor.double() for name, tensor in floats.items()}
    try:
        again = reference.again(maker, wider)
        again = again if maker is node else again[node.args[1]]
        beyond = torch.isfinite(again) & (again.abs() > torch.finfo(value.dtype).max)
        return int((infinite & beyond).sum())
    except Exception:  # an operator that does not take float64: nothing is known of it
        return 0


def _maker(node: torch.fx.Node) -> torch.fx.Node:
    """An item of what an operator returns is computed by that operator."""
    maker = node.args[0] if node.target is operator.getitem else node
    return maker if isinstance(maker, torch.fx.Node) and maker.op == "call_function" else node


def _again(node: torch.fx.Node, reference: Interpretation, inner: Mapping[str, Any]) -> Any:
    """What torch computes at `node` from the ONNX values of its inputs; raises what the operator raises."""
    maker = _maker(node)
    sources = {n.name: inner[n.name] for n in maker.all_input_nodes if _replaces(n, reference, inner)}
    again = reference.again(maker, sources)
    return again if maker is node else again[node.args[1]]


def _replaces(node: torch.fx.Node, reference: Interpretation, inner: Mapping[str, Any]) -> bool:
    """Whether the ONNX value of an input can take the place of torch's."""
    value, got = reference.values.get(node.name), inner.get(node.name)
    return (
        isinstance(value, torch.Tensor)
        and isinstance(got, torch.Tensor)
        and value.dtype == got.dtype
        and node.op == "call_function"
    )


def _size(value: Any) -> float:
    """Largest absolute finite value, 1 if there is none."""
    if not isinstance(value, torch.Tensor) or not value.numel() or value.dtype is torch.bool:
        return 1.0
    flat = value.detach().abs().to(torch.float64)
    flat = flat[torch.isfinite(flat) & (flat > 0)]
    return float(flat.max()) if flat.numel() else 1.0


def _ask_the_evaluator(
    search: NodeSearch,
    wrong: NodeError,
    program: torch.export.ExportedProgram,
    exported: Exported,
    reference: Interpretation,
    inner: Mapping[str, Any],
    device: str,
) -> None:
    """Run the ONNX nodes of one FX node in the reference evaluator, on the values that the runtime had."""
    proto = proto_of(exported.program)
    nodes = _slice(proto, wrong.name, set(inner))
    if not nodes:
        search.kernel_note = "its ONNX nodes are not known: the graph or a kernel may be wrong"
        return
    values = {**_inputs(exported, reference, program), **{k: v for k, v in inner.items() if _is_tensor(v)}}
    operators = " -> ".join(node.op_type for node in nodes)
    try:
        found = run_nodes(proto, nodes, values, [wrong.name], "reference")[wrong.name]
    except Exception as error:  # an operator that the evaluator lacks, or one that it cannot run
        search.kernel_note = (
            f"the reference evaluator cannot run {operators} ({first_line(error)}): "
            "the graph or a kernel is wrong"
        )
        return
    if compare_leaf(wrong.name, found, inner[wrong.name], Tolerances()).ok:
        search.kernel = False
        search.kernel_note = (
            f"the reference evaluator computes the same for {operators}: the graph is wrong, no kernel"
        )
        return
    otherwise = f"the reference evaluator computes {operators} otherwise than onnxruntime"
    node = next(node for node in program.graph.nodes if node.name == wrong.name)
    as_torch = {name: _from_parts(reference.values.get(name), value) for name, value in inner.items()}
    try:
        again = _again(node, reference, as_torch)
        right = compare_leaf(wrong.name, again, _from_parts(again, found), Tolerances()).ok
    except Exception:  # as where the node was judged
        right = False
    search.kernel = True if right else None
    search.kernel_note = (
        f"{otherwise}: a kernel is wrong"
        if right
        else f"{otherwise}, and otherwise than torch: it says nothing about the kernel"
    )


def _slice(proto: Any, name: str, known: set[str]) -> list[Any]:
    """The nodes that compute `name` from values that are known, in order."""
    inputs = {value.name for value in proto.graph.input} | {v.name for v in proto.graph.initializer}
    producers = {output: node for node in proto.graph.node for output in node.output}
    needed, pending = [], [name]
    seen: set[str] = set()
    while pending:
        value = pending.pop()
        node = producers.get(value)
        if node is None or value in seen or (value != name and value in known) or value in inputs:
            continue
        seen.update(node.output)
        needed.append(node)
        pending.extend(node.input)
    ids = {id(node) for node in needed}
    return [node for node in proto.graph.node if id(node) in ids]


def _inputs(
    exported: Exported, reference: Interpretation, program: torch.export.ExportedProgram
) -> dict[str, torch.Tensor]:
    """ONNX input name -> value."""
    found = {}
    for name in program.graph_signature.user_inputs:
        value = reference.values.get(str(name))
        if isinstance(value, torch.Tensor):
            found[str(name)] = value
            found[f"{name}_orig"] = value
    return {**found, **exported.extra_inputs}
