"""What a spec holds: the pydantic models behind the YAML format and its JSON Schema.

The models check types and single values. What needs more than one place of the file is in `rules`, and
calls are read by `values`; so build a `ModelSpec` with `load_spec` or `parse_spec`, not from here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SkipValidation,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from ..errors import STAGES
from . import fragments
from .nodes import Document
from .target_paths import ObservedTarget, is_target, split_target
from .tensors import TensorSpec
from .values import CallSpec, describe

__all__ = [
    "Bounds",
    "CompareRule",
    "Device",
    "Dtype",
    "Expectation",
    "Matrix",
    "Model",
    "ModelSpec",
    "Observe",
    "TargetRules",
    "Tolerance",
    "When",
]

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "float16", "bfloat16", "float64"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_GRAPH_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


def _problem(message: str) -> PydanticCustomError:
    # The text travels as a parameter: pydantic would read braces in a template.
    return PydanticCustomError("exportcheck", "{text}", {"text": message})


def _identifier(value: str) -> str:
    if not _IDENTIFIER.match(value):
        raise _problem(f"{value!r} is not a name (letters, digits and _, not starting with a digit)")
    return value


def _graph_name(value: str) -> str:
    if not _GRAPH_NAME.match(value):
        raise _problem(
            f"{value!r} is not a graph name (lower-case letters, digits and _, starting with a letter)"
        )
    return value


def _target(value: str) -> str:
    if not is_target(value):
        raise _problem(
            f"{value!r} names no submodule: a dotted path such as 'model.vision_tower', "
            "'model.encoder:encode' for a method of it, ':encode' for a method of the model"
        )
    return value


def _text(value: str) -> str:
    if not value.strip():
        raise _problem("must not be empty")
    return value


def _requirement(value: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise _problem(f"{value!r} is not a requirement: {str(error).splitlines()[0]}") from None
    return value


def _versions(value: str) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        if not value.strip():
            raise InvalidSpecifier
        SpecifierSet(value)
    except InvalidSpecifier:
        raise _problem(f"{value!r} is not a version condition such as '>=2.14' or '>=2.9,<2.14'") from None
    return value


def _version(value: object) -> object:
    # To Python, and so to Literal, true and 1.0 are 1.
    if isinstance(value, bool | float):
        raise _problem(f"expected 1, got {describe(value)}")
    return value


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _shape_of(value: object) -> str:
    """Tag of a union's branch. Tags are in angle brackets so that `validate` can take them out of paths."""
    if isinstance(value, bool):
        return "<bool>"
    if isinstance(value, str):
        return "<word>"
    if isinstance(value, dict):
        return "<map>"
    if isinstance(value, list | tuple):
        return "<list>"
    return "<int>" if isinstance(value, int) else "<other>"


def _branch(expected: str) -> Discriminator:
    return Discriminator(_shape_of, custom_error_type="branch", custom_error_message=f"expected {expected}")


# YAML has lists, frozen models hold tuples; the items stay strict.
_Tuple = Field(strict=False)

Identifier = Annotated[str, AfterValidator(_identifier)]

#: Marks that mean something to pytest or to us; one that skips or xfails would hide every failure of a spec.
_RESERVED_MARKS = frozenset(
    {"skip", "skipif", "xfail", "parametrize", "usefixtures", "filterwarnings", "exportcheck"}
)


def _mark(value: str) -> str:
    if value in _RESERVED_MARKS:
        raise _problem(
            f"{value!r} is a mark with a meaning of its own: marks are names to select with -m "
            "(a known failure belongs into 'expect')"
        )
    return _identifier(value)


Mark = Annotated[str, AfterValidator(_mark)]
GraphName = Annotated[str, AfterValidator(_graph_name)]
TargetPath = Annotated[str, AfterValidator(_target)]
Text = Annotated[str, AfterValidator(_text)]
Requirement = Annotated[str, AfterValidator(_requirement)]
Versions = Annotated[str, AfterValidator(_versions)]
Size = Annotated[int, Field(ge=0)]
Names = Annotated[tuple[Text, ...], _Tuple]
Sizes = Annotated[tuple[Size, ...], Field(strict=False, min_length=1)]

_OR_LIST: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _choice_schema(values: tuple[str, ...]) -> dict[str, Any]:
    one = {"enum": list(values), "type": "string"}
    return {"anyOf": [one, {"type": "array", "items": one}]}


AnyName = Annotated[
    tuple[Text, ...], Field(strict=False, min_length=1), BeforeValidator(_listed), WithJsonSchema(_OR_LIST)
]
AnyVersions = Annotated[
    tuple[Versions, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_listed),
    WithJsonSchema(_OR_LIST),
]
AnyDevice = Annotated[
    tuple[Device, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_listed),
    WithJsonSchema(_choice_schema(("cpu", "cuda"))),
]
AnyDtype = Annotated[
    tuple[Dtype, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_listed),
    WithJsonSchema(_choice_schema(("float32", "float16", "bfloat16", "float64"))),
]

