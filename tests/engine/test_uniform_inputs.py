"""Inputs with one value throughout each call: the program must follow eager where one of them differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_exportcheck import pipeline
from pytest_exportcheck.checks import uniform

from .capture_runs import Runs
from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

PROGRAMS = ("torch-export", "onnx-dynamo")

NET = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.table = nn.Embedding(2, 4)

        def wrong(self, x, given):
            {wrong}

        def right(self, x, given):
            {right}

        def forward(self, x, given):
            if torch.compiler.is_compiling():
                return self.wrong(x, given)
            return self.right(x, given)


    def attend(x, seen):
        scores = x @ x.transpose(1, 2) / 2
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) @ x


    def causal(x):
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


    def build_model():
        torch.manual_seed(0)
        return Net().eval()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, m, 4, generator=g), {given}), {{}}) for n, m in ((2, 7), (4, 9))]
"""

ONES = "torch.ones(n, m, dtype=torch.int64)"
LENGTHS = "torch.full((n,), m)"
TYPES = "torch.zeros(n, m, dtype=torch.int64)"

BY_LENGTH = "return self.lin(x) * (torch.arange(x.shape[1]) < given[:, None]).unsqueeze(-1)"
BIDIRECTIONAL = "return attend(self.lin(x), given.bool()[:, None, :])"
CAUSAL = "return attend(self.lin(x), given.bool()[:, None, :] & causal(x))"


def net(right: str, given: str, wrong: str | None = None) -> str:
    bodies = {"right": right, "wrong": right if wrong is None else wrong}
    lines = {name: ("\n" + " " * 12).join(body.splitlines()) for name, body in bodies.items()}
    return NET.format(given=given, **lines)


#: Of wrong programs: (eager, what is exported, the input, the value that shows it).
WRONG = {
    "first of the lengths": (
        BY_LENGTH,
        BY_LENGTH.replace("given[:, None]", "given[:1, None].expand(x.shape[0], 1)"),
        LENGTHS,
        "given[1] = 6",
    ),
    "last of the lengths": (
        BY_LENGTH,
        BY_LENGTH.replace("given[:, None]", "given[-1:, None].expand(x.shape[0], 1)"),
        LENGTHS,
        "given[1] = 6",
    ),
    "first column, by position": (
        "return self.lin(x * given.unsqueeze(-1))",
        "return self.lin(x * given[:, :1].unsqueeze(-1))",
        ONES,
        "given[0, 6] = 0",
    ),
    "last column": (
        "return self.lin(x * given.unsqueeze(-1))",
        "return self.lin(x * given[:, -1:].unsqueeze(-1))",
        ONES,
        "given[0, 6] = 0",
    ),
    "first row of a mask of attention": (
        BIDIRECTIONAL,
        BIDIRECTIONAL.replace("given.bool()", "given[:1].bool()"),
        ONES,
        "given[0, 6] = 0",
    ),
    "nothing of a mask of attention": (
        BIDIRECTIONAL,
        "return attend(self.lin(x), (given | 1).bool()[:, None, :])",
        ONES,
        "given[0, 6] = 0",
    ),
    "nothing of a causal mask": (
        CAUSAL,
        CAUSAL.replace("given.bool()", "(given | 1).bool()"),
        ONES,
        "given[1, 1] = 0",
    ),
    "0 times a mask of floats": (
        "return self.lin(x * given.unsqueeze(-1)).mean(1)",
        "return self.lin(x).mean(1) + 0 * given.sum()",
        "torch.ones(n, m)",
        "given[0, 6] = 0.0",
    ),
    "any of a mask of booleans": (
        "return self.lin(x).masked_fill(~given.unsqueeze(-1), 0).sum(1)",
        "return self.lin(x).masked_fill(~given.any(), 0).sum(1)",
        "torch.ones(n, m, dtype=torch.bool)",
        "given[0, 6] = False",
    ),
    "nothing of where padding is": (
        "return attend(self.lin(x), ~given[:, None, :])",
        "return attend(self.lin(x), ~(given & False)[:, None, :])",
        "torch.zeros(n, m, dtype=torch.bool)",
        "given[0, 6] = True",
    ),
    "first token type": (
        "return self.lin(x + self.table(given))",
        "return self.lin(x + self.table(given[:, :1]))",
        TYPES,
        "given[0, 6] = 1",
    ),
    "first of the times": (
        "return self.lin(x) * torch.sin(given)[:, None, None]",
        "return self.lin(x) * torch.sin(given[:1])[:, None, None]",
        "torch.full((n,), 3.0)",
        "given[1] = 2.25",
    ),
    "first of the additions to scores": (
        "return (x @ x.transpose(1, 2) + given).softmax(-1)",
        "return (x @ x.transpose(1, 2) + given[:, :1, :1]).softmax(-1)",
        "torch.zeros(n, m, m)",
        "given[0, 6, 6] = 0.25",
    ),
    "a factor that is one number": (
        "return self.lin(x) * given",
        "return self.lin(x) + 0 * given",
        "torch.tensor(1.0)",
        "given = 0.75",
    ),
}


