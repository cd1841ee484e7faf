"""ONNX models taken apart: at a level of ONNX Runtime's optimization, with inner values, in the evaluator."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..exporters.base import Exported
from ..pytrees import flatten_with_paths
from ..runtimes.onnx_runtime import OnnxRuntimeSession

__all__ = [
    "LEVELS",
    "OPTIMIZERS",
    "fx_node_of",
    "inner_values",
    "optimized_by_onnxruntime",
    "proto_of",
    "reference_outputs",
    "run_at_level",
    "run_nodes",
    "to_numpy",
    "to_torch",
]

#: Levels of `onnxruntime.GraphOptimizationLevel` in their order; each does what the one before does and more.
LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_LAYOUT", "ENABLE_ALL")

#: Graph optimizations of ONNX Runtime 1.24 to 1.32 by the names that ``disabled_optimizers`` takes; one that
#: a release does not have is ignored there.
OPTIMIZERS = (
    "AttentionFusion", "BiasDropoutFusion", "BiasGeluFusion", "BiasSkipLayerNormFusion", "BiasSoftmaxFusion",
    "CastChainElimination", "CastElimination", "ClipQuantRewrite", "CommonSubexpressionElimination",
    "ConstantFolding", "ConstantSharing", "ConvActivationFusion", "ConvAddActivationFusion", "ConvAddFusion",
    "ConvBNFusion", "ConvMulFusion", "DivMulFusion", "DoubleQDQPairsRemover", "DropQDQNodesRules",
    "DynamicQuantizeMatMulFusion", "EliminateDropout", "EliminateIdentity", "EliminateSlice",
    "EmbedLayerNormFusion", "ExpandElimination", "FastGeluFusion", "FuseReluClip",
    "FuseFp16InitializerToFp32NodeTransformer", "GatherSliceToSplitFusion", "GatherToSliceFusion",
    "GatherToSplitFusion", "GeluFusionL1", "GeluFusionL2", "GemmActivationFusion", "GemmSumFusion",
    "GemmTransposeFusion", "GroupQueryAttentionFusion", "LabelEncoderFusion", "LayerNormFusionL1",
    "LayerNormFusionL2", "MatMulActivationFusion", "MatMulAddFusion", "MatMulIntegerToFloatFusion",
    "MatMulNBitsFusion", "MatMulScaleFusion", "MatMul_BatchNormalization_Fusion", "MatmulTransposeFusion",
    "NchwcTransformer", "NhwcTransformer", "NoopElimination", "NotWhereFusion", "Pad_Fusion",
    "PreShapeNodeElimination", "QuickGeluFusion", "ReluQuantRewrite", "RemoveDuplicateCastTransformer",
    "ReshapeFusion", "ShapeToInitializer", "SimplifiedLayerNormFusion", "SkipLayerNormFusion",
    "SliceConcatToSpaceToDepthFusion", "SliceElimination", "SwiGluFusion", "TransposeOptimizer",
    "UnsqueezeElimination", "WhereDummyDq",
)  # fmt: skip

#: Values asked for in one session: outputs are copied, and each session loads the weights again.
_CHUNK = 200

_FX_NODE = re.compile(r"%(\w+)\b")


def proto_of(program: Any) -> Any:
    """``onnx.ModelProto`` of any form in which exporters return a model; a copy."""
    import onnx
    import onnx_ir

    if isinstance(program, onnx.ModelProto):
        copied = onnx.ModelProto()
        copied.CopyFrom(program)
        return copied
    if isinstance(program, bytes):
        return onnx.load_from_string(program)
    if isinstance(program, (str, Path)):
        return onnx.load(str(program))
    model = program.model if isinstance(program, torch.onnx.ONNXProgram) else program
    return onnx_ir.to_proto(model)


def _at_level(level: str, path: Path | None = None) -> Callable[[Any], None]:
    def configure(options: Any) -> None:
        import onnxruntime

        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
        if path is not None:
            options.optimized_model_filepath = str(path)

    return configure


def run_at_level(
    exported: Exported,
    arguments: Mapping[str, Any],
    level: str,
    device: str = "cpu",
    disabled: Sequence[str] = (),
) -> list[tuple[str, Any]]:
    """Outputs of a model in ONNX Runtime at one of `LEVELS`."""
    return OnnxRuntimeSession(exported, device, _at_level(level), disabled).run(arguments)


def optimized_by_onnxruntime(exported: Exported, level: str, device: str = "cpu") -> Exported:
    """The model that ONNX Runtime makes of it at `level`, to be run without further optimization."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="exportcheck-") as folder:
        path = Path(folder) / "optimized.onnx"
        OnnxRuntimeSession(exported, device, _at_level(level, path))
        return replace(exported, program=onnx.load(str(path)))


