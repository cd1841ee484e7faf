"""State that one call leaves for the next is named, as eager's; harmless caches are no news."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import load_spec

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

CALLS = """

def build_model():
    return Net()


def calls():
    g = torch.Generator().manual_seed(1)
    return [((torch.randn(n, 4, generator=g),), {}) for n in (2, 3, 5)]
"""


def net(tmp_path: Path, body: str, extra: str = "", head: str = "") -> SpecRun:
    """A spec of the class `Net` with `body`, behind the lines of `head`."""
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").splitlines())
    return make_run(tmp_path, f"import functools\n\n\n{head}\n\nclass Net(nn.Module):\n{lines}{CALLS}", extra)


def init(*lines: str) -> str:
    return "def __init__(self):\n    super().__init__()\n" + "".join(f"    {x}\n" for x in lines) + "\n"


def forward(*lines: str) -> str:
    return "def forward(self, x):\n" + "".join(f"    {x}\n" for x in lines)


FIRST = ("if {0} is None:", "    {0} = x.mean()", "return x * {0}")

GUILTY: dict[str, tuple[str, str, str]] = {
    "attribute": (
        init("self.first = None") + forward(*(line.format("self.first") for line in FIRST)),
        "",
        "attribute `first` changed from None to ",
    ),
    "new-attribute": (
        forward("if not hasattr(self, 'first'):", "    self.first = x.mean()", "return x * self.first"),
        "",
        "attribute `first` is new (",
    ),
    "of-a-submodule": (
        init("self.inner = nn.ModuleList([nn.Identity()])", "self.inner[0].first = None")
        + forward("inner = self.inner[0]", *(line.format("inner.first") for line in FIRST)),
        "",
        "attribute `inner.0.first` changed from None to ",
    ),
    "number": (
        init("self.rows = 0") + forward("self.rows = self.rows or len(x)", "return x * self.rows"),
        "",
        "attribute `rows` changed from 0 to 2",
    ),
    "buffer": (
        init('self.register_buffer("scale", torch.zeros(1))')
        + forward("if len(x) == 2:", "    self.scale.copy_(x.mean())", "return x + self.scale"),
        "",
        "buffer `scale` changed from [0] to ",
    ),
    "buffer-through-data": (
        init('self.register_buffer("scale", torch.zeros(1))')
        + forward("if len(x) == 2:", "    self.scale.data.copy_(x.mean())", "return x + self.scale"),
        "",
        "buffer `scale` changed from [0] to ",
    ),
    "gradient": (
        init("self.weight = nn.Parameter(torch.ones(4))")
        + forward(
            "if self.weight.grad is None:",
            "    self.weight.grad = torch.ones(4) * x.mean()",
            "return x * self.weight.grad",
        ),
        "",
        "gradient of parameter `weight` is new (",
    ),
    "large-buffer": (
        init('self.register_buffer("scale", torch.zeros(90, 100))')
        + forward(
            "if len(x) == 2:",
            "    self.scale = x.mean().expand(90, 100).clone()",
            "return x + self.scale[0, 0]",
        ),
        "",
        "buffer `scale` changed (float32[90, 100])",
    ),
    "list": (
        init("self.seen = []")
        + forward("if len(self.seen) < 1:", "    self.seen.append(x.mean())", "return x * self.seen[0]"),
        "",
        "attribute `seen` changed from [] to [tensor(",
    ),
    "dict-by-shape": (
        init("self.tables = {'all': {}}")
        + forward(
            "tables = self.tables['all']",
            "if x.shape[1] not in tables:",
            "    tables[x.shape[1]] = x.mean()",
            "return x * tables[x.shape[1]]",
        ),
        "",
        "attribute `tables` changed",
    ),
    "object": (
        init("self.state = State()") + forward(*(line.format("self.state.first") for line in FIRST)),
        "class State:\n    first = None",
        "attribute `state` changed",
    ),
    "lru-cache-on-a-method": (
        init("self.rows = 0")
        + "@functools.lru_cache\ndef table(self, width):\n    return float(self.rows)\n\n"
        + forward("self.rows = len(x)", "return x * self.table(x.shape[1])"),
        "",
        "class attribute `Net.table` changed from 0 results to 1 results",
    ),
    "lru-cache-of-a-function": (
        forward("ROWS[0] = len(x)", "return x * table(x.shape[1])"),
        "ROWS = [0]\n\n\n@functools.lru_cache\ndef table(width):\n    return float(ROWS[0])\n",
        "global `table` of net.py changed from 0 results to 1 results",
    ),
    "cached-property": (
        init("self.rows = 0")
        + "@functools.cached_property\ndef factor(self):\n    return float(self.rows)\n\n"
        + forward("self.rows = len(x)", "return x * self.factor"),
        "",
        "attribute `factor` is new (2.0)",
    ),
    "lazy-submodule": (
        forward(
            "if not hasattr(self, 'proj'):",
            "    self.proj = nn.Linear(4, len(x)).requires_grad_(False)",
            "return self.proj(x)",
        ),
        "",
        "parameter `proj.weight` is new (float32[2, 4])",
    ),
    "global": (
        forward("global FIRST", *(line.format("FIRST") for line in FIRST)),
        "FIRST = None",
        "global `FIRST` of net.py changed from None to ",
    ),
    "new-global": (
        forward("if 'FIRST' not in globals():", "    globals()['FIRST'] = x.mean()", "return x * FIRST"),
        "",
        "global `FIRST` of net.py is new (",
    ),
    "global-dict": (
        forward(
            "if x.shape[1] not in CACHE:", "    CACHE[x.shape[1]] = x.mean()", "return x * CACHE[x.shape[1]]"
        ),
        "CACHE = {}",
        "global `CACHE` of net.py changed from {} to {4: tensor(",
    ),
    "global-object": (
        forward(*(line.format("STATE.first") for line in FIRST)),
        "class State:\n    first = None\n\n\nSTATE = State()",
        "global `STATE` of net.py changed",
    ),
    "class-attribute": (
        "first = None\n\n" + forward(*(line.format("type(self).first") for line in FIRST)),
        "",
        "class attribute `Net.first` changed from None to ",
    ),
    "class-as-a-namespace": (
        forward(*(line.format("State.first") for line in FIRST)),
        "class State:\n    first = None",
        "class attribute `State.first` changed from None to ",
    ),
    "class-method-of-a-registry": (
        forward("kept = Registry.get()", "return x * kept.setdefault('first', x.mean())"),
        "class Registry:\n    it = None\n\n    @classmethod\n    def get(cls):\n"
        "        cls.it = {} if cls.it is None else cls.it\n        return cls.it",
        "class attribute `Registry.it` changed from None to ",
    ),
    "slots": (
        init("self.state = State()") + forward(*(line.format("self.state.first") for line in FIRST)),
        "class State:\n    __slots__ = ('first',)\n\n    def __init__(self):\n        self.first = None",
        "attribute `state` changed",
    ),
    "global-with-slots": (
        forward(*(line.format("STATE.first") for line in FIRST)),
        "class State:\n    __slots__ = ('first',)\n\n\nSTATE = State()\nSTATE.first = None",
        "global `STATE` of net.py changed",
    ),
    "counter": (
        init("self.rows = collections.Counter()")
        + forward("self.rows['x'] = self.rows['x'] or len(x)", "return x * self.rows['x']"),
        "import collections",
        "attribute `rows` changed",
    ),
    "global-array": (
        forward("if not ROWS:", "    ROWS.append(len(x))", "return x * ROWS[0]"),
        "import array\n\nROWS = array.array('d')",
        "global `ROWS` of net.py changed",
    ),
    "default-of-an-argument": (
        forward("return norm(x)"),
        "def norm(x, kept={}):\n    return x * kept.setdefault('first', x.mean())",
        "default `kept` of function `norm` changed from {} to ",
    ),
    "default-of-a-keyword": (
        "def norm(self, x, *, kept=[]):\n    kept[:] = kept or [x.mean()]\n    return x * kept[0]\n\n"
        + forward("return self.norm(x)"),
        "",
        "default `kept` of function `Net.norm` changed from [] to ",
    ),
    "attribute-of-a-function": (
        forward(*(line.format("norm.first") for line in FIRST)),
        "def norm():\n    pass\n\n\nnorm.first = None",
        "attribute `first` of function `norm` changed from None to ",
    ),
    "attribute-of-a-parameter": (
        init("self.w = nn.Parameter(torch.ones(4))", "self.w.first = None")
        + forward(*(line.format("self.w.first") for line in FIRST)),
        "",
        "attribute `first` of parameter `w` changed from None to ",
    ),
    "closure-in-an-attribute": (
        init("self.norm = made()") + forward("return self.norm(x)"),
        "def made():\n    kept = {}\n    return lambda x: x * kept.setdefault('first', x.mean())",
        "closure variable `kept` changed from {} to ",
    ),
    "closure-of-a-decorator": (
        "@once\ndef factor(self, x):\n    return x.mean()\n\n" + forward("return x * self.factor(x)"),
        "def once(function):\n    kept = {}\n\n    @functools.wraps(function)\n    def inner(self, x):\n"
        "        if not kept:\n            kept['first'] = function(self, x)\n"
        "        return kept['first']\n\n    return inner",
        "closure variable `kept` changed from {} to ",
    ),
    "partial": (
        init("self.norm = functools.partial(norm, {})") + forward("return self.norm(x)"),
        "def norm(kept, x):\n    return x * kept.setdefault('first', x.mean())",
        "attribute `norm` changed",
    ),
    "replaced-forward": (
        init(
            "kept, plain = {}, self.forward",
            "self.forward = lambda x: plain(x * kept.setdefault('first', x.mean()))",
        )
        + forward("return x * 2"),
        "",
        "closure variable `kept` changed from {} to ",
    ),
    "closure-of-a-hook": (
        init(
            "kept, self.inner = {}, nn.Identity()",
            "hook = lambda m, args, out: out * kept.setdefault('first', args[0].mean())",
            "self.inner.register_forward_hook(hook)",
        )
        + forward("return self.inner(x) * 2"),
        "",
        "closure variable `kept` changed from {} to ",
    ),
    "object-as-a-hook": (
        init("self.inner = nn.Identity()", "self.inner.register_forward_pre_hook(Factor())")
        + forward("return self.inner(x)"),
        "class Factor:\n    first = None\n\n    def __call__(self, module, args):\n"
        "        self.first = args[0].mean() if self.first is None else self.first\n"
        "        return (args[0] * self.first,)",
        "of `inner` changed (<",
    ),
}


@pytest.mark.parametrize("name", GUILTY)
def test_an_answer_that_depends_on_the_calls_before_is_eagers(tmp_path: Path, name: str) -> None:
    body, head, says = GUILTY[name]
    run = net(tmp_path, body, head=head)
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "observe", name
    assert says in str(error)
    assert "depends on the calls before it: a newly built model " in str(error)
    assert "no exporter is blamed" in str(error)
    assert "compute it in every call" in str(error)


def test_a_generator_that_made_the_inputs_is_not_named_first(tmp_path: Path) -> None:
    body = forward("return x * SEEN.setdefault('first', x.mean())")
    run = net(tmp_path, body, head="G = torch.Generator().manual_seed(0)\nSEEN = {}\n")
    path = tmp_path / "net.py"
    path.write_text(path.read_text().replace("generator=g", "generator=G"))
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "observe", error
    assert "what they left: global `SEEN` of net.py changed from {} to " in str(error)
    assert "global `G` of net.py changed (a generator of random numbers)" in str(error)


HARMLESS: dict[str, tuple[str, str]] = {
    "table": (
        init("self.table = None")
        + forward(
            "if self.table is None:",
            "    self.table = torch.arange(4)",
            "return x + self.table",
        ),
        "",
    ),
    "lru-cache": (
        "@functools.lru_cache\ndef table(self, width):\n    return torch.arange(width)\n\n"
        + forward("return x * self.table(x.shape[1])"),
        "",
    ),
    "list-of-calls": (init("self.seen = []") + forward("self.seen.append(x.shape[1])", "return x * 2"), ""),
    "global-dict": (
        forward(
            "if x.shape[1] not in CACHE:",
            "    CACHE[x.shape[1]] = torch.ones(x.shape[1])",
            "return x * CACHE[x.shape[1]]",
        ),
        "CACHE = {}",
    ),
    "lazy-submodule": (
        forward(
            "if not hasattr(self, 'act'):", "    self.act = nn.LayerNorm(4).eval()", "return self.act(x)"
        ),
        "",
    ),
    "namespace-and-default": (
        forward("State.rows = x.shape[1]", "return x * table(x.shape[1])"),
        "class State:\n    rows = 0\n\n\ndef table(n, kept={}):\n    return kept.setdefault(n, 2.0)",
    ),
    "object-that-cannot-be-shown": (
        init("self.odd = Odd()", "self.kept = {}") + forward("self.kept[0] = Odd()", "return x * 2"),
        "class Odd:\n    def __repr__(self):\n        raise RuntimeError('no')\n\n\nODD = Odd()",
    ),
    "factory-that-draws": (
        init("self.w = nn.Parameter(torch.randn(4, generator=G))", "self.seen = []")
        + forward("self.seen.append(x.shape[1])", "return x * self.w"),
        "G = torch.Generator()",
    ),
}


@pytest.mark.parametrize("use", ["beside.norm(x)", "x * beside.KEPT.setdefault('first', x.mean())"])
def test_state_of_a_file_that_is_imported_as_a_whole(tmp_path: Path, use: str) -> None:
    (tmp_path / "beside.py").write_text(
        "KEPT = {}\n\n\ndef norm(x):\n    return x * KEPT.setdefault('first', x.mean())\n"
    )
    stage, error, _ = verdict(net(tmp_path, forward(f"return {use}"), head="import beside"), "torch-export")
    assert stage == "observe"
    assert "global `KEPT` of beside.py changed from {} to " in str(error)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_kept_and_changes_no_answer_is_no_news(tmp_path: Path, name: str) -> None:
    body, head = HARMLESS[name]
    stage, error, record = verdict(net(tmp_path, body, head=head), "torch-export")
    assert stage == "pass", error
    assert record["warnings"] == []


def test_globals_are_left_as_they_are(tmp_path: Path) -> None:
    body, head, _ = GUILTY["global-dict"]
    run = net(tmp_path, body, head=head)
    assert verdict(run, "torch-export")[0] == "observe"
    cache = type(run.model("cpu", "float32")).forward.__globals__["CACHE"]
    assert list(cache) == [4]


def test_a_global_that_another_dtype_filled_is_still_news(tmp_path: Path) -> None:
    body = forward("global ROWS", "ROWS = ROWS or len(x)", "return x * ROWS")
    run = net(tmp_path, body, "matrix: {dtypes: [float32, float64]}\n", "ROWS = 0")
    for dtype in ("float32", "float64"):
        with pytest.raises(ObserveError, match="depends on the calls before it"):
            run.observe("cpu", dtype)


def test_what_is_done_between_the_calls_is_no_state_of_them(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        """
        class Net(nn.Module):
            factor = 1.0

            def forward(self, x):
                return x * self.factor


        def build_model():
            return Net()


        def calls(model):
            model.factor = 3.0
            for n in (2, 3):
                model(torch.ones(n, 4))
        """,
    )
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert len(record["warnings"]) == 1
    assert "attribute `factor` is new (3.0) by the calls" in record["warnings"][0]
    assert "or is changed between the calls" in record["warnings"][0]


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("MODEL", "what builds the model returns the same one again"),
        ("MODELS.pop()", "the model cannot be built again: LoadError"),
    ],
)
def test_what_cannot_be_told_is_said(tmp_path: Path, factory: str, says: str) -> None:
    run = make_run(
        tmp_path,
        f"""
        class Net(nn.Module):
            first = None

            def forward(self, x):
                if self.first is None:
                    self.first = x.mean()
                return x * self.first


        MODEL = Net()
        MODELS = [MODEL]


        def build_model():
            return {factory}


        def calls():
            return [((torch.randn(n, 4),), {{}}) for n in (2, 3)]
        """,
    )
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert any("attribute `first` is new" in note and says in note for note in record["warnings"])


def test_a_new_model_that_refuses_the_call(tmp_path: Path) -> None:
    body = forward("if len(x) == 2:", "    self.first = x.mean()", "return x * self.first")
    stage, error, _ = verdict(net(tmp_path, body), "torch-export")
    assert stage == "observe"
    assert "a newly built model refuses it (AttributeError: 'Net' object has no attribute 'first')" in str(
        error
    )


def test_state_of_one_graph_that_another_reads(tmp_path: Path) -> None:
    body = forward("if len(x) == 2:", "    self.first = x.mean()", "return x * self.first")
    run = net(tmp_path, body, 'observe: {calls: "net.py:calls", graphs: {a: [0], b: [1, 2]}}\n')
    assert verdict(run, "torch-export", graph="a")[0] != "observe"
    stage, error, _ = verdict(run, "torch-export", graph="b")
    assert stage == "observe"
    assert "call 1 (b) depends on the calls before it" in str(error)


def rope(tmp_path: Path, *lengths: int) -> SpecRun:
    """A llama whose rotary frequencies grow with the longest sequence seen."""
    calls = "\n".join(f'    - forward: {{input_ids: "int64[2, {n}] < 64"}}' for n in lengths)
    (tmp_path / "rope.yaml").write_text(
        f"""exportcheck: 1