#: The same of inputs that are equal along an axis alone; the last is what is said of it.
PARTLY_WRONG = {
    "first row of positions": (
        "return self.lin(x) + torch.sin(given).unsqueeze(-1)",
        "return self.lin(x) + torch.sin(given[:1]).unsqueeze(-1)",
        "torch.arange(m).expand(n, m)",
        "given[0, 0:7] = 1, 2, 3, 4, ...",
        "given varies along axis 0",
    ),
    "first row of a mask with the same padding in all": (
        BIDIRECTIONAL,
        BIDIRECTIONAL.replace("given.bool()", "given[:1].bool()"),
        "(torch.arange(m) < m - 2).long().repeat(n, 1)",
        "given[0, 6] = 1",
        "given varies along axis 0",
    ),
    "first column of a factor": (
        "return self.lin(x * given.unsqueeze(-1))",
        "return self.lin(x * given[:, :1].unsqueeze(-1))",
        "(torch.arange(n) + 2.0).unsqueeze(1).repeat(1, m)",
        "given[0, 6] = ",
        "given varies along axis 1",
    ),
}


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("what", PARTLY_WRONG)
def test_a_program_that_reads_one_of_equal_rows_fails_at_compare(
    what: str, exporter: str, tmp_path: Path
) -> None:
    right, wrong, given, tried, said = PARTLY_WRONG[what]
    for name, body in (("right", right), ("wrong", wrong)):
        (tmp_path / name).mkdir()
        stage, error, record = verdict(make_run(tmp_path / name, net(right, given, body)), exporter)
        (entry,) = record["uniform_inputs"]
        assert entry["values"] == "equal along axis " + said[-1]
        assert entry["tried"].startswith(tried)
        if name == "right":
            assert stage == "pass", error
            assert entry["result"] == "agrees"
        else:
            assert stage == "compare", error
            assert error is not None
            assert error.message.startswith(f"the program does not follow eager where {said} (in no ")


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("what", WRONG)
def test_a_program_that_reads_a_part_fails_at_compare(what: str, exporter: str, tmp_path: Path) -> None:
    right, wrong, given, tried = WRONG[what]
    stage, error, record = verdict(make_run(tmp_path, net(right, given, wrong)), exporter)
    assert stage == "compare", (error, record.get("uniform_inputs"))
    assert error is not None
    assert error.message.startswith(
        "the program does not follow eager where not all values of given are equal"
    )
    assert "(in every observed call they are: " in error.message
    assert f" with {tried} in call 1 of 2" in error.message
    assert uniform.is_uniform(error.message)
    assert any(line.startswith("output ") and "FAIL" in line for line in error.details)
    assert any("torch.compiler.is_compiling" in line for line in error.details)
    assert any("leave given out of the calls" in line for line in error.details)
    (entry,) = record["uniform_inputs"]
    assert (entry["path"], entry["tried"], entry["result"]) == ("given", tried, "differs")
    if exporter == "onnx-dynamo":
        assert any(line.startswith("the captured program is wrong too") for line in error.details)


def test_what_torchscript_keeps_of_a_part_fails_too(tmp_path: Path) -> None:
    right, wrong, given, tried = WRONG["first of the lengths"]
    source = net(right, given, wrong).replace("torch.compiler.is_compiling()", "torch.jit.is_tracing()")
    stage, error, record = verdict(make_run(tmp_path, source), "onnx-torchscript")
    assert stage == "compare", error
    assert record["uniform_inputs"][0]["tried"] == tried


