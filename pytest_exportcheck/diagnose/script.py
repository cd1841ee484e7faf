"""One self-contained script for a failure: the module, its recorded inputs, the export, the comparison."""

from __future__ import annotations

import contextlib
import platform
import pprint
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..exporters.onnx_dynamo import OnnxDynamo
from ..exporters.torch_export import TorchExport
from ..pytrees.strides import memory_of
from .culprits import CaptureForOnnx
from .script_model import Factory, model_source, only_needed
from .script_values import CACHE_HELPERS, CannotWriteError, Values, dynamic_axes
from .subject import Sample, Subject

__all__ = ["Recipe", "Script", "write_script"]

_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy", "safetensors")

#: Of a data file: more is nothing to attach to an issue.
_MOST_BYTES = 2 << 30

#: Where default tolerances hold: atol relative to the largest value of an output, rtol.
_TOLERANCES = {torch.float16: (4e-3, 1e-2), torch.bfloat16: (3e-2, 5e-2), torch.float64: (1e-9, 1e-9)}

_FLAT = '''
def flat_outputs(value):
    """The tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "self_attention_cache"):
        return flat_outputs([value.self_attention_cache, value.cross_attention_cache])
    if hasattr(value, "layers") and not isinstance(value, torch.nn.Module):
        return flat_outputs([[layer.keys, layer.values] for layer in value.layers if layer.is_initialized])
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    items = value if isinstance(value, (list, tuple)) else []
    return [tensor for item in items for tensor in flat_outputs(item)]
'''

_LAYOUT = '''
#: Tensors that are not contiguous: their sizes and strides; the data file has their memory.
LAYOUTS = {layouts}


def laid_out(name, stored):
    """A copy that lies in memory as the recorded tensor did."""
    copy = stored.clone()
    if name not in LAYOUTS:
        return copy
    return torch.empty(0, dtype=copy.dtype).set_(copy.untyped_storage(), 0, *LAYOUTS[name])
'''

_COMPARE = '''
def assert_same(label, expected, got):
    """AssertionError where the program differs from eager."""
    assert len(expected) == len(got), f"{label}: the number of outputs is {len(got)} and not {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, got)):
        where = f"{label}: output {number} differs from eager"
        forms = [(x.dtype, tuple(x.shape)) for x in (a, b)]
        assert forms[0] == forms[1], f"{where}: {forms[1]} instead of {forms[0]}"
        if not a.is_floating_point():
            assert torch.equal(a, b), f"{where}: other values"
            continue
        a, b = a.double(), b.double()
        usual = a.isfinite() & b.isfinite()
        same = (a == b) | (a.isnan() & b.isnan()) | usual
        assert same.all(), f"{where}: {b[~same][0]} instead of {a[~same][0]}"
        error = torch.where(usual, (a - b).abs(), 0.0)
        size = a[usual].abs().max().clamp(1e-3, 1e3).item() if usual.any() else 1.0
        allowed = (ATOL * size if RELATIVE else ATOL) + RTOL * torch.where(usual, a.abs(), 0.0)
        assert (error <= allowed).all(), f"{where}: max abs {error.max():.2e}, allowed {allowed.min():.1e}"
'''

_SESSION = '''
def session_of(program):
    """ONNX Runtime over the converted program."""
    import onnxruntime

    converted = torch.onnx.export(program, {options})
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_{level}
    model = converted.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(session, tensors):
    names = {{entry.name for entry in session.get_inputs()}}
    feeds = {{f"{{k}}_orig" if f"{{k}}_orig" in names else k: v.numpy() for k, v in tensors.items()}}
    return [torch.from_numpy(v) for v in session.run(None, {{k: v for k, v in feeds.items() if k in names}})]
'''


@dataclass(frozen=True)
class Recipe:
    """How the failure is provoked.

    Attributes
    ----------
    capture_only:
        The captured program is compared, nothing is converted.
    optimize:
        Whether the ONNX exporter optimizes its graph.
    level:
        Of ONNX Runtime's graph optimization.
    refused:
        The captured program refuses the inputs: there are no numbers to compare.
    """

    capture_only: bool = True
    optimize: bool = True
    level: str = "DISABLE_ALL"
    refused: bool = False


@dataclass(frozen=True)
class Script:
    """The text of ``repro.py``, the tensors of its data file, and the texts of modules beside it by path."""

    text: str
    tensors: dict[str, torch.Tensor] = field(repr=False)
    files: Mapping[str, str] = field(default_factory=dict)


