"""The modes ``rewrite`` and ``all`` in a spec, and rewriting as a context manager."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import transformers.modeling_outputs  # noqa: F401  registers its classes when it is imported

from pytest_exportcheck import torch_export_patches, torch_export_rewrite
from pytest_exportcheck.checks.leaks import Leak, Snapshot, difference, snapshot
from pytest_exportcheck.diagnose.causes import causes_of_text
from pytest_exportcheck.errors import PatchError
from pytest_exportcheck.patches.rewrite import RewriteRefused, RewrittenMethod, rewrite_for_export
from pytest_exportcheck.patches.rewrite.locate import functions_of
from tests.engine.helpers import make_run

from . import forms
from .forms import NEGATIVE, POSITIVE, Base
from .helpers import ROWS, verdict

pytestmark = pytest.mark.filterwarnings("ignore")


def left_behind(before: Snapshot) -> list[Leak]:
    """What is not as it was, without what dynamo keeps of every ``torch.cond`` that it captures."""
    return [leak for leak in difference(before) if "__compiled_fn_" not in leak.place]


_NET = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return x * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        y = self.layer(x)
        if not torch.isfinite(y).all():
            y = torch.clamp(y, min=-10.0, max=10.0)
        return y


def build_model():
    torch.manual_seed(0)
    return Net()


def calls():
    return [((torch.ones(n, 4) * s,), {}) for n, s in ((2, 1.0), (5, -1.0))]
"""


def test_a_spec_with_branches_on_tensors(tmp_path: Path) -> None:
    run = make_run(tmp_path, _NET)
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, failure, record = verdict(run, exporter, "none")
        assert stage == "export", failure
        assert "patches" not in record
    before = None
    for mode, exporter in [
        ("all", "torch-export"),
        ("rewrite", "torch-export"),
        ("rewrite", "torch-export-strict"),
        ("rewrite", "onnx-dynamo"),
        ("all", "onnx-dynamo"),
    ]:
        stage, failure, record = verdict(run, exporter, mode)
        assert stage == "pass", failure
        if (
            before is None
        ):  # the first one imports parts of torch and transformers, which register their classes
            model = run.model("cpu", "float32")
            before = snapshot(model, modules=(type(model).__module__,))
        patches = record["patches"]
        assert patches["rewritten"] == {
            "net.Layer.forward": ["torch.cond"],
            "net.Net.forward": ["torch.where"],
        }
        assert set(patches["rewritten"]) <= set(patches["nodes"])
    # A trace knows no torch.cond: the branch of the example is baked in, and the numbers say so.
    stage, _, record = verdict(run, "onnx-torchscript", "rewrite")
    assert stage == "compare"
    assert record["patches"]["rewritten"] == {"net.Net.forward": ["torch.where"]}
    assert before is not None
    assert left_behind(before) == []


_FROM_ONE = """
class Net(nn.Module):
    def forward(self, x):
        h = x[0]
        for i in range(1, x.shape[0]):
            h = h * 0.5 + x[i]
        return h


def build_model():
    return Net()


def calls():
    return [((torch.arange(float(n * 4)).view(n, 4),), {}) for n in SIZES]
"""


@pytest.mark.parametrize(("sizes", "stage"), [("(2, 5)", "resize"), ("(2, 5, 1)", "run")])
def test_a_loop_without_a_round(tmp_path: Path, sizes: str, stage: str) -> None:
    """Eager takes one row; no program runs a scan of no rounds, and the case says so."""
    run = make_run(tmp_path, _FROM_ONE.replace("SIZES", sizes))
    failed, error, record = verdict(run, "onnx-dynamo", "rewrite")
    assert failed == stage
    assert error is not None
    (cause, *_) = [one for one in causes_of_text(str(error), stage, "float32", True) if "scan" in one.name]
    assert "`range(1, n)` has none where n is 1" in cause.remedy
    (shown,) = record["rewritten"].values()
    assert "no program runs a scan over an axis of no elements, which the original takes" in shown
    assert record["patches"]["rewritten"] == {"net.Net.forward": ["scan"]}