#: Of right programs: (the model, the input, what is known then).
RIGHT = {
    "lengths": (BY_LENGTH, LENGTHS, "agrees"),
    "by position": ("return self.lin(x * given.unsqueeze(-1))", ONES, "agrees"),
    "padding on the right": (BIDIRECTIONAL, ONES, "agrees"),
    "a causal mask": (CAUSAL, ONES, "agrees"),
    "padding on the left": (
        "places = (given.cumsum(1) - 1).clamp(min=0)\n"
        "return attend(self.lin(x) + places.unsqueeze(-1), given.bool()[:, None, :] & causal(x))",
        ONES,
        "agrees",
    ),
    "the last token": (
        "at = given.sum(1) - 1\nreturn self.lin(x)[torch.arange(x.shape[0]), at]",
        ONES,
        "agrees",
    ),
    "positions": ("return self.lin(x) + torch.sin(given.float()).unsqueeze(-1)", TYPES, "agrees"),
    "segments": (
        "return attend(self.lin(x), given[:, :, None] == given[:, None, :])",
        "torch.full((n, m), 3)",
        "agrees",
    ),
    "token types": ("return self.lin(x + self.table(given))", TYPES, "agrees"),
    "a number": ("return self.lin(x) * given", "torch.tensor(2.5)", "agrees"),
    "a whole number": ("return self.lin(x) * given", "torch.tensor(3)", "agrees"),
    "a mean": (
        "return (self.lin(x) * given.unsqueeze(-1)).sum(1) / given.sum(1, keepdim=True)",
        ONES,
        "agrees",
    ),
    "minus infinity": (
        "return self.lin(x).sum(-1).masked_fill(given == 0, float('-inf'))",
        ONES,
        "agrees",
    ),
    "no effect": ("return self.lin(x) + (given == 77).sum()", ONES, "no effect"),
    "rows of positions": (
        "return self.lin(x) + torch.sin(given).unsqueeze(-1)",
        "torch.arange(m).repeat(n, 1)",
        "agrees",
    ),
    "rows of which the first is read": (
        "return self.lin(x) + torch.sin(given[:1]).unsqueeze(-1)",
        "torch.arange(m).repeat(n, 1)",
        "agrees",
    ),
    "strides": (
        "return self.lin(x) * (given.sum(1) // 3)[:, None, None]",
        "torch.ones(n, 3 * m, dtype=torch.int64)",
        "agrees",
    ),
}


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("what", RIGHT)
def test_a_program_that_follows_passes(what: str, exporter: str, tmp_path: Path) -> None:
    body, given, result = RIGHT[what]
    stage, error, record = verdict(make_run(tmp_path, net(body, given)), exporter)
    assert stage == "pass", error
    (entry,) = record["uniform_inputs"]
    assert entry["result"] == result, entry
    assert "not_judged" not in entry


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize(
    ("body", "given", "why"),
    [
        (
            "if not torch.compiler.is_compiling() and not bool((given == 1).all()):\n"
            "    raise ValueError('ones, please')\n"
            "return self.lin(x) + 0 * given.sum()",
            ONES,
            "given[0, 6] = 0: eager refuses it (ValueError: ones, please)",
        ),
        (
            "if not torch.compiler.is_compiling() and not bool((given == 1).all()):\n"
            "    raise SystemExit('ones, please')\n"
            "return self.lin(x) + 0 * given.sum()",
            ONES,
            "given[0, 6] = 0: eager refuses it (SystemExit: ones, please)",
        ),
        (
            "if torch.compiler.is_compiling():\n    return self.lin(x) + 0 * given.sum()\n"
            "return self.lin(x) + 0 / given.min()",
            ONES,
            "given[0, 6] = 0: eager answers NaN",
        ),
        (
            "table = self.table.weight[:1]\n"
            "if torch.compiler.is_compiling():\n    return self.lin(x) + 0 * given.sum()\n"
            "return self.lin(x) + 0 * nn.functional.embedding(given, table)",
            TYPES,
            "given[0, 6] = 1: eager refuses it (IndexError",
        ),
        (
            "if torch.compiler.is_compiling():\n    return self.lin(x) + 0 * given.sum()\n"
            "return self.lin(x) * given.unsqueeze(-1)",
            "torch.ones(n, 1, dtype=torch.int64)",
            "there is no other value that is safe",
        ),
        (
            "return self.lin(x)[:, :given.max()] if not torch.compiler.is_compiling() "
            "else self.lin(x) + 0 * given.sum()",
            "torch.tensor([7])",
            "there is no other value that is safe",
        ),
    ],
)
def test_what_eager_does_not_answer_is_not_judged(
    body: str, given: str, why: str, exporter: str, tmp_path: Path
) -> None:
    if "torch.tensor([7])" in given:
        body_calls = net(body, given).replace("((2, 7), (4, 9))", "((2, 7), (4, 7))")
    else:
        body_calls = net(body, given)
    stage, error, record = verdict(make_run(tmp_path, body_calls), exporter)
    assert stage == "pass", error
    (entry,) = record["uniform_inputs"]
    assert entry["not_judged"].startswith(why)
    assert "result" not in entry