def versions_text() -> str:
    """``Python 3.11.7, torch 2.13.0, ...``."""
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def write_script(
    subject: Subject,
    root: torch.nn.Module,
    factory: Factory | None,
    samples: list[Sample],
    recipe: Recipe,
    says: Mapping[str, str],
) -> Script:
    """The script for `subject`, whose module is `root` or inside of it.

    Parameters
    ----------
    samples:
        On which the program is compared with eager.
    says:
        ``title``, ``expected``, ``actual`` for its docstring.

    Raises
    ------
    CannotWriteError
        Something of it has no source.
    """
    path = next((name for name, m in root.named_modules() if m is subject.target.module), None)
    if path is None:
        raise CannotWriteError("the module is none of the model's")
    if not recipe.refused and any(sample.where for sample in samples):
        raise CannotWriteError("the spec's compare rules choose what counts in the outputs")
    source = model_source(root, factory)
    example = Values()
    arguments = subject.example.arguments
    codes = {name: _Code(example.source(value, name)) for name, value in arguments.items()}
    args, kwargs = subject.target.signature.call(codes)
    given = [v if isinstance(v, _Code) else example.source(v, "default") for v in args]
    given += [f"{k}={v if isinstance(v, _Code) else example.source(v, k)}" for k, v in kwargs.items()]
    data = {f"example.{name}": tensor for name, tensor in example.tensors.items()}
    for number, sample in enumerate(samples):
        values = Values()
        for name, value in sample.arguments.items():
            values.source(value, name)
        if set(values.tensors) != set(example.tensors):
            raise CannotWriteError(f"{sample.label} has other tensors than the example")
        data.update({f"call{number}.{name}": tensor for name, tensor in values.tensors.items()})
    module = subject.target.module
    state = [*module.named_parameters(), *module.named_buffers()]
    data.update({f"module.{name}": tensor for name, tensor in state})
    size = sum(tensor.numel() * tensor.element_size() for tensor in data.values())
    if size > _MOST_BYTES:
        raise CannotWriteError(f"weights and inputs take {size / 2**30:.1f} GiB")
    laid = {name: found for name, tensor in data.items() if (found := memory_of(tensor.cpu())) is not None}
    axes = dynamic_axes(arguments, example.tensors, subject.shapes)
    method = "" if subject.target.method == "forward" else f".{subject.target.method}"
    parts = [
        f'"""{_clean(says["title"])}\n\n{versions_text()}\n\nExpected: {_clean(says["expected"])}\n'
        f'Actual: {_clean(says["actual"])}\n"""',
        "\n".join(source.future),
        "\n".join(
            dict.fromkeys(
                [
                    "from pathlib import Path",
                    "",
                    "import torch",
                    "from safetensors.torch import load_file",
                    *source.imports,
                    *example.imports_but(source.module),
                ]
            )
        ),
        "",  # the file of the factory
        "" if recipe.refused else f"ATOL, RTOL, RELATIVE = {', '.join(map(repr, _tolerance(subject)))}",
        _FLAT.strip(),
        CACHE_HELPERS.strip() if example.caches else "",
        _layouts({name: found[1:] for name, found in laid.items()}),
        "def original_model():\n" + textwrap.indent("\n".join(source.build), "    "),
        _state(path, bool(laid)),
        _case(list(example.tensors), f"self.module{method}({', '.join(given)})"),
        "" if recipe.refused else _COMPARE.strip(),
        "" if recipe.capture_only else _session(subject, recipe),
        _main(subject, axes, samples, recipe, bool(laid)),
    ]
    parts[3] = _embedded(source.embedded, set(re.findall(r"\w+", "\n".join(parts[2:]))))
    text = "\n\n\n".join(part for part in parts if part).rstrip() + "\n"
    stored = {name: laid[name][0] if name in laid else tensor for name, tensor in data.items()}
    return Script(text, {name: _saved(tensor) for name, tensor in stored.items()}, source.files)


#: What the script itself defines.
_NAMES = (
    "flat_outputs",
    "cache_of",
    "laid_out",
    "LAYOUTS",
    "original_model",
    "load_module",
    "ReproCase",
    "assert_same",
    "run_repro",
)


def _embedded(source: str, wanted: set[str]) -> str:
    """What of the file of the factory the names `wanted` of the script need."""
    if not source:
        return ""
    source = only_needed(source, wanted)
    defined = set(re.findall(r"^(?:def|class|async def)?\s?(\w+)\b", source, re.MULTILINE))
    if clash := defined.intersection(_NAMES):
        raise CannotWriteError(f"the factory's file has the names {', '.join(sorted(clash))} too")
    return f"# Of the file of the model's factory.\n\n{source}\n\n\n# What goes wrong with it."


class _Code(str):
    """Source, as opposed to a value."""