BatchDims = Annotated[
    Annotated[bool, Tag("<bool>")] | Annotated[tuple[Identifier, ...], _Tuple, Tag("<list>")],
    _branch("true, false or a list of argument names"),
]
Graphs = Annotated[
    Annotated[Literal["one"], Tag("<word>")]
    | Annotated[dict[GraphName, Sizes], Field(min_length=1), Tag("<map>")],
    _branch("'one' or a mapping of graph names to lists of call indices"),
]
Example = Annotated[
    Annotated[Size, Tag("<int>")] | Annotated[dict[GraphName, Size], Tag("<map>")],
    _branch("the index of a call, or a mapping of graph names to indices"),
]
Resize = Annotated[
    Annotated[Literal["auto", "off"], Tag("<word>")]
    | Annotated[dict[Identifier, Sizes], Field(min_length=1), Tag("<map>")],
    _branch("'auto', 'off' or a mapping of symbols to lists of sizes"),
]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, use_attribute_docstrings=False
    )


class Model(_Section):
    """The model: exactly one of `type`, `pretrained` and `factory`."""

    type: Text | None = Field(
        default=None,
        description="A transformers model type such as `llama`; built from its config with random weights.",
    )
    pretrained: Text | None = Field(
        default=None,
        description="A folder (relative to the spec), `package:NAME/sub/folder` inside an installed Python "
        "package, or a hub id, which is looked up in the local cache only unless `online: true`.",
    )
    factory: Text | None = Field(
        default=None,
        description="`file_next_to_the_spec.py:callable` or `package.module:callable` that returns a "
        "torch.nn.Module.",
    )
    auto_class: Text = Field(
        default="AutoModel",
        description="The transformers class that builds the model, for `type` and `pretrained`: an Auto "
        "class or a model class such as LlamaForCausalLM.",
    )
    config: dict[str, Any] = Field(
        default={}, description="For `type`: configuration values; sub-configurations are nested mappings."
    )
    generation: dict[str, Any] = Field(
        default={},
        description="Attributes to set on model.generation_config.",
    )
    online: bool = Field(default=False, description="For `pretrained`: whether the hub may be reached.")
    revision: Text | None = Field(
        default=None,
        description="For `pretrained`: branch, tag or commit on the hub.",
    )
    kwargs: dict[str, Any] = Field(
        default={},
        description="For `factory`: arguments by name, passed as they are.",
    )
    attn_implementation: Text | None = Field(
        default=None,
        description="For `type` and `pretrained`: `eager`, `sdpa`, or another name transformers knows.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="Seed of the weights and of the inputs."
    )


# What a target of a spec with several has of its own, and a spec with one target or none beside it.
_GRAPHS: Any = Field(
    default="one",
    description="`one`: one program serves every observed call. Or groups of call indices, one program each: "
    "{prefill: [0], decode: [1, 2]}.",
)
_IGNORE_CALLS: Any = Field(default=(), description="Observed calls that no program has to serve, by index.")
_EXAMPLE: Any = Field(
    default=None,
    description="Which observed call the exporters are given: an index, or one index per graph.",
)
_VALUE_IF_MISSING: Any = Field(
    default={},
    description="Inputs for arguments that some calls leave out, as tensors; their dims may name the symbols "
    "of the call, `past + seq` included.",
)
Indices = Annotated[tuple[Size, ...], _Tuple]
StandIns = Annotated[dict[str, TensorSpec], SkipValidation, WithJsonSchema(fragments.MISSING)]


class TargetRules(_Section):
    """One of several targets, and how its calls are read."""

    path: TargetPath = Field(
        description="A submodule (`model.vision_tower`) or a method of it (`model.encoder:encode`)."
    )
    graphs: Graphs = _GRAPHS
    ignore_calls: Indices = _IGNORE_CALLS
    example: Example | None = _EXAMPLE
    value_if_missing: StandIns = _VALUE_IF_MISSING
    batch_dims: BatchDims | None = Field(
        default=None, description="As in `observe`, for this target; without it, what `observe` says."
    )
    store_n_calls: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="As in `observe`, for this target; without it, what `observe` says."
    )


OneTarget = Annotated[
    Annotated[TargetPath, Tag("<word>")] | Annotated[TargetRules, Tag("<map>")],
    _branch("the path of a submodule, or a mapping with the key 'path'"),
]
Target = Annotated[
    Annotated[TargetPath, Tag("<word>")]
    | Annotated[dict[GraphName, OneTarget], Field(min_length=1), Tag("<map>")],
    _branch("the path of a submodule, or a mapping of names to such paths"),
]