def test_a_program_that_refuses_other_values_is_right_for_those_it_takes(tmp_path: Path) -> None:
    wrong = "torch._assert_async((given == 1).all())\nreturn self.lin(x) + 0 * given.sum()"
    run = make_run(tmp_path, net("return self.lin(x) * given.unsqueeze(-1)", ONES, wrong))
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    (entry,) = record["uniform_inputs"]
    assert "the program refuses it" in entry["not_judged"]


#: Eager has zeros at hidden positions, as kernels for padded batches leave them; the program has numbers.
ZEROS = "return {} * (1 if torch.compiler.is_compiling() else given.unsqueeze(-1))"


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("attention", [BIDIRECTIONAL, CAUSAL])
def test_what_is_at_hidden_positions_does_not_count_where_the_mask_shows_elsewhere(
    attention: str, exporter: str, tmp_path: Path
) -> None:
    body = ZEROS.format(attention.removeprefix("return "))
    stage, error, record = verdict(make_run(tmp_path, net(body, ONES)), exporter)
    assert stage == "pass", error
    (entry,) = record["uniform_inputs"]
    assert entry["result"] == "agrees elsewhere"
    assert entry["tried"] == ("given[0, 6] = 0" if attention == BIDIRECTIONAL else "given[1, 1] = 0")
    assert any("but for what is where that hides a position" in line for line in record["warnings"])


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_where_nothing_but_the_hidden_position_shows_a_mask_the_message_says_so(
    exporter: str, tmp_path: Path
) -> None:
    source = net("return self.lin(x) * given.unsqueeze(-1)", ONES, "return self.lin(x) + 0 * given[0, 0]")
    stage, error, _ = verdict(make_run(tmp_path, source), exporter)
    assert stage == "compare"
    said = "\n".join(error.details)
    assert "only the position that this hides differs, and nothing else shows given" in said
    assert "a row or column" not in said
    rule = "compare: {output: {where: given}}"
    assert rule in said
    folder = tmp_path / "compared"
    folder.mkdir()
    stage, error, _ = verdict(make_run(folder, source, f"{rule}\n"), exporter)
    assert stage == "pass", error


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("asks", [True, False])
def test_an_input_that_is_expanded_is_not_changed_where_the_model_asks_how_it_lies(
    asks: bool, exporter: str, tmp_path: Path
) -> None:
    right = "return self.lin(x) * given[..., None] + (given.stride(0) == 0)" if asks else BIDIRECTIONAL
    source = net(right, "torch.ones(1, 1).expand(n, m)")
    stage, error, record = verdict(make_run(tmp_path, source), exporter)
    assert stage == "pass", error
    (entry,) = record["uniform_inputs"]
    assert entry.get("result") == (None if asks else "agrees")
    assert ("one in memory" in entry.get("not_judged", "")) is asks


ENCODER = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x, given):
            if {wrong} and torch.compiler.is_compiling():
                given = torch.zeros_like(given) + 0 * given[:1]
            return self.layers(x, src_key_padding_mask=given)


    def build_model():
        torch.manual_seed(0)
        return Net().eval()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, m, 4, generator=g), {given}), {{}}) for n, m in ((2, 7), (4, 9))]
