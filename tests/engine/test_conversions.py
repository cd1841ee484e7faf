"""One conversion for modes that capture the same graph: nothing changes by it, and no other graph gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch

from pytest_exportcheck import pipeline
from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.checks import equivalence, sizes
from pytest_exportcheck.errors import CompareError
from pytest_exportcheck.exporters.base import dynamic_arguments, flat_forward
from pytest_exportcheck.exporters.conversions import CaseConversions, Conversions
from pytest_exportcheck.exporters.fingerprint import draws_random_numbers
from pytest_exportcheck.exporters.guards import CaptureWatch
from pytest_exportcheck.observe import CallSignature, GraphShapes
from pytest_exportcheck.patches.engine import applied
from pytest_exportcheck.patches.modes import PatchList
from pytest_exportcheck.patches.none import NoPatches
from pytest_exportcheck.patches.patch import Patch
from pytest_exportcheck.patches.reach import Reach, reach_of
from pytest_exportcheck.spec_run import SpecRun

from .helpers import infer, make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")

NET = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return torch.relu(self.linear(x)) + x.shape[0]


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(2, 5),), {}), ((torch.randn(4, 5),), {})]
"""

MODES = "matrix: {exporters: [torch-export, onnx-dynamo], patch_modes: [none, transformers]}\n"


def without_sources(model: bytes) -> bytes:
    """The model without the lines of source that torch notes at nodes: those of a patch may be among them."""
    proto = onnx.load_from_string(model)
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes:
            kept = [(p.key, p.value) for p in node.metadata_props if not p.key.endswith("stack_trace")]
            del node.metadata_props[:]
            for key, value in kept:
                node.metadata_props.add(key=key, value=value)
    return proto.SerializeToString(deterministic=True)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each conversion that torch is asked for."""
    made: list[str] = []
    export = torch.onnx.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append("torch.onnx.export")
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", counted)
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The ONNX models that runtimes were given, in order."""
    found: list[bytes] = []
    original = pipeline.open_session

    def open_session(exported: Any, *rest: Any) -> Any:
        program = exported.program
        if isinstance(program, torch.onnx.ONNXProgram):
            found.append(onnx_ir.to_proto(program.model).SerializeToString(deterministic=True))
        return original(exported, *rest)

    monkeypatch.setattr(pipeline, "open_session", open_session)
    return found