model:
  type: llama
  config:
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
    vocab_size: 64
    max_position_embeddings: 16
    initializer_range: 0.3
    rope_parameters: {{rope_type: dynamic, rope_theta: 10000.0, factor: 2.0}}
observe:
  calls:
{calls}
""",
        encoding="utf-8",
    )
    return SpecRun(load_spec(tmp_path / "rope.yaml", tmp_path))


def test_frequencies_that_every_call_makes_for_its_own_length(tmp_path: Path) -> None:
    graph = rope(tmp_path, 5, 20, 30).observe("cpu", "float32").graph(None)
    assert graph.shapes.warnings == []


def test_frequencies_of_a_longer_sequence_before(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match=r"answer to call 1 depends on the calls before it.*inv_freq"):
        rope(tmp_path, 30, 20).observe("cpu", "float32")


def test_gradients_that_a_call_writes_are_eagers(tmp_path: Path) -> None:
    """A trace of it leaves fake tensors in the parameters, which no later call could compute with."""
    run = net(
        tmp_path,
        init("self.weight = nn.Parameter(torch.ones(4))")
        + forward(
            "old = self.weight.grad",
            "self.weight.grad = torch.ones(4) if old is None else old.clone()",
            "self.weight.grad.add_(x.shape[1])",
            "return x * 2",
        ),
    )
    note = "gradient of parameter `weight` changed from ["
    for exporter in ("torch-export", "onnx-dynamo", "torch-export"):
        _, error, record = verdict(run, exporter)
        assert record["warnings"][0].startswith(note)
        assert "in place" not in str(error)
        model = run.model("cpu", "float32")
        assert type(model.weight.grad) is torch.Tensor
        assert run.observe("cpu", "float32").model is model, "no new model was needed"