def test_a_loop_with_a_round_at_every_size(tmp_path: Path) -> None:
    run = make_run(tmp_path, _FROM_ONE.replace("SIZES", "(2, 5)"), "resize: {x_dim_0: [2, 3, 7]}\n")
    stage, error, _ = verdict(run, "onnx-dynamo", "rewrite")
    assert (stage, error) == ("pass", None)


_BRANCH_IN_A_LOOP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        while x.abs().sum() > 1.0:
            if x.sum() > 0:
                x = self.linear(x) * 0.1
            else:
                x = x * 0.25
        return x


def build_model():
    torch.manual_seed(0)
    return Net()


def calls():
    return [((torch.full((n, 4), s),), {}) for n, s in ((2, 3.0), (3, -3.0), (5, 1.0))]
"""


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
@pytest.mark.parametrize("mode", ["rewrite", "all"])
def test_a_branch_in_a_loop(tmp_path: Path, exporter: str, mode: str) -> None:
    stage, error, record = verdict(make_run(tmp_path, _BRANCH_IN_A_LOOP), exporter, mode)
    assert (stage, error) == ("pass", None)
    (targets,) = record["patches"]["rewritten"].values()
    assert set(targets) == {"torch.cond", "torch.while_loop"}


_BART = """
import transformers as T


def build_model():
    torch.manual_seed(0)
    config = T.BartConfig(
        vocab_size=99, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )
    return T.BartModel(config).eval()


def ids(batch, length):
    return torch.randint(5, 90, (batch, length))


def calls():
    return [
        ((), dict(input_ids=ids(b, n), decoder_input_ids=ids(b, m), use_cache=False))
        for b, n, m in ((2, 7, 4), (3, 9, 5))
    ]
"""


def test_bart_in_float16(tmp_path: Path) -> None:
    run = make_run(tmp_path, _BART, "matrix: {exporters: [torch-export], dtypes: [float16]}\n", name="bart16")
    before = snapshot(run.model("cpu", "float16"))
    stage, failure, _ = verdict(run, "torch-export", "none", "float16")
    assert stage == "export", failure
    stage, failure, record = verdict(run, "torch-export", "all", "float16")
    assert stage == "pass", failure
    name = "transformers.models.bart.modeling_bart.BartEncoderLayer.forward"
    assert record["patches"]["rewritten"] == {name: ["torch.where"]}
    assert left_behind(before) == []


def test_a_branch_that_cannot_be_rewritten_fails_at_patch(tmp_path: Path) -> None:
    source = _NET.replace("return self.linear(x)", "self.seen.append(1)").replace(
        "self.linear = nn.Linear(4, 4)", "self.seen = []"
    )
    run = make_run(tmp_path, source)
    for _ in range(2):  # the second time from memory
        stage, failure, _ = verdict(run, "torch-export", "rewrite")
        assert stage == "patch"
        assert failure is not None
        assert (
            "net.py:13: `self.seen.append(1)` under the test `x.sum() > 0` has an effect" in failure.message
        )
        assert "move it out of the branch" in failure.message


def test_another_error_is_left_to_the_exporter(tmp_path: Path) -> None:
    run = make_run(tmp_path, _NET.replace("y = self.layer(x)", "y = torch.from_numpy(self.layer(x).numpy())"))
    stage, failure, record = verdict(run, "torch-export", "rewrite")
    assert stage == "export"
    assert failure is not None
    assert "data-dependent" not in failure.message
    assert record["patches"]["rewritten"] == {"net.Layer.forward": ["torch.cond"]}


class OldBartEncoderLayer(torch.nn.Module):
    """The form of the test that transformers had before ``not torch.isfinite(...).all()``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(4, 4)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        hidden_states = self.fc1(hidden_states)
        if hidden_states.dtype == torch.float32 and (
            torch.isinf(hidden_states).any() or torch.isnan(hidden_states).any()
        ):
            clamp_value = torch.finfo(hidden_states.dtype).max - 1000
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
        outputs = (hidden_states,)
        if output_attentions:
            outputs += (attention_mask,)
        return outputs