class Observe(_Section):
    """The calls to observe, and how to read them."""

    calls: Annotated[tuple[CallSpec, ...] | str, SkipValidation, WithJsonSchema(fragments.CALLS)] = Field(
        description="The calls, in order; or a callable that returns or makes them."
    )
    method: Identifier = Field(
        default="forward",
        description="The method of the model that the calls are made with; observed unless `target` says "
        "otherwise.",
    )
    target: Target | None = Field(
        default=None,
        description="What is observed and exported instead of the model: a submodule (`model.vision_tower`) "
        "or a method of it (`model.encoder:encode`), inside the calls of the whole model. Or several, "
        "{name: path}, each with programs of its own, or {name: {path: ..., graphs: ...}} with rules of its "
        "own.",
    )
    dims: Annotated[tuple[Identifier, ...], _Tuple] = Field(
        default=(), description="Names for sizes; each call gives them values in its own `dims`."
    )
    batch_dims: BatchDims = Field(
        default=False,
        description="Whether axis 0 of the inputs is a batch axis: true for all inputs, or a list of "
        "argument names. Such an axis is dynamic even if every call has the same size.",
    )
    value_if_missing: StandIns = _VALUE_IF_MISSING
    store_n_calls: Annotated[int, Field(ge=1)] = Field(
        default=20,
        description="Of how many calls the values are kept, and checked: those that show most. The shapes of "
        "all calls count.",
    )
    store: Literal["device", "cpu", "disk"] = Field(
        default="device",
        description="Where the values are kept: on the device of the case, in host memory, or in "
        "memory-mapped files.",
    )
    graphs: Graphs = _GRAPHS
    ignore_calls: Indices = _IGNORE_CALLS
    example: Example | None = _EXAMPLE

    @property
    def targets(self) -> dict[str | None, ObservedTarget]:
        """What is observed, by name; the single key is None unless `target` has names."""
        if not isinstance(self.target, dict):
            path, method = ("", self.method) if self.target is None else split_target(self.target)
            rules = {key: getattr(self, key) for key in _RULES}
            return {None: ObservedTarget(None, path, method, ("observe", "target"), ("observe",), **rules)}
        found: dict[str | None, ObservedTarget] = {}
        for name, target in self.target.items():
            where = ("observe", "target", name)
            given: dict[str, Any] = {} if isinstance(target, str) else dict(target)
            own = {key: value for key, value in given.items() if key != "path" and value is not None}
            general = {"batch_dims": self.batch_dims, "store_n_calls": self.store_n_calls}
            path, method = split_target(given.get("path", target))
            found[name] = ObservedTarget(name, path, method, where, where, **{**general, **own})
        return found


_RULES = ("graphs", "ignore_calls", "example", "value_if_missing", "batch_dims", "store_n_calls")


class Matrix(_Section):
    """What to check the model with; every combination is one case."""

    exporters: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] = Field(
        default=("torch-export", "onnx-dynamo"),
        description="Names of exporters, built-in ones and those of other packages.",
    )
    patch_modes: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] = Field(
        default=("none",), description="Names of patch modes, built-in ones and those of other packages."
    )
    devices: Annotated[tuple[Device, ...], Field(strict=False, min_length=1)] = Field(
        default=("cpu",), description="Devices. One that is absent is a visible skip."
    )
    dtypes: Annotated[tuple[Dtype, ...], Field(strict=False, min_length=1)] = Field(
        default=("float32",), description="Dtypes of weights and floating-point inputs."
    )


class Bounds(_Section):
    """Limits of an error: |a - b| <= atol + rtol * |b|. None: the default of the dtype."""

    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Absolute part of the tolerance."
    )
    rtol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Part relative to the expected value."
    )


class Tolerance(Bounds):
    """How far outputs may be from eager's, in general and for some outputs, devices and dtypes."""

    outputs: dict[Text, Bounds] = Field(default={}, description="By output path, such as `logits`.")
    devices: dict[Device, Bounds] = Field(default={}, description="By device.")
    dtypes: dict[Dtype, Bounds] = Field(default={}, description="By dtype.")


class CompareRule(_Section):
    """How an output is compared: exactly one of `where`, `ties` and `by`."""

    where: Text | None = Field(
        default=None,
        description="Name of an input mask (batch, length): positions where it is 0 are left out of the "
        "comparison.",
    )
    ties: Text | None = Field(
        default=None,
        description="For indices (top-k, argmax, sort): path of the output or input that they select from. "
        "What they select is compared, so that equal scores may come in any order.",
    )
    by: Text | None = Field(
        default=None,
        description="A comparison of your own that judges the values: `file_next_to_the_spec.py:callable`, "
        "`package.module:callable`, or the name of one that a package or a conftest.py brings.",
    )
    axis: int | None = Field(
        default=None,
        description="With `where`, the axis of the output that holds the positions: 1 (default) for logits, "
        "2 for keys and values. With `ties`, the axis of the scores that the indices count along; the last "
        "one by default.",
    )


