"""Run an ONNX model in ONNX Runtime: fed by name, outputs by path, 16-bit floats without numpy."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import RunError, SessionError
from ..exporters.base import Exported
from ..plurals import counted
from ..pytrees import flatten_with_paths
from .choices import Choice, chosen_outputs
from .dependence import inputs_by_output

__all__ = ["OnnxRuntimeSession", "is_onnx", "onnx_input_dims", "provider_for"]

#: ONNX TensorProto.DataType -> torch dtype (onnx/onnx.proto).
_TORCH = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    16: torch.bfloat16,
}
_ONNX = {dtype: code for code, dtype in _TORCH.items()}

#: Weights beyond this go to a file of their own, from which the session reads them. As one message they would
#: be in memory several times: as protobuf, serialized, once more while that is made, and in the session.
_INLINE_LIMIT = 16 * 1024 * 1024

#: Protobuf refuses messages of 2 GiB.
_MESSAGE_LIMIT = 1_500_000_000


def provider_for(device: str) -> str:
    """The execution provider that runs on `device` (``cpu``, ``cuda`` or ``cuda:1``)."""
    return "CUDAExecutionProvider" if device.startswith("cuda") else "CPUExecutionProvider"


def is_onnx(program: Any) -> bool:
    """True for the forms in which exporters return ONNX models."""
    if isinstance(program, (bytes, str, os.PathLike, torch.onnx.ONNXProgram)):
        return True
    import onnx
    import onnx_ir

    return isinstance(program, (onnx.ModelProto, onnx_ir.Model))


def onnx_input_dims(program: Any) -> dict[str, list[int | str | None]] | None:
    """Name -> declared dims of each input of an ONNX model; ``None`` for what is none, or cannot be read.

    A size, the name of a symbolic one, or ``None`` where nothing is declared.
    """
    import onnx
    import onnx_ir

    if not is_onnx(program):
        return None
    if isinstance(program, (bytes, str, os.PathLike)):
        try:
            load = onnx.load_from_string if isinstance(program, bytes) else _load_graph
            program = load(program)
        except Exception:
            return None  # the session says why
    if isinstance(program, onnx.ModelProto):
        return {
            value.name: [
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
                for dim in value.type.tensor_type.shape.dim
            ]
            for value in program.graph.input
        }
    model = program.model if isinstance(program, torch.onnx.ONNXProgram) else program
    assert isinstance(model, onnx_ir.Model)
    return {
        str(value.name): [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()]
        for value in model.graph.inputs
    }


def _load_graph(path: Any) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False)


def _weights_of(program: Any) -> int:
    """Bytes of the initializers."""
    import onnx

    if isinstance(program, onnx.ModelProto):
        return sum(map(_tensor_bytes, program.graph.initializer))
    return sum(
        int(value.const_value.nbytes)
        for value in program.graph.initializers.values()
        if value.const_value is not None
    )


def _tensor_bytes(tensor: Any) -> int:
    """Bytes of the values of a ``TensorProto``, wherever and however they lie."""
    import onnx

    if tensor.data_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return int(tensor.ByteSize())
    item = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return int(math.prod(tensor.dims) * item)


def _serialize(
    program: Any, folder: Callable[[], Path], output_paths: Sequence[str]
) -> tuple[bytes | str, dict[str, Any]]:
    """What `onnxruntime.InferenceSession` loads, and what the record says about it.

    Bytes, or the path of a file in `folder`, which is made when it is needed, with the weights beside it.
    """
    import onnx
    import onnx_ir

    if isinstance(program, bytes):
        return program, _describe(onnx.load_from_string(program), output_paths)
    if isinstance(program, (str, os.PathLike)):
        path = os.fspath(program)
        return path, _describe(_load_graph(path), output_paths)
    model = program.model if isinstance(program, torch.onnx.ONNXProgram) else program
    weights = _weights_of(model)
    if weights >= _INLINE_LIMIT:
        try:
            path = str(folder() / "model.onnx")
            # Leaves a proto that an exporter returned as it is; `onnx.save` takes the weights out of it.
            whole = onnx_ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
            onnx_ir.save(whole, path, external_data="model.onnx.data")
            return path, _describe(_load_graph(path), output_paths)
        except OSError:
            # A full disk is no failure of the model, as long as there is another way.
            if weights >= _MESSAGE_LIMIT:
                raise
    if isinstance(model, onnx.ModelProto):
        data: bytes = model.SerializeToString()
        return data, _describe(onnx.load_from_string(data), output_paths)
    proto = onnx_ir.to_proto(model)
    data = proto.SerializeToString()
    return data, _describe(proto, output_paths)


def _to_torch(value: Any) -> Any:
    """A torch copy of an OrtValue on the CPU."""
    if not value.is_tensor():
        # Sequences of tensors (SplitToSequence) come back as lists of numpy arrays.
        return [torch.from_numpy(item) for item in value.to_list()] if hasattr(value, "to_list") else value
    code = value.element_type()
    if code == 8:
        return value.numpy().tolist()
    if code not in _TORCH:
        raise RunError(f"ONNX element type {code} has no torch dtype")
    dtype, shape = _TORCH[code], list(value.shape())
    out = torch.empty(shape, dtype=dtype)
    if out.numel():
        ctypes.memmove(out.data_ptr(), value.data_ptr(), out.numel() * out.element_size())
    return out


class OnnxRuntimeSession:
    """A session with one thread, on the provider for its device.

    Parameters
    ----------
    configure:
        Called with the ``SessionOptions`` before the model is loaded, for a diagnosis: other levels of graph
        optimization, a path for the optimized model.
    disabled_optimizers:
        Names of graph optimizations of ONNX Runtime to leave out.

    Raises
    ------
    SessionError
        ONNX Runtime refuses the model, or falls back to another provider than the one asked for.
    """

    def __init__(
        self,
        exported: Exported,
        device: str,
        configure: Callable[[Any], None] | None = None,
        disabled_optimizers: Sequence[str] = (),
    ) -> None:
        import onnxruntime

        self._exported = exported
        provider = provider_for(device)
        self.description = f"onnxruntime {provider.removesuffix('ExecutionProvider')}"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if configure is not None:
            configure(options)
        if provider not in onnxruntime.get_available_providers():
            raise SessionError(
                f"onnxruntime {onnxruntime.__version__} has no {provider} "
                f"(it has {', '.join(onnxruntime.get_available_providers())}); install onnxruntime-gpu"
            )
        wanted: list[Any] = (
            [(provider, {"device_id": int(device.partition(":")[2] or 0)})]
            if "CUDA" in provider
            else [provider]
        )
        try:
            model, described = _serialize(exported.program, self._folder, exported.output_paths)
            self._session = onnxruntime.InferenceSession(
                model, options, providers=wanted, disabled_optimizers=list(disabled_optimizers)
            )
        except Exception as error:
            raise SessionError(f"onnxruntime cannot load the model: {error}") from error
        used = self._session.get_providers()
        nodes = _nodes_by_provider(self._session)
        if not used or used[0] != provider:
            raise SessionError(f"the session runs on {', '.join(used)}, not on the asked {provider}")
        if nodes and provider not in nodes:
            raise SessionError(
                f"no node runs on the asked {provider}: "
                + ", ".join(f"{count} on {name}" for name, count in nodes.items())
            )
        chosen: dict[str, Choice] = described.pop("chosen")
        #: Of each output, the names of the inputs on whose values it depends.
        self.read_inputs: list[frozenset[str]] = described.pop("read")
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        if len(self._outputs) != len(exported.output_paths):
            raise SessionError(
                f"the ONNX model has {counted(len(self._outputs), 'output')} ({', '.join(self._outputs)}), "
                f"the model has {counted(len(exported.output_paths), 'tensor')} "
                f"({', '.join(exported.output_paths)})"
            )
        self.facts: dict[str, Any] = {
            "providers": used,
            "nodes_by_provider": nodes,
            "onnx_inputs": list(self._inputs),
            **described,
        }
        paths = dict(zip(self._outputs, exported.output_paths, strict=True))
        names = {name: path for path, name in exported.input_names.items()} | paths
        #: Path of an output that is chosen indices -> what chose them, and the path of what from.
        self.choices = {
            paths[name]: replace(choice, values=names.get(choice.values, ""))
            for name, choice in chosen.items()
        }

    def _folder(self) -> Path:
        """A folder that goes with the session."""
        path = tempfile.mkdtemp(prefix="exportcheck-")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)

    def run(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Outputs on the CPU, with their paths; constants that the exporter recorded are among them."""
        binding = self._session.io_binding()
        keep = []
        unfed = set(self._inputs)
        for root, value in arguments.items():
            for path, leaf in flatten_with_paths(value, root):
                if not isinstance(leaf, torch.Tensor):
                    continue
                name = self._exported.input_names.get(path)
                if name is None or name not in unfed:
                    # An input that the graph does not use is dropped by the exporter: nothing to feed.
                    continue
                tensor = leaf.detach().to("cpu").contiguous()
                if tensor.dtype not in _ONNX:
                    raise RunError(f"input {path}: ONNX Runtime takes no {tensor.dtype}")
                keep.append(tensor)
                self._bind(binding, name, tensor)
                unfed.discard(name)
        for name in unfed & set(self._exported.extra_inputs):
            tensor = self._exported.extra_inputs[name].detach().to("cpu").contiguous()
            keep.append(tensor)
            self._bind(binding, name, tensor)
            unfed.discard(name)
        if unfed:
            raise RunError(
                f"inputs {', '.join(sorted(unfed))} of the ONNX model have no counterpart in the call: "
                f"it has {', '.join(sorted(self._exported.input_names))}"
            )
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        values = [_to_torch(value) for value in binding.get_outputs()]
        pairs = [
            (path, value) for path, value in zip(self._exported.output_paths, values, strict=True) if path
        ]
        return [*pairs, *self._exported.constants.items()]

    @staticmethod
    def _bind(binding: Any, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel():
            binding.bind_input(name, "cpu", 0, _ONNX[tensor.dtype], list(tensor.shape), tensor.data_ptr())
            return
        # A tensor of no elements has no address; ONNX Runtime wants a value all the same.
        import onnxruntime

        empty = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            list(tensor.shape), _ONNX[tensor.dtype], "cpu"
        )
        binding.bind_ortvalue_input(name, empty)


