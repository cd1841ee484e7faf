"""The script of a failure: it fails the same way, in a process of its own, without this plugin."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine.helpers import make_run

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.diagnose import diagnose_case
from pytest_exportcheck.diagnose.reproduction import _raised, factory_of
from pytest_exportcheck.diagnose.script_model import Factory, model_source, only_needed
from pytest_exportcheck.diagnose.script_values import CannotWriteError, Values
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.spec import load_spec

from .helpers import corrupted_runtime
from .test_faults import replace_gelu

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

pytestmark = pytest.mark.filterwarnings("ignore")

#: The interpreter itself: what is kept runs in a new one.
PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _warm(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagnosis runs a script before it keeps it: in a process that has imported torch already."""
    monkeypatch.setattr(sys, "executable", warm_python.executable)


DEEP = """
    from __future__ import annotations


    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x, scale=1.0):
            {body}


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = nn.ModuleList([nn.Linear(4, 4), Part()])

        def forward(self, x):
            return {{"y": self.deep[1](self.deep[0](x), scale=2.0)}}


    def build():
        return Net()


    def build_model():
        return build()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, 4, generator=g),), {{}}) for n in (2, 5)]


    if __name__ == "__main__":
        raise SystemExit("this is not a script")
"""


def reproduced(
    run: SpecRun, folder: Path, dtype: str = "float32", exporter: str = "onnx-dynamo"
) -> list[str]:
    """The lines about the reproduction of the failing case."""
    case = CaseId(run.spec.relative, exporter, "none", "cpu", dtype)
    with pytest.raises(ExportCheckError) as caught:
        run_case(run, case, lambda stage: None, {})
    found = diagnose_case(run, case, caught.value, 300, reproduction=folder)
    assert found.to_record()["reproduction"] == found.reproduction
    assert set(found.reproduction) <= set(found.lines())
    return found.reproduction