class When(_Section):
    """The cases that an expectation is about: all given keys must match; of a list, any item may."""

    exporter: AnyName = Field(default=(), description="Names of exporters.")
    patch_mode: AnyName = Field(default=(), description="Names of patch modes.")
    device: AnyDevice = Field(default=(), description="Devices.")
    dtype: AnyDtype = Field(default=(), description="Dtypes.")
    graph: AnyName = Field(
        default=(),
        description="Names of graphs: of observe.graphs, of observe.target, or `target.graph`.",
    )
    torch: AnyVersions = Field(default=(), description="Version of torch, such as `>=2.14`.")
    transformers: AnyVersions = Field(default=(), description="Version of transformers.")
    onnx: AnyVersions = Field(default=(), description="Version of onnx.")
    onnxscript: AnyVersions = Field(default=(), description="Version of onnxscript.")
    onnxruntime: AnyVersions = Field(default=(), description="Version of onnxruntime.")
    python: AnyVersions = Field(default=(), description="Version of Python.")


Stage = Literal[STAGES]  # type: ignore[valid-type]


class Expectation(_Section):
    """A failure that is known: native strict xfail for the cases that match `when`."""

    when: When = Field(default=When(), description="Which cases; without it, all.")
    fails: Stage = Field(description="The stage that is expected to fail.")
    reason: Text = Field(description="Why, with a link if there is one.")


class ModelSpec(_Section):
    """One spec file.

    Attributes
    ----------
    path:
        The file.
    name:
        Its stem.
    relative:
        Its path relative to the root given to `load_spec`, with forward slashes.
    folder:
        The folder against which files named in the spec are resolved.
    """

    exportcheck: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        description="Version of the format: 1."
    )
    description: str = Field(default="", description="Free text.")
    requires: Annotated[tuple[Requirement, ...], _Tuple] = Field(
        default=(),
        description="Python distributions this spec needs, as pip writes them (`transformers>=5.1`). If one "
        "is absent, its tests are skipped visibly.",
    )
    marks: Annotated[tuple[Mark, ...], _Tuple] = Field(
        default=(), description="pytest marks for every test of this spec."
    )
    model: Model = Field(description="The model.")
    observe: Observe = Field(description="The calls to observe.")
    matrix: Matrix = Field(default=Matrix(), description="What to check the model with.")
    exporter_options: dict[Text, dict[str, Any]] = Field(default={}, description="Options by exporter name.")
    tolerance: Tolerance = Field(default=Tolerance(), description="How far outputs may be from eager's.")
    compare: dict[Text, CompareRule] = Field(default={}, description="By output path: how it is compared.")
    resize: Resize = Field(
        default="auto",
        description="Sizes nobody showed the program: `auto`, `off`, or {symbol: [sizes]}; a symbol that is "
        "not listed stays at `auto`.",
    )
    expect: Annotated[tuple[Expectation, ...], _Tuple] = Field(
        default=(),
        description="Failures that are known.",
    )

    _path: Path = PrivateAttr(default_factory=Path)
    _relative: str = PrivateAttr(default="")
    _document: Document = PrivateAttr(default_factory=Document)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def folder(self) -> Path:
        return self._path.parent

    @property
    def name(self) -> str:
        return self._path.stem

    @property
    def document(self) -> Document:
        return self._document

    @property
    def relative(self) -> str:
        return self._relative

    @property
    def graph_names(self) -> tuple[str | None, ...]:
        """One entry per program: groups, targets, `target.group`, or only None."""
        return tuple(name for target in self.observe.targets.values() for name in target.graph_names)

    def location(self, *where: Any) -> tuple[int, int]:
        """Line and column of a node, from 1: ``spec.location("expect", 0, "when")``.

        For an entry of a mapping this is where its key stands. A node that is not in the file (a default)
        has the place of its nearest ancestor that is.
        """
        position = self._document.position(tuple(where))
        return position.key_line, position.key_column

    def line(self, key: str) -> int:
        """Line of a key at the top."""
        return self._document.line(key)

    def place(self, *where: Any) -> str:
        """``model_specs/llama.yaml:14``, the way messages name a node."""
        return f"{self._relative}:{self.location(*where)[0]}"

    def in_file(self, *where: Any) -> bool:
        """Whether there is a node at exactly this path."""
        return tuple(where) in self._document.positions

    def __hash__(self) -> int:
        return hash(self._path)

    def attach(self, path: Path, relative: str, document: Document) -> ModelSpec:
        """Remember where the spec comes from; for `load_spec`."""
        self._path, self._relative, self._document = path, relative, document
        return self