def test_the_layer_as_the_documents_show_it(tmp_path: Path) -> None:
    model = OldBartEncoderLayer().eval()
    rewriting = rewrite_for_export(model, (POSITIVE,), dynamic_shapes=(*ROWS,))
    (method,) = rewriting.methods
    assert rewriting.refused is None
    assert method.targets == ("torch.where",)
    assert "torch.isinf(hidden_states).any(), torch.isnan(hidden_states).any()" in method.code
    # Only the lines of the branch change.
    assert [line for line in method.dump.splitlines() if line.startswith("-    ")] == [
        "-        if hidden_states.dtype == torch.float32 and (",
        "-            torch.isinf(hidden_states).any() or torch.isnan(hidden_states).any()",
        "-        ):",
    ] or method.dump.count("\n-") <= 6
    with torch_export_rewrite(rewriting, dump_rewriting=tmp_path):
        program = torch.export.export(model, (POSITIVE,), dynamic_shapes=ROWS).module()
        infinite = POSITIVE.clone()
        infinite[0] = float("inf")
        for x in (POSITIVE, infinite[:2]):
            inside = model(x)[0]
            torch.testing.assert_close(program(x)[0], inside, equal_nan=True)
    for x in (POSITIVE, infinite[:2]):
        torch.testing.assert_close(program(x)[0], model(x)[0], equal_nan=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{method.target}.diff", f"{method.target}.py"]
    assert (tmp_path / names[0]).read_text() == method.dump
    assert "True: made" in (tmp_path / names[1]).read_text()


def test_context_managers_put_the_code_back(capsys: pytest.CaptureFixture[str]) -> None:
    model = forms.EarlyReturn().eval()
    code = forms.EarlyReturn.forward.__code__
    calls = [((POSITIVE,), {}), ((NEGATIVE,), {})]
    seen: list[RewrittenMethod] = []
    before = snapshot(model, modules=(forms.__name__,))
    manager = torch_export_patches(
        patch_torch=False,
        rewrite=model,
        calls=calls,
        dynamic_shapes=ROWS,
        dump_rewriting=seen.append,
        verbose=2,
    )

    def inside() -> None:
        with manager:
            assert forms.EarlyReturn.forward.__code__ is not code
            assert torch.equal(model(NEGATIVE), NEGATIVE * 2 - 1)
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert forms.EarlyReturn.forward.__code__ is code
    assert [method.targets for method in seen] == [("torch.cond",)]
    said = capsys.readouterr().out
    assert "EarlyReturn.forward (torch.cond)" in said
    assert "+    result = torch.cond(" in said
    assert left_behind(before) == []


def test_a_function_with_its_calls() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return -x

    with torch_export_rewrite([choose], calls=[((POSITIVE,), {})]):
        assert torch.equal(choose(NEGATIVE), POSITIVE)
        assert torch.equal(choose(POSITIVE), POSITIVE * 2)
        assert "torch.where" in str(choose.__code__.co_names) or "where" in choose.__code__.co_names


class Unreachable(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 1e9:
            y = self.linear(x[:, :2])
        return y


def test_a_branch_that_nobody_can_run_is_refused() -> None:
    found = rewrite_for_export(Unreachable().eval(), (POSITIVE,), dynamic_shapes=ROWS)
    assert isinstance(found.refused, RewriteRefused)
    assert "observe a call that takes this branch" in found.refused.message
    with pytest.raises(PatchError, match="observe a call"), torch_export_rewrite(found):
        pass


_SCRIPT = """
import torch

def outer(x):
    choose = lambda t: t * 2 if t.sum() > 0 else t - 1
    return choose(x)
"""


def test_the_code_of_a_module_is_no_function_to_rewrite(tmp_path: Path) -> None:
    """Of a script that runs, the code of the module is alive, and dynamo makes functions of such code."""
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    code = compile(_SCRIPT, str(path), "exec")
    module: dict[str, Any] = {"__name__": "script"}
    exec(code, module)
    made = FunctionType(code, module)
    outer = module["outer"]
    nested = next(one for one in outer.__code__.co_consts if isinstance(one, CodeType))
    assert functions_of(nested) == [(outer, nested)]
    assert made.__code__ is code
