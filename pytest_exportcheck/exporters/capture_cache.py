"""Captures of earlier runs: what one depends on, known before it is made, and what a case reads of it.

See "Captures of other runs" in docs/design.md for why the key is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree

from ..observe import GraphShapes
from ..observe.relations import without
from ..observe.shapes import ThinRelation
from .cache_files import CacheFiles, Refused
from .content import Content, Unreadable
from .conversions import KNOWN_OPERATORS, Weights, operators_of_others
from .fingerprint import draws_random_numbers, graph_digest, program_dims, version_of
from .guards import CaptureWatch, Comparison, dims_of
from .serialized import NotSaveable, from_json, to_json
from .surroundings import add_flags, add_installed, process_digest, variables

__all__ = ["CaptureCache", "CaptureFacts", "KeptCapture", "PendingCapture", "spec_text"]

#: Bytes of the constants that a capture brings itself (``torch.tensor([1.0, 2.0])`` in a forward).
_LARGEST_CONSTANTS = 2**20


@dataclass
class CaptureFacts:
    """What a case reads of a captured program, beside running it; plain builtins.

    Attributes
    ----------
    graph:
        Its digest (`fingerprint.graph_digest`).
    converted:
        The same as it was converted: a patch mode may have fixes; ``""``: it was not.
    random:
        Two runs of it may differ.
    dims:
        Path of an input -> size or symbol of each axis.
    nodes:
        How many it has.
    inputs, outputs:
        Names of the user inputs; of each user output whether it is a tensor, and else its value.
    comparisons:
        Text of shapes (`dims_of`) -> comparisons of sizes in their symbols.
    custom:
        It has operators of `conversions.KNOWN_OPERATORS`.
    patch_calls, patch_nodes:
        What the record of its case says: calls of each patch, by the conversion too; nodes made inside it.
    tensors:
        Parameter, buffer or constant of the program -> the model's name for it, or dtype, shape and bytes.
    """

    graph: str
    random: bool
    dims: dict[str, list[Any]]
    nodes: int
    inputs: list[str]
    outputs: list[Any]
    comparisons: dict[str, list[dict[str, Any]]]
    tensors: dict[str, Any]
    state: list[str]
    converted: str = ""
    custom: bool = False
    patch_calls: dict[str, int] = field(default_factory=dict)
    patch_nodes: dict[str, int] = field(default_factory=dict)


@dataclass
class KeptCapture:
    """A capture of an earlier run; loaded when it is to be run."""

    facts: CaptureFacts
    weights: Weights
    _data: bytes
    _example: tuple[Mapping[str, Any], str, str]
    _loaded: torch.export.ExportedProgram | None = None

    def program(self) -> torch.export.ExportedProgram:
        """The program, to be run and not to be converted; raises `NotSaveable` for a file that was forged."""
        if self._loaded is None:
            tensors, state = self.weights.tensors, set(self.facts.state)
            self._loaded = from_json(
                self._data,
                {name: tensor for name, tensor in tensors.items() if name in state},
                {name: tensor for name, tensor in tensors.items() if name not in state},
                *self._example,
            )
        return self._loaded


@dataclass
class PendingCapture:
    """A new capture that is kept if its case passes."""

    key: dict[str, Any]
    facts: CaptureFacts
    weights: Weights
    data: bytes


class CaptureCache:
    """The captures in one directory.

    Parameters
    ----------
    folder, limit, salt:
        As those of `conversion_cache.ConversionCache`.
    spec_folder, spec:
        The spec's folder, and its text: files next to it that it names are part of the key (``None``: all).
    """

    def __init__(
        self, folder: Path, limit: int, salt: str, spec_folder: Path, spec: str | None = None
    ) -> None:
        self._files = CacheFiles(folder, limit, "capture", "program.json")
        self._salt = salt
        self._spec_folder = spec_folder
        self._spec = spec
        #: Of this spec, by graph: modes that capture the same program need not write it down twice.
        self._written: dict[str, tuple[Weights, bytes]] = {}

    def clear(self) -> None:
        """Forget what was made in this process."""
        self._written.clear()

    def key(
        self,
        model: torch.nn.Module,
        arguments: Mapping[str, Any],
        shapes: GraphShapes,
        patches: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """All that a capture depends on; raises `Unreadable` for what cannot be told.

        Parameters
        ----------
        model, arguments:
            What is captured, as it is now.
        patches:
            Those in place, by name, as objects that `Content` reads.
        settings:
            Exporter, options and method: plain builtins, or what `Content` reads.
        """
        content = Content()
        content.add("model", model)
        content.add("arguments", dict(arguments))
        content.add("settings", dict(settings))
        content.add("limits", dict(shapes.limits))
        for name, parts in patches.items():
            content.add(f"patch {name}", parts)
        add_flags(content)
        classes = {cls for part in model.modules() for cls in type(part).__mro__}
        classes |= {cls for value in arguments.values() for cls in type(value).__mro__}
        ordered = sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))
        add_installed(content, ordered, self._spec_folder, self._spec)
        return {
            "content": content.hexdigest(),
            "process": process_digest(),
            "folders": [str(Path.cwd()), str(self._spec_folder)],
            "dims": [dims_of(_shapes_of(shapes, relation)) for relation in (None, *shapes.thin)],
            "specs": list(settings["specs"]),
            "variables": variables(every=content.mentions_environment),
            "salt": self._salt,
        }

    def read(
        self, key: Mapping[str, Any], model: torch.nn.Module, example: tuple[Mapping[str, Any], str, str]
    ) -> tuple[KeptCapture | None, list[str]]:
        """(the capture, or ``None``; a word on an entry that is there and cannot be used).

        Parameters
        ----------
        example:
            Arguments by name, tree specs of the arguments and of what the model returns, as text.
        """

        def use(manifest: dict[str, Any], data: bytes) -> KeptCapture:
            facts = CaptureFacts(**manifest["facts"])
            own = _tensors(model)
            tensors = {name: _tensor(where, own, name) for name, where in facts.tensors.items()}
            weights = Weights(tensors, {name: version_of(tensor) for name, tensor in tensors.items()})
            for comparisons in facts.comparisons.values():
                for plain in comparisons:
                    Comparison.from_plain(plain)
            return KeptCapture(facts, weights, data, example)

        return self._files.read(key, use)

    def remember(
        self,
        key: dict[str, Any],
        program: torch.export.ExportedProgram,
        model: torch.nn.Module,
        kwargs: Mapping[str, Any],
        paths: Sequence[str],
        watch: CaptureWatch,
        shapes: GraphShapes,
    ) -> PendingCapture:
        """What `write` will keep of a new capture; raises `NotSaveable` with the reason why it cannot."""
        if watch.missing:
            raise NotSaveable(f"comparisons of sizes cannot be read: there is no {watch.missing}")
        if watch.frozen():
            raise NotSaveable("axes became constants")
        operators = operators_of_others(program)
        if others := operators - KNOWN_OPERATORS:
            raise NotSaveable(f"it has operators of {', '.join(sorted(others))}")
        weights = Weights.of(program)
        digest = graph_digest(program, watch, shapes)
        known = self._written.get(digest)
        if known is not None and known[0].equal(weights):
            data = known[1]
        else:
            try:
                data = to_json(program, kwargs, key["specs"][1])
            except NotSaveable:
                raise
            except Exception as error:
                raise NotSaveable(f"torch cannot write it: {type(error).__name__}: {error}") from error
            self._written[digest] = (weights, data)
        facts = CaptureFacts(
            graph=digest,
            random=draws_random_numbers(program),
            dims=_dims(program, paths),
            nodes=len(program.graph.nodes),
            inputs=[str(name) for name in program.graph_signature.user_inputs],
            outputs=list(_outputs(program)),
            comparisons={
                dims_of(_shapes_of(shapes, relation)): [
                    comparison.to_plain() for comparison in watch.comparisons(shapes, relation=relation)
                ]
                for relation in (None, *shapes.thin)
            },
            tensors=_places(weights.tensors, _tensors(model), program),
            state=sorted(program.state_dict),
            custom=bool(operators),
        )
        return PendingCapture(key, facts, weights, data)

    def write(self, pending: PendingCapture) -> list[str]:
        """Keep a capture; a word if that cannot be done, once per reason."""
        return self._files.write(pending.key, lambda: ({"facts": asdict(pending.facts)}, pending.data))


def _dims(program: torch.export.ExportedProgram, paths: Sequence[str]) -> dict[str, list[Any]]:
    return {
        path: [size if isinstance(size, int) else str(size) for size in sizes]
        for path, sizes in program_dims(program, paths).items()
    }


def _outputs(program: torch.export.ExportedProgram) -> Iterator[list[Any]]:
    """For each user output: ``[]``, or its value if it is a constant."""
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else None
            if value is not None and type(value) not in (bool, int, float, str):
                raise NotSaveable(f"an output is a {type(value).__name__}")
            yield [value] if isinstance(spec.arg, ConstantArgument) else []


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _places(
    tensors: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    program: torch.export.ExportedProgram,
) -> dict[str, Any]:
    names = {id(tensor): name for name, tensor in own.items()}
    found: dict[str, Any] = {}
    size = 0
    for name, tensor in tensors.items():
        if name not in program.state_dict and name not in program.constants:
            raise NotSaveable(f"a subgraph holds the tensor {name}")
        if id(tensor) in names:
            found[name] = own_name if own.get(own_name := name) is tensor else names[id(tensor)]
            continue
        size += tensor.nbytes
        if type(tensor) is not torch.Tensor or size > _LARGEST_CONSTANTS or not tensor.is_contiguous():
            raise NotSaveable(f"its constant {name} ({tensor.dtype} {list(tensor.shape)}) is not the model's")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
            raise NotSaveable(f"its constant {name} is on {tensor.device} or {tensor.layout}")
        flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        found[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": bytes(flat.tolist()).hex() if tensor.numel() else "",
        }
    if set(found) != {*program.state_dict, *program.constants}:
        raise NotSaveable("it holds constants that are no tensors")
    return found


def _tensor(where: Any, own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if isinstance(where, str):
        if where not in own:
            raise Refused(f"{name} is {where} of the model, which has no such tensor")
        return own[where]
    dtype = getattr(torch, str(where["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"{name} has no dtype")
    shape = [int(size) for size in where["shape"]]
    data = bytearray.fromhex(where["bytes"])
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def spec_text(tree: Any) -> str:
    """The tree spec of `tree`; raises `Unreadable` for one that has no text."""
    try:
        return _pytree.treespec_dumps(_pytree.tree_structure(tree))
    except Exception as error:
        raise Unreadable(f"a structure has no text: {type(error).__name__}: {error}") from None


def _shapes_of(shapes: GraphShapes, relation: ThinRelation | None) -> GraphShapes:
    return shapes if relation is None else without(shapes, relation)