def judged(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says of the case, without how it came about."""
    apart = ("durations", "peak_rss_mb", "patches", "same_graph_as", "conversion", "capture")
    return {key: value for key, value in record.items() if key not in apart}


@pytest.mark.parametrize("exporter", ["onnx-dynamo", "torch-export"])
def test_a_mode_with_the_same_graph_makes_nothing_anew(
    tmp_path: Path, converted: list[str], opened: list[bytes], exporter: str
) -> None:
    shared = make_run(tmp_path, NET, MODES)
    alone = SpecRun(shared.spec, share=False)
    records = {}
    for run in (shared, alone):
        for mode in ("none", "transformers"):
            stage, error, records[run, mode] = verdict(run, exporter, mode)
            assert stage == "pass", error
    assert records[shared, "transformers"]["same_graph_as"] == "none"
    assert "same_graph_as" not in records[shared, "none"]
    for mode in ("none", "transformers"):
        assert judged(records[shared, mode]) == judged(records[alone, mode])
        assert "same_graph_as" not in records[alone, mode]
        assert "conversion" not in records[alone, mode]
    if exporter == "onnx-dynamo":
        assert records[shared, "transformers"]["conversion"] == "shared"
        assert len(converted) == 3
        # The one of `none` and those of the run that shares nothing: the mode that shares needs no session.
        assert [without_sources(each) for each in opened] == [without_sources(opened[0])] * 3
    assert "session" not in records[shared, "transformers"]["durations"]


PAIR = """
    class Net(nn.Module):
        def forward(self, x, y, z):
            return x * 2, y * 3, z * 4


    def build_model():
        return Net()


    def calls():
        return [(tuple(torch.randn(n, 5) for n in sizes), {}) for sizes in SIZES]


    SIZES = ((2, 2, 4), (3, 3, 6))
"""


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("sizes", ["(2, 2, 4), (3, 3, 6)", "(2, 3, 5), (3, 4, 7)"], ids=["equality", "sum"])
def test_what_a_conversion_decides_where_a_thin_relation_is_broken_is_shared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, sizes: str
) -> None:
    """Sizes that are tied in the calls are compared while converting, and nowhere before."""
    export = torch.onnx.export

    def deciding(program: Any, *args: Any, **kwargs: Any) -> Any:
        x, y, z = [node.meta["val"].shape[0] for node in program.graph.nodes if node.op == "placeholder"]
        assert not bool(y > x + 40)
        assert not bool(z > x + y + 50)
        return export(program, *args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", deciding)
    spec = make_run(tmp_path, PAIR.replace("(2, 2, 4), (3, 3, 6)", sizes), MODES).spec
    stage, error, alone = verdict(SpecRun(spec, share=False), "onnx-dynamo")
    assert stage == "pass", error
    boundary = "y_dim_0=44 (" if "(2, 2" in sizes else "z_dim_0=58 ("
    assert any(boundary in text for text in alone["resize"]["relations"])
    settings = CacheSettings(tmp_path / "cache", 10**9) if cached else None
    run = SpecRun(spec, cache=settings)
    run.outcomes.keep = False  # The model is run in each mode.
    made = [(run, "none"), (run, "transformers"), (SpecRun(spec, cache=settings), "none")]
    found = []
    for each, mode in made[: 2 + cached]:
        stage, error, record = verdict(each, "onnx-dynamo", mode)
        assert stage == "pass", error
        assert record["resize"] == alone["resize"]
        assert record["warnings"] == alone["warnings"]
        found.append(record["conversion"])
    assert found == ["new", "shared", "cached"][: 2 + cached]


REUSED = """
    class Net(nn.Module):
        def forward(self, x, y):
            return (torch.relu(x) * 2).sum(0) + (torch.relu(y) * 3).sum(0)


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(n, 4), torch.randn(n, 4)), {}) for n in (5, 7)]
"""


def test_a_warning_of_the_other_sizes_is_in_the_record_of_every_mode(tmp_path: Path) -> None:
    run = make_run(tmp_path, REUSED, MODES)
    first, second = (verdict(run, "onnx-dynamo", mode)[2] for mode in ("none", "transformers"))
    assert second["same_graph_as"] == "none"
    assert len(first["warnings"]) == 2
    assert second["warnings"] == first["warnings"]


def test_the_shared_model_is_that_of_the_mode_alone(tmp_path: Path, opened: list[bytes]) -> None:
    """With the outcome out of the way the shared model is opened: it is what the mode makes by itself."""
    shared = make_run(tmp_path, NET, MODES)
    shared.outcomes.keep = False
    for run in (shared, SpecRun(shared.spec, share=False)):
        for mode in ("none", "transformers"):
            assert verdict(run, "onnx-dynamo", mode)[0] == "pass"
    assert len(opened) == 4
    assert len(set(map(without_sources, opened))) == 1


WRONG_BEYOND = NET.replace("+ x.shape[0]", "* (2 if x.shape[0] > 40 else 1)")


@pytest.mark.parametrize("exporter", ["onnx-dynamo", "torch-export"])
def test_a_failure_is_that_of_a_conversion_of_its_own(
    tmp_path: Path, converted: list[str], exporter: str
) -> None:
    shared = make_run(tmp_path, WRONG_BEYOND, MODES)
    alone = SpecRun(shared.spec, share=False)
    texts = []
    for run in (shared, alone):
        for mode in ("none", "transformers"):
            stage, error, record = verdict(run, exporter, mode)
            assert stage == "resize"
            assert "same_graph_as" not in record
            texts.append(str(error))
    assert len(set(texts)) == 1
    if exporter == "onnx-dynamo":
        assert len(converted) == 4


def test_a_wrong_shared_conversion_fails_no_case(tmp_path: Path, converted: list[str]) -> None:
    run = make_run(tmp_path, NET, MODES)
    assert verdict(run, "onnx-dynamo")[0] == "pass"
    (kept,) = run.conversions._kept
    wrong = onnx_ir.from_proto(onnx_ir.to_proto(kept.model))
    for node in wrong.graph:
        if node.op_type == "Relu":
            node.op_type = "Abs"
    run.conversions._kept[0] = replace(kept, model=wrong)
    stage, _, record = verdict(run, "onnx-dynamo", "transformers")
    assert stage == "pass"
    assert record["conversion"] == "new"
    assert "with the shared conversion it fails at compare, with a new one it passes" in record["warnings"][0]
    assert len(converted) == 2
    assert all(kept.model is not wrong for kept in run.conversions._kept)


# kinds of difference, one each


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x) * 2, x + y


class Constant(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x) * 3, x + y


class Guard(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x) * (2 if x.shape[0] < 50 else 9), x + y


class Order(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + y, self.linear(x) * 2


class Names(Base):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x) * 2, x + z


class Arguments(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x) * 2, y + x


class Weight(Base):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.weight[0, 0] += 1e-3


class Tensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.two = torch.tensor(2.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x) * self.two, x + y


class OtherTensor(Tensor):
    def __init__(self) -> None:
        super().__init__()
        self.two = torch.tensor(2.5)


class Container(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"a": self.linear(x) * 2, "b": x + y}


def capture(
    model: torch.nn.Module, rows: int = 3, dynamic: bool = True
) -> tuple[torch.export.ExportedProgram, CaptureWatch, GraphShapes]:
    """As the pipeline captures; `rows`: of the example."""
    example = {name: torch.ones(rows, 5) for name in CallSignature.of(model.forward).names}
    calls = [[torch.ones(n, 5) for _ in example] for n in (2, 3 if dynamic else 2)]
    shapes, _ = infer(model.forward, *[(call, {}) for call in calls])
    watch = CaptureWatch()
    with flat_forward(model, "forward", CallSignature.of(model.forward), example) as kwargs, watch:
        watch.inputs(kwargs)
        program = torch.export.export(
            model, (), kwargs=kwargs, dynamic_shapes=dynamic_arguments(kwargs, shapes)
        )
    return program, watch, shapes


class Obtained:
    """Asks a store for conversions of models, and tells which were made."""

    def __init__(self) -> None:
        self.store = Conversions(keep=True)

    def __call__(
        self,
        model: torch.nn.Module,
        settings: str = "opset 18",
        reach: Reach | None = Reach(),  # noqa: B008
        case: str = "onnx-dynamo",
        **how: Any,
    ) -> str:
        program, watch, shapes = capture(model.eval(), **how)
        asked = CaseConversions(self.store, (case,), "a mode", watch, shapes, lambda custom: reach)
        made: list[int] = []

        def make() -> Any:
            made.append(1)
            return torch.onnx.ONNXProgram(
                onnx_ir.Model(onnx_ir.Graph([], [], nodes=[]), ir_version=10), program
            )

        _, facts = asked.obtain(program, settings, make)
        assert bool(made) == (facts.get("conversion") != "shared")
        return str(facts.get("conversion", "not looked for"))


@pytest.fixture
def obtain() -> Callable[..., str]:
    return Obtained()


def test_the_same_graph_is_converted_once(obtain: Callable[..., str]) -> None:
    assert obtain(Base()) == "new"
    assert obtain(Base()) == "shared", "another instance, with weights of the same values"
    assert obtain(Tensor()) == "new"
    assert obtain(Tensor()) == "shared"


@pytest.mark.parametrize(
    "other", [Constant, Guard, Order, Names, Arguments, Weight, Container], ids=lambda cls: cls.__name__
)
def test_one_difference_is_enough(obtain: Callable[..., str], other: type[Base]) -> None:
    assert obtain(Base()) == "new"
    # The class is in the notes of nodes: the difference that is looked for is to be the only one.
    other.__qualname__ = Base.__qualname__
    assert obtain(other()) == "new"


def test_one_constant_tensor_is_enough(obtain: Callable[..., str]) -> None:
    OtherTensor.__qualname__ = Tensor.__qualname__
    assert obtain(Tensor()) == "new"
    assert obtain(OtherTensor()) == "new"


def test_what_is_not_in_the_graph_counts_too(obtain: Callable[..., str]) -> None:
    assert obtain(Base()) == "new"
    assert obtain(Base(), settings="opset 20") == "new"
    assert obtain(Base(), settings="{'x': {0: 'rows'}}") == "new", "the name of an axis"
    assert obtain(Base(), case="another exporter") == "new"
    assert obtain(Base(), reach=Reach(("a patch",))) == "new"
    assert obtain(Base(), rows=4) == "new", "sizes of the example: the conversion may ask for them"
    assert obtain(Base(), dynamic=False) == "new", "the range of a symbol"
    assert obtain(Base(), reach=None) == "not looked for"
    assert obtain(Base()) == "shared"


def test_a_weight_that_was_written_to_counts() -> None:
    obtain = Obtained()
    model = Base()
    assert obtain(model) == "new"
    assert obtain(model) == "shared"
    with torch.no_grad():
        model.linear.weight[0, 0] += 1e-3
    assert obtain(model) == "new", "what was folded into the first conversion is of the old values"


# what of a mode reaches a conversion


def _same(original: Any) -> Any:
    return original


def test_patches_of_models_reach_no_conversion() -> None:
    def reach(*patches: Patch, custom: bool = False) -> Reach | None:
        mode = PatchList("mine", [lambda model, target: list(patches)])
        with applied(patches):
            return reach_of(mode, custom_operators=custom)

    of_models = Patch("transformers.cache_utils.DynamicLayer.update", _same, wraps=True)
    of_torch = Patch("torch.nn.functional.gelu", _same, wraps=True)
    assert reach(of_models) == reach_of(NoPatches(), custom_operators=False) == Reach()
    assert reach(of_models, custom=True) != Reach(), "the operator may be one of transformers"
    found = reach(of_models, of_torch)
    assert found is not None
    assert found.values == (of_torch,)
    assert found.text is None, "a function of the user's has no version"
    assert reach(of_torch) == found


def test_a_mode_that_does_more_is_never_taken_for_another() -> None:
    class Fixes(NoPatches):
        def after_convert(self, onnx_program: Any) -> None:
            pass

    class Applies(NoPatches):
        def apply(self, model: Any, target: str) -> Any:
            return super().apply(model, target)

    first, second = reach_of(Fixes(), custom_operators=False), reach_of(Fixes(), custom_operators=False)
    assert first is not None
    assert first != second
    assert first != Reach()
    assert reach_of(Applies(), custom_operators=False) is None


def test_a_mode_with_patches_of_torch_converts_for_itself(tmp_path: Path, converted: list[str]) -> None:
    run = make_run(tmp_path, NET, MODES.replace("transformers", "torch"))
    for mode in ("none", "torch"):
        stage, _, record = verdict(run, "onnx-dynamo", mode)
        assert (stage, record["conversion"]) == ("pass", "new")
    assert len(converted) == 2


# outcomes and eager


def test_random_programs_are_run_each_time() -> None:
    class Drops(Base):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            q = x.reshape(1, 1, -1, 5)
            attention = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.p)
            return attention + y

    class Noise(Base):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x + torch.rand_like(y)

    assert draws_random_numbers(capture(Noise())[0])
    assert draws_random_numbers(capture(Drops(0.5))[0])
    assert not draws_random_numbers(capture(Drops(0.0))[0])
    assert not draws_random_numbers(capture(Base())[0])


def test_eager_is_asked_once_for_all_exporters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    compared: list[str] = []
    make, refuse = sizes.inputs_at, equivalence._refuse

    def counted(example: Any, shapes: Any, wanted: Any, calls: Any, recorded: Any) -> Any:
        asked.append(str(dict(wanted)))
        return make(example, shapes, wanted, calls, recorded)

    def counted_refuse(mode: Any, model: Any, target: str, *args: Any, **kwargs: Any) -> None:
        compared.append(target)
        refuse(mode, model, target, *args, **kwargs)

    monkeypatch.setattr(sizes, "inputs_at", counted)
    monkeypatch.setattr(equivalence, "_refuse", counted_refuse)
    run = make_run(tmp_path, NET, MODES)
    records = [
        verdict(run, exporter, mode)[2]
        for exporter in ("torch-export", "torch-export-strict", "onnx-dynamo", "onnx-torchscript")
        for mode in ("none", "transformers")
    ]
    assert asked
    assert len(asked) == len(set(asked)), "each size once"
    assert all(record["resize"]["passed"] == records[0]["resize"]["passed"] for record in records)
    assert compared.count("torch") == 1, "two exporters to one target"
    del asked[:]
    alone = SpecRun(run.spec, share=False)
    for exporter in ("torch-export", "onnx-dynamo"):
        assert verdict(alone, exporter)[0] == "pass"
    assert len(asked) == 2 * len(set(asked))


def test_what_eager_answered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_KEPT_BYTES", 100)
    run = make_run(tmp_path, NET, MODES)
    assert verdict(run, "torch-export")[0] == "pass"
    graph = run.observe("cpu", "float32").graph(None)
    kept = [each.nbytes() for each in graph.answers.values() if isinstance(each, sizes._Answer)]
    assert sum(kept) <= 100


def test_a_model_that_was_changed_shares_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, NET, MODES)
    assert verdict(run, "onnx-dynamo")[0] == "pass"
    assert run.conversions._kept
    run.forget("cpu", "float32")
    assert not run.conversions._kept
    assert verdict(run, "onnx-dynamo", "transformers")[2]["conversion"] == "new"
    run.close()
    assert not run.conversions._kept
    assert not run.outcomes._kept


def test_a_patch_that_changes_the_model_still_fails(tmp_path: Path) -> None:
    """The second exporter to the same target is told what the first one was."""
    extra = MODES.replace("transformers", '"net.py:wrong"')
    wrong = '\n\n    wrong = {"torch.relu": torch.abs}\n'
    run = make_run(tmp_path, NET + wrong, extra)
    for exporter in ("torch-export", "torch-export-strict"):
        stage, error, _ = verdict(run, exporter, "net.py:wrong")
        assert stage == "patch"
        assert not isinstance(error, CompareError)


STATEFUL = NET.replace(
    "        def forward(self, x):\n",
    '            self.register_buffer("calls", torch.zeros(()))\n\n'
    "        def forward(self, x):\n            self.calls += 1\n",
)


def test_a_model_that_keeps_state_is_asked_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATEFUL, MODES)
    records = [verdict(run, "torch-export", mode)[2] for mode in ("none", "transformers")]
    graph = run.observe("cpu", "float32").graph(None)
    assert graph.stateful
    assert graph.answers.keys() <= {
        "uniform inputs"
    }  # what was seen of the inputs: eager gave no such answer
    assert not any("same_graph_as" in record for record in records)


def test_a_case_with_a_known_outcome_reaches_the_last_stage(tmp_path: Path) -> None:
    run = make_run(tmp_path, NET, MODES)
    for mode in ("none", "transformers"):
        record = verdict(run, "torch-export", mode)[2]
        assert list(record["durations"])[-1] == "resize"
