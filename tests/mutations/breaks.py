"""Ways to break an ONNX model, and ways to change one that break nothing.

Each takes a `Subject`, changes its model (a copy) in place and returns whether it applies to such a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["BREAKS", "HARMLESS", "Subject"]

_FLOATS = (TensorProto.FLOAT,)
_INTS = (TensorProto.INT64, TensorProto.INT32)


@dataclass
class Subject:
    """An exported model.

    Attributes
    ----------
    model:
        To be changed.
    shapes:
        Name of an output -> its shapes in the observed calls.
    paths:
        Name of an output -> its path.
    output_paths:
        As in `Exported`, to be changed along with the outputs.
    """

    model: onnx.ModelProto
    shapes: Mapping[str, list[tuple[int, ...]]]
    paths: Mapping[str, str]
    output_paths: list[str]
    _fresh: int = field(default=0)

    @property
    def graph(self) -> onnx.GraphProto:
        return self.model.graph

    def name(self) -> str:
        self._fresh += 1
        return f"mutant_{self._fresh}"

    def constant(self, value: Any) -> str:
        name = self.name()
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node (in front of nothing that uses it yet) and return its output."""
        name = self.name()
        self.graph.node.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def nodes(self, *ops: str) -> Iterator[onnx.NodeProto]:
        return (node for node in self.graph.node if node.op_type in ops)

    def outputs(self, *types: int, rank: int = 0) -> Iterator[onnx.ValueInfoProto]:
        for value in self.graph.output:
            tensor = value.type.tensor_type
            if tensor.elem_type in types and len(tensor.shape.dim) >= rank:
                yield value

    def reroute_output(self, value: onnx.ValueInfoProto, make: Callable[[str], str]) -> None:
        """The graph's output becomes what `make` appends for the value that it was."""
        old = self.name()
        for node in self.graph.node:
            for names in (node.input, node.output):
                for at, name in enumerate(names):
                    if name == value.name:
                        names[at] = old
        self.graph.node.append(helper.make_node("Identity", [make(old)], [value.name]))

    def replace_uses(self, name: str, other: str) -> None:
        for node in self.graph.node:
            for at, used in enumerate(node.input):
                if used == name:
                    node.input[at] = other

    def bypass(self, node: onnx.NodeProto, position: int) -> None:
        """`node` passes one of its inputs on."""
        kept = node.input[position]
        del node.attribute[:]
        node.op_type, node.domain = "Identity", ""
        del node.input[:]
        node.input.append(kept)

    def weights(self) -> list[tuple[int, np.ndarray[Any, Any]]]:
        """(index, value) of float initializers with two axes or more."""
        found = []
        for at, tensor in enumerate(self.graph.initializer):
            if tensor.data_type in _FLOATS and len(tensor.dims) >= 2:
                found.append((at, numpy_helper.to_array(tensor).copy()))
        return found

    def set_weight(self, at: int, value: np.ndarray[Any, Any]) -> None:
        name = self.graph.initializer[at].name
        self.graph.initializer[at].CopyFrom(numpy_helper.from_array(value, name))


def weight(s: Subject) -> bool:
    """One element of the last weight, by 5% of the largest."""
    if not s.weights():
        return False
    at, value = s.weights()[-1]
    value.flat[value.size // 2] += 0.05 * np.abs(value).max()
    s.set_weight(at, value)
    return True


def every_weight_a_little(s: Subject) -> bool:
    """Wrong precision: weights rounded to 10 bits, as in TF32 or float16."""
    for at, value in s.weights():
        s.set_weight(at, value.astype(np.float16).astype(np.float32))
    return bool(s.weights())


def swap_outputs(s: Subject) -> bool:
    outputs = list(s.graph.output)
    for first, one in enumerate(outputs):
        for second, two in enumerate(outputs[first + 1 :], first + 1):
            if s.shapes[one.name] == s.shapes[two.name] and (
                one.type.tensor_type.elem_type == two.type.tensor_type.elem_type
            ):
                outputs[first], outputs[second] = outputs[second], outputs[first]
                kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in outputs]
                del s.graph.output[:]
                s.graph.output.extend(kept)
                return True
    return False