def _nodes_by_provider(session: Any) -> dict[str, int]:
    """Provider -> nodes of the optimized graph that it runs; empty where this onnxruntime does not tell."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return dict(counts)


def _clear_notes(part: Any) -> None:
    part.ClearField("metadata_props")
    part.ClearField("doc_string")


def _clear_notes_of_graph(graph: Any) -> None:
    _clear_notes(graph)
    for part in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        _clear_notes(part)
    _clear_notes_of_nodes(graph.node)


def _clear_notes_of_nodes(nodes: Any) -> None:
    for node in nodes:
        _clear_notes(node)
        for attribute in node.attribute:
            attribute.ClearField("doc_string")
            # The bodies of If, Loop and Scan.
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _clear_notes_of_graph(graph)


def _describe(proto: Any, output_paths: Sequence[str]) -> dict[str, Any]:
    """Nodes, operators, opset, size, chosen indices, read inputs of a ``ModelProto``, which is taken apart.

    An output whose path is ``""`` is none of the model's, and reads nothing.

    The size leaves out what torch.onnx notes of the source that a node or value comes from: the paths in it
    are as long as those of the machine, and a conversion that was kept has none.
    """
    histogram = Counter(node.op_type for node in proto.graph.node)
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    # Weights one by one, then the rest: the size of a whole message is found by serializing it.
    weights = sum(map(_tensor_bytes, proto.graph.initializer))
    proto.graph.ClearField("initializer")
    _clear_notes(proto)
    for function in proto.functions:
        _clear_notes(function)
        _clear_notes_of_nodes(function.node)
        for value in function.value_info:
            _clear_notes(value)
    _clear_notes_of_graph(proto.graph)
    return {
        "chosen": chosen_outputs(proto.graph),
        "read": inputs_by_output(proto),
        "nodes": len(proto.graph.node),
        "operators": dict(sorted(histogram.items())),
        "opset": opsets.get("", 0),
        "model_bytes": int(proto.ByteSize()) + weights,
    }