"""


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_an_encoder_of_torch_that_computes_only_what_is_not_hidden(exporter: str, tmp_path: Path) -> None:
    """Its fast path, which no program has: zeros at hidden positions, and any float but 0 hides one."""
    for name, given, tried in (
        ("flags", "torch.zeros(n, m, dtype=torch.bool)", "given[0, 6] = True"),
        ("floats", "torch.zeros(n, m)", "given[0, 6] = -inf"),
    ):
        (tmp_path / name).mkdir()
        run = make_run(tmp_path / name, ENCODER.format(given=given, wrong=False))
        stage, error, record = verdict(run, exporter)
        assert stage == "pass", error
        (entry,) = record["uniform_inputs"]
        assert (entry["tried"], entry["result"]) == (tried, "agrees elsewhere")


def test_an_encoder_of_torch_without_its_mask(tmp_path: Path) -> None:
    run = make_run(tmp_path, ENCODER.format(given="torch.zeros(n, m)", wrong=True))
    stage, error, record = verdict(run, "torch-export")
    assert stage == "compare", error
    assert record["uniform_inputs"][0]["tried"] == "given[0, 6] = 0.25"


def test_only_positions_count_that_the_spec_compares(tmp_path: Path) -> None:
    source = net("return self.lin(x * given.unsqueeze(-1))", ONES, "return self.lin(x) + 0 * given.sum()")
    run = make_run(tmp_path, source, "compare: {output: {where: given}}\n")
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert record["uniform_inputs"][0]["result"] == "no effect"


def test_an_input_that_varies_is_not_asked(tmp_path: Path) -> None:
    given = "torch.arange(n * m).reshape(n, m) % 5"
    stage, error, record = verdict(
        make_run(tmp_path, net("return self.lin(x) * given.unsqueeze(-1)", given)), "torch-export"
    )
    assert stage == "pass", error
    assert "uniform_inputs" not in record


def test_single_values_that_differ_from_call_to_call_have_shown_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, net("return self.lin(x) * given", "torch.tensor(float(n))"))
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert "uniform_inputs" not in record


def test_what_a_changed_value_leaves_in_the_model_stays_in_a_copy(tmp_path: Path) -> None:
    body = (
        "if not torch.compiler.is_compiling():\n"
        "    self.least = min(getattr(self, 'least', 9), int(given.min()))\n"
        "return self.lin(x) * given.unsqueeze(-1)"
    )
    run = make_run(tmp_path, net(body, ONES))
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert record["uniform_inputs"][0]["result"] == "agrees"
    assert run.model("cpu", "float32").least == 1


def test_no_more_inputs_than_six_are_changed(tmp_path: Path) -> None:
    text = """
    class Net(nn.Module):
        def forward(self, x, masks):
            return x * torch.stack(masks).prod(0)


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(n, 3), [torch.ones(n, 3) for _ in range(8)]), {}) for n in (2, 4)]
    """
    stage, error, record = verdict(make_run(tmp_path, text), "torch-export")
    assert stage == "pass", error
    entries = record["uniform_inputs"]
    assert [entry.get("result") for entry in entries] == ["agrees"] * 6 + [None] * 2
    assert entries[7] == {
        "path": "masks.7",
        "values": "1.0",
        "not_judged": "no more than 6 inputs are changed",
    }


def test_eager_and_the_program_are_run_once_for_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    judge = uniform._Question._one

    def count(self: Any, *rest: Any) -> Any:
        asked.append(self.uniform.path)
        return judge(self, *rest)

    monkeypatch.setattr(uniform._Question, "_one", count)
    assert verdict(make_run(tmp_path, net(CAUSAL, ONES)), "torch-export")[0] == "pass"
    assert asked == ["given"]


@pytest.mark.parametrize(("exporter", "kept"), [("torch-export", "capture"), ("onnx-dynamo", "conversion")])
def test_a_program_from_the_cache_is_asked_too(
    kept: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are the check, whoever made the program."""
    right, wrong, given, tried = WRONG["nothing of a mask of attention"]
    faulty, good = tmp_path / "faulty", tmp_path / "good"
    for folder, body in ((faulty, wrong), (good, right)):
        folder.mkdir()
        runs = Runs(folder, net(right, given, body))
        with monkeypatch.context() as before:
            # As a version without this check has kept it.
            before.setattr(pipeline, "check_uniform_inputs", lambda *rest: None)
            assert runs(exporter)[kept] == "new"
        monkeypatch.setattr(pipeline, "_run_anew", _not_again)
        stage, error, record = runs.judge(exporter)
        monkeypatch.undo()
        assert record[kept] == "cached"
        (entry,) = record["uniform_inputs"]
        assert (entry["tried"], entry["result"]) == (tried, "differs" if folder == faulty else "agrees")
        assert stage == ("compare" if folder == faulty else "pass"), error


def _not_again(run: Any, case: Any, stages: Any, record: Any, failure: Any) -> None:
    raise failure