def fx_node_of(node: Any) -> str:
    """Name of the FX node that an ONNX node was made from, empty if it does not say."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.fx_node":
            found = _FX_NODE.match(entry.value)
            return found.group(1) if found else ""
    return ""


def inner_values(
    exported: Exported,
    arguments: Mapping[str, Any],
    names: Sequence[str],
    device: str = "cpu",
    more: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Values inside the graph, by name, from ONNX Runtime without optimization.

    Parameters
    ----------
    more:
        Asked before each chunk; what was not reached is absent from the result.
    """
    import onnx

    proto = proto_of(exported.program)
    present = {name for node in proto.graph.node for name in node.output if name}
    outputs = {value.name for value in proto.graph.output}
    wanted = [name for name in dict.fromkeys(names) if name in present]
    inside = [name for name in wanted if name not in outputs]
    found: dict[str, Any] = {}
    count = len(proto.graph.output)
    for start in range(0, max(len(inside), 1), _CHUNK):
        if not more():
            break
        chunk = inside[start : start + _CHUNK]
        # Without a type: ONNX Runtime infers it.
        proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in chunk)
        own = [f"\0{k}" for k in range(count)]
        asked = replace(exported, program=proto, output_paths=[*own, *chunk], constants={})
        values = run_at_level(asked, arguments, "DISABLE_ALL", device)
        found.update(values[count:])
        for position, value in enumerate(proto.graph.output[:count]):
            found.setdefault(value.name, values[position][1])
        del proto.graph.output[count:]
    return found


def to_numpy(tensor: torch.Tensor) -> Any:
    """A numpy array, of the types of ``ml_dtypes`` where numpy has none."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(value: Any) -> Any:
    """A torch tensor from what the reference evaluator returns."""
    import numpy

    if not isinstance(value, (numpy.ndarray, numpy.generic)):
        return value
    array = numpy.array(value)  # a copy that may be written into, and no scalar
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _feeds(exported: Exported, arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    feeds = {
        exported.input_names[path]: to_numpy(leaf)
        for root, value in arguments.items()
        for path, leaf in flatten_with_paths(value, root)
        if isinstance(leaf, torch.Tensor) and path in exported.input_names
    }
    feeds.update({name: to_numpy(value) for name, value in exported.extra_inputs.items()})
    return {name: feeds[name] for name in names if name in feeds}


def reference_outputs(
    exported: Exported, arguments: Mapping[str, Any], operators: Sequence[Any] = ()
) -> list[tuple[str, Any]]:
    """Outputs of a model in ``onnx.reference.ReferenceEvaluator``; it raises where it lacks an operator."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(proto_of(exported.program), new_ops=list(operators) or None)
    values = evaluator.run(None, _feeds(exported, arguments, evaluator.input_names))
    pairs = [
        (path, to_torch(value)) for path, value in zip(exported.output_paths, values, strict=True) if path
    ]
    return [*pairs, *exported.constants.items()]


def run_nodes(
    model: Any, nodes: Sequence[Any], values: Mapping[str, torch.Tensor], outputs: Sequence[str], engine: str
) -> dict[str, torch.Tensor]:
    """Some nodes of a model alone, fed with `values`, in ``"reference"`` or ``"onnxruntime"``."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    made = {name for node in nodes for name in node.output}
    initializers = {entry.name: entry for entry in model.graph.initializer}
    needed = [name for name in _used(nodes) if name and name not in made]
    weights = [initializers[name] for name in needed if name in initializers]
    inputs = [name for name in needed if name not in initializers and name in values]
    arrays = {name: to_numpy(values[name]) for name in inputs}
    infos = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape)
        )
        for name, array in arrays.items()
    ]
    graph = onnx.helper.make_graph(
        list(nodes),
        "nodes",
        infos,
        [onnx.helper.make_empty_tensor_value_info(name) for name in outputs],
        weights,
    )
    small = onnx.helper.make_model(graph, opset_imports=list(model.opset_import), functions=model.functions)
    small.ir_version = model.ir_version
    if engine == "reference":
        results = ReferenceEvaluator(small).run(list(outputs), arrays)
        return {name: to_torch(value) for name, value in zip(outputs, results, strict=True)}
    exported = Exported(small, {name: name for name in inputs}, list(outputs))
    found = run_at_level(exported, {name: values[name] for name in inputs}, "DISABLE_ALL")
    return dict(found)


def _used(nodes: Sequence[Any]) -> list[str]:
    """Names that nodes read, those that their subgraphs take from outside among them."""
    found: dict[str, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.input))
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs]:
                inner = {name for child in graph.node for name in child.output}
                inner |= {value.name for value in [*graph.input]} | {v.name for v in graph.initializer}
                found.update(dict.fromkeys(name for name in _used(graph.node) if name not in inner))
    return list(found)