def swap_inputs(s: Subject) -> bool:
    """Of two inputs of one type, each goes where the other went."""
    inputs = list(s.graph.input)
    for first, one in enumerate(inputs):
        for two in inputs[first + 1 :]:
            a, b = one.type.tensor_type, two.type.tensor_type
            used = {name for node in s.graph.node for name in node.input}
            if (
                a.elem_type == b.elem_type
                and len(a.shape.dim) == len(b.shape.dim)
                and {one.name, two.name} <= used
            ):
                aside = s.name()
                s.replace_uses(one.name, aside)
                s.replace_uses(two.name, one.name)
                s.replace_uses(aside, two.name)
                return True
    return False


def _drop(op: str, position: int) -> Callable[[Subject], bool]:
    def dropped(s: Subject) -> bool:
        nodes = list(s.nodes(op))
        for node in nodes:
            s.bypass(node, position)
        return bool(nodes)

    return dropped


def drop_where(s: Subject) -> bool:
    """Scores are not masked: every Where gives its first branch, in the shape of both."""
    nodes = list(s.nodes("Where"))
    for node in nodes:
        yes = s.constant(np.asarray(True))
        node.input[0] = yes
    return bool(nodes)


def bake_mask(s: Subject) -> bool:
    """The attention mask is taken to be all ones."""
    for value in s.graph.input:
        if "mask" in value.name:
            one = s.constant(np.asarray(1, dtype=np.int64))
            s.replace_uses(value.name, s.node("Expand", one, s.node("Shape", value.name)))
            # What was appended must come first.
            made = [s.graph.node.pop(), s.graph.node.pop()]
            made[0].input[0] = one
            for node in made:
                s.graph.node.insert(0, node)
            s.graph.node[0].input[0] = value.name
            return True
    return False


def freeze_axis(s: Subject) -> bool:
    for value in s.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_value = 2
                return True
    return False


def output_dtype(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, *_INTS, TensorProto.BOOL):
        old = value.type.tensor_type.elem_type
        new = TensorProto.FLOAT16 if old in _FLOATS else TensorProto.INT32 if old == TensorProto.INT64 else 7
        s.reroute_output(value, lambda name, new=new: s.node("Cast", name, to=new))
        value.type.tensor_type.elem_type = new
        return True
    return False


def _at_largest(s: Subject, name: str, then: str) -> str:
    top = s.node("ReduceMax", name, keepdims=1)
    return s.node("Where", s.node("Equal", name, top), then, name)


def nan_in_one_element(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, rank=1):
        nan = s.constant(np.float32("nan"))
        s.reroute_output(value, lambda name, nan=nan: _at_largest(s, name, nan))
        return True
    return False


def infinity_as_a_number(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, rank=1):
        if s.paths[value.name] == "scores":
            low = s.constant(np.finfo(np.float32).min)
            s.reroute_output(value, lambda name, low=low: s.node("Max", name, low))
            return True
    return False


def bake_batch(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, rank=2):
        shapes = s.shapes[value.name]
        if len({shape[0] for shape in shapes}) > 1:
            to = s.constant(np.asarray([shapes[0][0]] + [0] * (len(shapes[0]) - 1), dtype=np.int64))
            s.reroute_output(value, lambda name, to=to: s.node("Reshape", name, to))
            return True
    return False


def _rolled(s: Subject, name: str, axis: int) -> str:
    zero, one, end = (s.constant(np.asarray([n], dtype=np.int64)) for n in (0, 1, 2**62))
    along = s.constant(np.asarray([axis], dtype=np.int64))
    first = s.node("Slice", name, zero, one, along)
    return s.node("Concat", s.node("Slice", name, one, end, along), first, axis=axis)


def shift_cache(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, rank=4):
        s.reroute_output(value, lambda name: _rolled(s, name, 2))
        return True
    return False


def roll_batch(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, *_INTS, rank=1):
        s.reroute_output(value, lambda name: _rolled(s, name, 0))
        return True
    return False