def _clean(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("\\", "\\\\").replace('"""', "'''").strip()


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    # Each its own memory: safetensors refuses tensors that share it.
    return tensor.detach().cpu().clone().contiguous()


def _tolerance(subject: Subject) -> tuple[float, float, bool]:
    tolerances = subject.tolerances
    floats = [p.dtype for p in subject.target.module.parameters() if p.is_floating_point()]
    dtype = tolerances.computed_in or (floats[0] if floats else torch.float32)
    atol, rtol = _TOLERANCES.get(dtype, (1e-5, 1e-4))
    return (
        atol if tolerances.atol is None else tolerances.atol,
        rtol if tolerances.rtol is None else tolerances.rtol,
        tolerances.atol is None,
    )


def _layouts(laid: Mapping[str, tuple[Any, ...]]) -> str:
    return _LAYOUT.strip().format(layouts=pprint.pformat(laid, width=90)) if laid else ""


def _state(path: str, layouts: bool) -> str:
    value = 'laid_out(f"module.{name}", data[f"module.{name}"])' if layouts else 'data[f"module.{name}"]'
    picked = f"original_model().get_submodule({path!r})" if path else "original_model()"
    return f'''def load_module(data):
    """The module with its weights."""
    module = {picked}.eval().requires_grad_(False)
    state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    loaded = {{}}
    for name, old in state:
        owner, _, last = name.rpartition(".")
        tensors = module.get_submodule(owner)
        kind = tensors._parameters if last in tensors._parameters else tensors._buffers
        if id(old) not in loaded:
            value = {value}
            value = torch.nn.Parameter(value, requires_grad=False) if kind is tensors._parameters else value
            loaded[id(old)] = value
        kind[last] = loaded[id(old)]  # tied ones stay tied
    return module'''


def _case(names: list[str], call: str) -> str:
    return f'''class ReproCase(torch.nn.Module):
    """The module with its constant arguments in place: tensors in, tensors out."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, {", ".join(names)}):
        return flat_outputs({call})'''


def _session(subject: Subject, recipe: Recipe) -> str:
    options = {"dynamo": True, "verbose": False, **subject.options}
    if not recipe.optimize:
        options["optimize"] = False
    for key, value in options.items():
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise CannotWriteError(f"the exporter's option {key} has no literal")
    text = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return _SESSION.strip().format(options=text, level=recipe.level)


def _main(
    subject: Subject, axes: Mapping[str, list[int]], samples: list[Sample], recipe: Recipe, layouts: bool
) -> str:
    exporter = subject.exporter
    oblivious = isinstance(exporter, OnnxDynamo | CaptureForOnnx)
    if not (oblivious or isinstance(exporter, TorchExport)):
        raise CannotWriteError(f"no script is known for the exporter {exporter.name}")
    shapes = pprint.pformat({name: dict.fromkeys(dims, "DYNAMIC") for name, dims in axes.items()}, width=90)
    shapes = shapes.replace("'DYNAMIC'", "torch.export.Dim.DYNAMIC")
    copy = "laid_out(k, v)" if layouts else "v.clone()"
    lines = [
        "def run_repro():",
        '    data = load_file(Path(__file__).with_name("data.safetensors"))',
        "    case = ReproCase(load_module(data)).eval()",
        "",
        "    def tensors(label):",
        '        """Copies: a call may write into its inputs."""',
        '        start = f"{label}."',
        f"        return {{k.removeprefix(start): {copy} for k, v in data.items() if k.startswith(start)}}",
        "",
        f"    dynamic_axes = {textwrap.indent(shapes, '    ').strip()}",
        "    example = tensors('example')",
        "    dynamic_shapes = {name: dynamic_axes.get(name, {}) for name in example}",
        "    expected = {label: case(**tensors(label)) for label in CALLS}",
    ]
    options: dict[str, Any] = {"strict": getattr(exporter, "strict", False)}
    if isinstance(exporter, TorchExport):
        options |= subject.options
    keywords = ", ".join(f"{key}={value!r}" for key, value in options.items())
    export = f"torch.export.export(case, (), example, dynamic_shapes=dynamic_shapes, {keywords})"
    if oblivious:
        lines += [
            "    # As torch.onnx.export captures: sizes 0 and 1 are not special.",
            "    with torch.fx.experimental._config.patch(backed_size_oblivious=True):",
            f"        program = {export}",
        ]
    else:
        lines.append(f"    program = {export}")
    if recipe.refused:
        lines += [
            "    module = program.module()",
            "    for label in CALLS:",
            "        # Eager takes these sizes: it answered above.",
            "        module(**tensors(label))",
        ]
    elif recipe.capture_only:
        check = "check_guards=False" if oblivious else ""
        lines += [
            f"    module = program.module({check})",
            *(["    module.validate_inputs = False  # ONNX has no guards"] if oblivious else []),
            "    for label in CALLS:",
            "        assert_same(label, expected[label], module(**tensors(label)))",
        ]
    else:
        lines += [
            "    session = session_of(program)",
            "    for label in CALLS:",
            "        assert_same(label, expected[label], run(session, tensors(label)))",
        ]
    right = "takes the inputs" if recipe.refused else "agrees with eager"
    lines += [
        f'    print("no failure: the program {right}")',
        "",
        "",
        'if __name__ == "__main__":',
        "    with torch.no_grad():",
        "        run_repro()",
    ]
    calls = [f"call{number}" for number in range(len(samples))]
    return f"CALLS = {calls!r}\n\n\n" + "\n".join(lines)