def run_alone(folder: Path, python: str = PYTHON) -> subprocess.CompletedProcess[str]:
    """Where this plugin cannot be imported."""
    code = (
        "import sys, runpy\n"
        "for name in [each for each in sys.modules if each.startswith('pytest_exportcheck')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['pytest_exportcheck'] = None\n"
        "runpy.run_path('repro.py', run_name='__main__')"
    )
    return subprocess.run(
        [python, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def written(tmp_path: Path, body: str, more: str = "") -> SpecRun:
    source = DEEP.format(body=body)
    run = make_run(tmp_path, source, more)
    # The helper puts imports first.
    file = tmp_path / "net.py"
    text = file.read_text().replace("from __future__ import annotations\n", "")
    file.write_text("from __future__ import annotations\n" + text)
    return run


def test_a_refused_module_of_a_users_factory(tmp_path: Path) -> None:
    run = written(tmp_path, "return self.lin(x) * scale if x.sum() > 0 else x")
    kept = tmp_path / "kept"
    (line,) = reproduced(run, kept)
    assert line == f"reproduction (deep[1], fails the same way): {kept / 'repro.py'}"
    text = (kept / "repro.py").read_text()
    assert "pytest_exportcheck" not in text
    assert "this is not a script" not in text
    assert "self.module(x=x, scale=2.0)" in text
    ran = run_alone(kept)
    assert ran.returncode == 1
    assert "Could not guard on data-dependent expression" in ran.stderr
    issue = (kept / "ISSUE.md").read_text()
    assert f"torch {torch.__version__}" in issue
    assert "return self.lin(x) * scale if x.sum() > 0 else x" in issue
    assert "GuardOnDataDependentSymNode" in issue
    # Of the file what the model needs; of what the script wrote what it raised.
    assert "class Part" in text
    assert "def calls()" not in text
    assert "def build_model()" in text
    shown = issue.partition("~~~text\n")[2].partition("~~~")[0]
    assert shown
    assert not [line for line in shown.splitlines() if "torchvision" in line or "Warning" in line]


LAYERS = """
import torch
from torch import nn

from scales.all import SCALE


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.lin(x) * SCALE if x.sum() > 0 else x
"""


def test_a_factory_that_imports_files_beside_it(tmp_path: Path) -> None:
    run = written(tmp_path, "return x")
    file = tmp_path / "net.py"
    text = file.read_text()
    before, _, after = text.partition("class Part(nn.Module):")
    file.write_text(f"{before}from layers import Part\n\n\n{after[after.index('class Net') :]}")
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales" / "__init__.py").write_text("")
    (tmp_path / "scales" / "all.py").write_text("SCALE = 2.0\n")
    (tmp_path / "unused.py").write_text("raise SystemExit('nobody imports this')\n")
    kept = tmp_path / "kept"
    (line,) = reproduced(run, kept)
    assert line == f"reproduction (deep[1], fails the same way): {kept / 'repro.py'}"
    files = {path.relative_to(kept).as_posix() for path in kept.rglob("*.py")}
    assert files == {"repro.py", "layers.py", "scales/__init__.py", "scales/all.py"}
    # Such a script was run in a new interpreter above: what differs is the files.
    ran = run_alone(kept, sys.executable)
    assert ran.returncode == 1
    assert "Could not guard on data-dependent expression" in ran.stderr
    issue = (kept / "ISSUE.md").read_text()
    assert "and `layers.py`, and `scales/__init__.py`, and `scales/all.py` beside it." in issue
    assert "`scales/all.py`:\n\n~~~python\nSCALE = 2.0\n~~~" in issue


def test_a_file_of_the_scripts_own_name(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text("SIZE = 4\n")
    run = written(tmp_path, "return x")
    file = tmp_path / "net.py"
    file.write_text(file.read_text().replace("import torch\n", "import torch\nimport repro\n", 1))
    with pytest.raises(CannotWriteError, match=r"imports a file that is called repro\.py"):
        model_source(torch.nn.Linear(2, 2), factory_of(run.spec))


SOURCE = """import torch
from torch import nn

WIDTH = size()


def size():
    return 4


# About the unused one.
class Unused(nn.Module):
    pass


@register
class Kept(nn.Module):
    pass


class Part(nn.Module):
    other: "Later"

    def forward(self, x):
        return helper(x)


def helper(x): return x


def unused(): return Unused()


class Later:
    pass


def build(): return Part()
"""


def test_what_a_factory_needs_of_its_file() -> None:
    left = only_needed(SOURCE, {"build"})
    for name in (
        "WIDTH = size()",
        "def size",
        "@register",
        "class Kept",
        "class Part",
        "def helper",
        "class Later",
    ):
        assert name in left
    assert "nused" not in left
    ast.parse(left)
    # Whoever looks names up by their text may need any.
    assert only_needed(SOURCE + "x = globals()\n", {"build"}) == SOURCE + "x = globals()\n"


def test_of_what_a_script_wrote_only_what_it_raised() -> None:
    said = [
        "W1128 19:32:35.110000 5086 torch/onnx/_r.py:107] torchvision is not installed. Skipping x",
        "/lib/copyreg.py:105: FutureWarning: `isinstance(treespec, LeafSpec)` is deprecated",
        "Traceback (most recent call last):",
        '  File "repro.py", line 3, in <module>',
        "ValueError: inner",
        "The above exception was the direct cause of the following exception:",
        "Traceback (most recent call last):",
        '  File "repro.py", line 4, in <module>',
        "AssertionError: output 0 differs from eager",
        "2026-11-28 19:32:35.1 [W:onnxruntime:, x.cc:1 Y] at the end",
    ]
    assert _raised(said) == [
        "ValueError: inner",
        "The above exception was the direct cause of the following exception:",
        "AssertionError: output 0 differs from eager",
    ]
    assert _raised(["the script was killed"]) == ["the script was killed"]


def test_wrong_numbers_of_a_conversion(tmp_path: Path) -> None:
    # A row that may attend to nothing: zeros in torch, NaN in ONNX.
    mask = "torch.where(x[:, :1] > 1e9, 0.0, -torch.inf).expand(-1, x.shape[0])"
    body = f"""mask = {mask}
            q = self.lin(x)[None, None]
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)[0, 0] * scale"""
    kept = tmp_path / "kept"
    (line,) = reproduced(written(tmp_path, body), kept)
    assert line.startswith("reproduction (deep.1, fails the same way)")
    ran = run_alone(kept)
    assert ran.returncode == 1
    assert "output 0 differs from eager: nan instead of 0" in ran.stderr


def test_a_submodule_of_transformers(tmp_path: Path) -> None:
    spec = tmp_path / "bart.yaml"
    spec.write_text(
        "exportcheck: 1\n"
        "model:\n"
        "  type: bart\n"
        "  auto_class: AutoModel\n"
        "  config: {vocab_size: 64, d_model: 16, encoder_layers: 1, decoder_layers: 1,\n"
        "    encoder_attention_heads: 2, decoder_attention_heads: 2, encoder_ffn_dim: 32,\n"
        "    decoder_ffn_dim: 32, max_position_embeddings: 64}\n"
        "observe:\n"
        "  calls:\n"
        '    - forward: {input_ids: "int64[2, 5] < 64", use_cache: false,\n'
        '        decoder_input_ids: "int64[2, 6] < 64"}\n'
        '    - forward: {input_ids: "int64[3, 7] < 64", use_cache: false,\n'
        '        decoder_input_ids: "int64[3, 8] < 64"}\n'
        "matrix: {exporters: [onnx-dynamo], dtypes: [float16]}\n"
    )
    kept = tmp_path / "kept"
    (line,) = reproduced(SpecRun(load_spec(spec, tmp_path)), kept, "float16")
    assert line.startswith("reproduction (encoder.layers[0], fails the same way)")
    text = (kept / "repro.py").read_text()
    assert "from transformers.models.bart.modeling_bart import BartModel" in text
    assert "get_submodule('encoder.layers.0')" in text
    ran = run_alone(kept)
    assert ran.returncode == 1
    assert "modeling_bart.py" in ran.stderr
    assert "Could not guard on data-dependent expression" in ran.stderr


def test_a_script_that_does_not_fail_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted_runtime(monkeypatch, replace_gelu)  # in this process only
    run = written(tmp_path, "return nn.functional.gelu(self.lin(x)) * scale")
    kept = tmp_path / "kept"
    lines = reproduced(run, kept)
    assert lines == [
        "no reproduction:",
        "  deep.1: the script does not fail",
        "  Net: the script does not fail",
    ]
    assert not kept.exists()


def test_sizes_that_a_guard_refuses(tmp_path: Path) -> None:
    # What counts in the outputs is no question where there are none.
    body = "return self.lin(x) * scale if x.shape[0] * 3 > 8 else x"
    run = written(tmp_path, body, "compare: {y: {where: x}}\n")
    kept = tmp_path / "kept"
    (line,) = reproduced(run, kept, exporter="torch-export")
    assert line == f"reproduction (deep[1], fails the same way): {kept / 'repro.py'}"
    ran = run_alone(kept)
    assert ran.returncode == 1
    assert "AssertionError: Guard failed: " in ran.stderr
    assert "the program refuses sizes that the module takes: it demands" in (kept / "ISSUE.md").read_text()


def evaluated(value: Any) -> Any:
    values = Values()
    source = values.source(value, "x")
    lines: list[str] = list(values.imports)
    if values.caches:
        from pytest_exportcheck.diagnose.script_values import CACHE_HELPERS

        lines.append(CACHE_HELPERS)
    scope: dict[str, Any] = {"torch": torch, **values.tensors}
    exec("\n".join(lines), scope)
    return eval(source, scope)


def test_arguments_as_source() -> None:
    from collections import namedtuple

    from transformers.cache_utils import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    tensor = torch.randn(2, 3)
    plain = {"a": [tensor, None], "b": (1.5, float("inf")), "c": ("x",), "d": torch.float16}
    again = evaluated(plain)
    assert again["a"][0] is tensor
    assert {**again, "a": None} == {**plain, "a": None}
    output = evaluated(BaseModelOutput(last_hidden_state=tensor))
    assert type(output) is BaseModelOutput
    assert output.last_hidden_state is tensor
    cache = DynamicCache()
    cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), 0)
    pair = evaluated(EncoderDecoderCache(cache, DynamicCache()))
    assert pair.self_attention_cache.get_seq_length() == 3
    assert torch.equal(pair.self_attention_cache.layers[0].keys, cache.layers[0].keys)
    assert pair.cross_attention_cache.get_seq_length() == 0
    with pytest.raises(CannotWriteError, match="holds a object"):
        Values().source([object()], "x")
    local = namedtuple("local", "y")
    local.__qualname__ = "f.<locals>.local"
    with pytest.raises(CannotWriteError, match="cannot be imported"):
        Values().source(local(1), "x")


def test_a_model_that_no_script_can_build() -> None:
    with pytest.raises(CannotWriteError, match="no config and no factory"):
        model_source(torch.nn.Linear(2, 2), None)
    with pytest.raises(CannotWriteError, match="cannot be read"):
        model_source(torch.nn.Linear(2, 2), Factory(lambda: None, {}))
    with pytest.raises(CannotWriteError, match="given a object"):
        model_source(torch.nn.Linear(2, 2), Factory(written, {"a": object()}))


STRIDES = """
    class Part(nn.Module):
        def forward(self, x):
            if not x.is_contiguous():
                return x * 2 if x.sum() > 0 else x
            return x


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            return self.part(x) + 1


    def build_model():
        return Net()


    def calls():
        return [(({given},), {{}}) for n in (3, 5)]
"""


@pytest.mark.parametrize(
    "given",
    [
        "torch.ones(4, n).T",
        "torch.ones(n, 9)[:, 1:8:2]",
        "torch.ones(1, 4).expand(n, 4)",
    ],
)
def test_a_failure_that_depends_on_strides(tmp_path: Path, given: str) -> None:
    kept = tmp_path / "kept"
    (line,) = reproduced(make_run(tmp_path, STRIDES.format(given=given)), kept)
    assert line == f"reproduction (part, fails the same way): {kept / 'repro.py'}"
    # Such a script was run in a new interpreter above: what differs is the data.
    ran = run_alone(kept, sys.executable)
    assert "Could not guard on data-dependent expression" in ran.stderr


TIED = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            same = torch.equal(self.head.weight, self.embed.weight)
            y = self.head(self.embed(ids))
            return y.relu() if same and y.sum() > 0 else y


    def build_model():
        return Net()


    def calls():
        return [((torch.arange(n),), {}) for n in (3, 5)]
"""


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (line,) = reproduced(make_run(tmp_path, TIED), kept)
    assert line == f"reproduction (Net, fails the same way): {kept / 'repro.py'}"
    code = (
        "import repro\n"
        "module = repro.load_module(repro.load_file('data.safetensors'))\n"
        "print(module.head.weight is module.embed.weight)"
    )
    # Such a script was run in a new interpreter above: what differs is the weights.
    ran = subprocess.run([sys.executable, "-c", code], cwd=kept, capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


PACKED = """
    from dataclasses import dataclass


    @dataclass
    class Pack:
        x: torch.Tensor


    torch.export.register_dataclass(Pack, serialized_type_name="reproduced.Pack")


    class Net(nn.Module):
        def forward(self, pack):
            return pack.x * 2 if pack.x.sum() > 0 else pack.x


    def build_model():
        return Net()


    def calls():
        return [((Pack(torch.ones(n, 4)),), {}) for n in (2, 5)]
"""


def test_a_dataclass_of_the_factorys_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (line,) = reproduced(make_run(tmp_path, PACKED), kept)
    assert line == f"reproduction (Net, fails the same way): {kept / 'repro.py'}"
    assert "Could not guard on data-dependent expression" in run_alone(kept).stderr


def test_the_module_of_an_operator_that_is_not_converted(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run = written(tmp_path, "return torch.linalg.eigvalsh(self.lin(x)[:, :, None] * scale)")
    text = (tmp_path / "net.py").read_text().replace("[:, :, None]", "[:, :, None] * x[:, None, :]")
    (tmp_path / "net.py").write_text(text)
    (line,) = reproduced(run, kept)
    assert line == f"reproduction (deep.1, fails the same way): {kept / 'repro.py'}"
    # Such a script, with a conversion, was run in a new interpreter above.
    assert "No ONNX function found for" in run_alone(kept, sys.executable).stderr