def _attribute(op: str, name: str, change: Callable[[Any], Any]) -> Callable[[Subject], bool]:
    def changed(s: Subject) -> bool:
        for node in s.nodes(op):
            for at, attribute in enumerate(node.attribute):
                if attribute.name == name:
                    value = change(helper.get_attribute_value(attribute))
                    node.attribute[at].CopyFrom(helper.make_attribute(name, value))
                    return True
        return False

    return changed


def epsilon(s: Subject) -> bool:
    """1e-5 becomes 1e-3, as attribute or as the constant that is added."""
    for node in s.graph.node:
        for at, attribute in enumerate(node.attribute):
            if attribute.name == "epsilon":
                node.attribute[at].CopyFrom(helper.make_attribute("epsilon", 1e-3))
                return True
    for at, tensor in enumerate(s.graph.initializer):
        if tensor.data_type in _FLOATS and not tensor.dims:
            value = float(numpy_helper.to_array(tensor))
            if 0 < value <= 1e-5:
                s.set_weight(at, np.asarray(1e-3, dtype=np.float32))
                return True
    return False


def int_plus_one(s: Subject) -> bool:
    for value in s.outputs(TensorProto.INT64, rank=1):

        def plus(name: str) -> str:
            return _at_largest(s, name, s.node("Add", name, s.constant(np.asarray(1, dtype=np.int64))))

        s.reroute_output(value, plus)
        return True
    return False


def flip_a_boolean(s: Subject) -> bool:
    for value in s.outputs(TensorProto.BOOL):
        s.reroute_output(value, lambda name: s.node("Or", name, s.node("Not", name)))
        return True
    return False


def drop_output(s: Subject) -> bool:
    s.graph.output.pop()
    return True


def drop_output_and_path(s: Subject) -> bool:
    """The exporter itself does not know of it."""
    s.graph.output.pop()
    s.output_paths.pop()
    return bool(s.output_paths)


def add_output(s: Subject) -> bool:
    last = s.graph.output[-1]
    extra = onnx.ValueInfoProto.FromString(last.SerializeToString())
    extra.name = s.name()
    s.graph.node.append(helper.make_node("Identity", [last.name], [extra.name]))
    s.graph.output.append(extra)
    return True


def add_output_and_path(s: Subject) -> bool:
    add_output(s)
    s.output_paths.append("more")
    return True


def greater_or_equal(s: Subject) -> bool:
    for node in s.nodes("Greater"):
        node.op_type = "GreaterOrEqual"
        return True
    return False


def truncate_to_the_longest_seen(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, rank=2):
        shapes = s.shapes[value.name]
        for axis in reversed(range(len(shapes[0]))):
            sizes = {shape[axis] for shape in shapes}
            if len(sizes) > 1:
                ends = [s.constant(np.asarray([n], dtype=np.int64)) for n in (0, max(sizes), axis)]
                s.reroute_output(value, lambda name, ends=ends: s.node("Slice", name, *ends))
                return True
    return False


def attention_scale(s: Subject) -> bool:
    """Scores 1% larger."""
    found = [node for node in s.graph.node if node.op_type == "Softmax"]
    for node in found:
        scaled = s.name()
        made = helper.make_node("Mul", [node.input[0], s.constant(np.float32(1.01))], [scaled])
        s.graph.node.insert(list(s.graph.node).index(node), made)
        node.input[0] = scaled
    return bool(found)


def transpose_output(s: Subject) -> bool:
    for value in s.outputs(*_FLOATS, rank=2):
        shape = s.shapes[value.name][0]
        square = len(shape) == 2 and shape[0] == shape[1]
        if square or len(s.graph.output) == 1:
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            s.reroute_output(value, lambda name, order=order: s.node("Transpose", name, perm=order))
            return True
    return False


def scale_output(s: Subject) -> bool:
    """By one in a thousand."""
    for value in s.outputs(*_FLOATS):
        s.reroute_output(value, lambda name: s.node("Mul", name, s.constant(np.float32(1.001))))
        return True
    return False


def small_head(s: Subject) -> bool:
    """0.002 added to the small channels of an output that has large ones."""
    for value in s.outputs(*_FLOATS, rank=3):
        shape = s.shapes[value.name][0]
        if len(s.graph.output) == 1 and shape[1] == 6:
            more = np.zeros((1, 6, 1), dtype=np.float32)
            more[:, 4:] = 2e-3
            s.reroute_output(value, lambda name, more=more: s.node("Add", name, s.constant(more)))
            return True
    return False


def drop_bias(s: Subject) -> bool:
    names = {tensor.name for tensor in s.graph.initializer if len(tensor.dims) == 1}
    for node in s.nodes("Gemm", "Conv"):
        if len(node.input) == 3:
            node.input.pop()
            return True
    for node in s.nodes("Add"):
        for at, name in enumerate(node.input):
            if name in names:
                s.bypass(node, 1 - at)
                return True
    return False


BREAKS: dict[str, Callable[[Subject], bool]] = {
    "weight": weight,
    "weights rounded": every_weight_a_little,
    "swap outputs": swap_outputs,
    "swap inputs": swap_inputs,
    "drop And": _drop("And", 0),
    "drop Where": drop_where,
    "mask all ones": bake_mask,
    "freeze axis": freeze_axis,
    "output dtype": output_dtype,
    "NaN": nan_in_one_element,
    "inf as number": infinity_as_a_number,
    "bake batch": bake_batch,
    "shift cache": shift_cache,
    "roll batch": roll_batch,
    "softmax axis": _attribute("Softmax", "axis", lambda axis: -2),
    "concat axis": _attribute("Concat", "axis", lambda axis: axis - 1 if axis > 0 else axis + 1),
    "pool padding": _attribute("AveragePool", "count_include_pad", lambda value: 1 - value),
    "conv pads": _attribute("Conv", "pads", lambda pads: [0] * len(pads)),
    "epsilon": epsilon,
    "int + 1": int_plus_one,
    "boolean": flip_a_boolean,
    "drop output": drop_output,
    "drop output silently": drop_output_and_path,
    "add output": add_output,
    "add output silently": add_output_and_path,
    "greater or equal": greater_or_equal,
    "truncate": truncate_to_the_longest_seen,
    "attention scale": attention_scale,
    "transpose output": transpose_output,
    "scale output": scale_output,
    "small head": small_head,
    "drop bias": drop_bias,
}


# nothing is broken


def nothing(s: Subject) -> bool:
    return True


def rename_nodes(s: Subject) -> bool:
    for at, node in enumerate(s.graph.node):
        node.name, node.doc_string = f"renamed_{at}", "renamed"
    return True


def rename_values(s: Subject) -> bool:
    """Inside the graph: neither inputs, outputs nor weights."""
    kept = {value.name for value in (*s.graph.input, *s.graph.output)}
    kept |= {tensor.name for tensor in s.graph.initializer} | {""}
    if any(attribute.HasField("g") for node in s.graph.node for attribute in node.attribute):
        return False
    del s.graph.value_info[:]
    for node in s.graph.node:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                names[at] = name if name in kept else f"v_{name}"
    return True


def reorder_inputs(s: Subject) -> bool:
    inputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in reversed(s.graph.input)]
    del s.graph.input[:]
    s.graph.input.extend(inputs)
    return len(inputs) > 1


def fold_constants(s: Subject) -> bool:
    import onnx_ir
    from onnxscript import optimizer

    model = onnx_ir.from_proto(s.model)
    optimizer.optimize(model)
    s.model.CopyFrom(onnx_ir.to_proto(model))
    return True


def last_ulp(s: Subject) -> bool:
    """Every float output off by one part in 2**23: another order of a sum."""
    factor = s.constant(np.float32(1 + 2**-23))
    outputs = list(s.outputs(*_FLOATS))
    for value in outputs:
        s.reroute_output(value, lambda name: s.node("Mul", name, factor))
    return bool(outputs)


def identities(s: Subject) -> bool:
    for value in s.graph.output:
        s.reroute_output(value, lambda name: s.node("Identity", name))
    return True


HARMLESS: dict[str, Callable[[Subject], bool]] = {
    "nothing": nothing,
    "rename nodes": rename_nodes,
    "rename values": rename_values,
    "reorder inputs": reorder_inputs,
    "fold constants": fold_constants,
    "last ulp": last_ulp,
    "identities": identities,
}
