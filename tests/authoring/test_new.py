"""First specs end to end: they are observed, load, and come out the same again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pytest_exportcheck.authoring.bulk import draft_all, file_name, summary
from pytest_exportcheck.authoring.fit import PARAMETERS, fitted, model_classes
from pytest_exportcheck.authoring.known import Unknown
from pytest_exportcheck.authoring.new import NO_CLASS, Draft, draft
from pytest_exportcheck.cli import main
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import parse_spec

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("model_type", "auto_class", "in_text"),
    [
        ("llama", "AutoModelForCausalLM", ["generate:", "padded left 2", "cache.layers.*.keys"]),
        ("bert", "AutoModelForMaskedLM", ["forward:", "padded right 2"]),
        ("t5", "AutoModelForSeq2SeqLM", ["generate:", "graphs:", "batch_dims: true"]),
        ("vit", "AutoModelForImageClassification", ["pixel_values: float32[2, 3, 32, 32]"]),
        # Two sizes of images that no call shows to be one.
        ("resnet", "AutoModelForImageClassification", ["pixel_values: float32[2, 3, 64, 128]"]),
        ("wav2vec2", "AutoModelForCTC", ["input_values: float32[3, 4800]"]),
        ("clip", "AutoModelForZeroShotImageClassification", ["input_ids: int64[2, 9]", "float32[4, 3"]),
        ("llava", "AutoModelForImageTextToText", ["generate:", "values [["]),
        ("mamba", "AutoModelForCausalLM", ["generate:"]),
        ("qwen2_vl", "AutoModelForImageTextToText", ["image_grid_thw", "mm_token_type_ids"]),
        # Its position_ids have the batch in their second axis.
        ("qwen2_5_vl", "AutoModelForImageTextToText", ["mm_token_type_ids", "prefill: [0, 3]"]),
    ],
)
def test_a_model_type(tmp_path: Path, model_type: str, auto_class: str, in_text: list[str]) -> None:
    path = tmp_path / "spec.yaml"
    made = draft(model_type, path)
    assert made.observed, made.problems
    assert made.text is not None
    spec = parse_spec(made.text, path)
    assert spec.model.auto_class == auto_class
    for part in in_text:
        assert part in made.text
    model = SpecRun(spec).model("cpu", "float32")
    assert sum(parameter.numel() for parameter in model.parameters()) <= PARAMETERS


def test_the_text_is_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    assert draft("gpt2", path).text == draft("gpt2", path).text


def test_a_value_that_the_model_refuses_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_exportcheck.authoring import fit

    # Five heads do not divide the width; the twelve of the default do.
    monkeypatch.setattr(fit, "reduced", lambda config: {"hidden_size": 36, "num_attention_heads": 5})
    assert fitted("bert", "AutoModelForMaskedLM") == {"hidden_size": 36}


def test_no_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_exportcheck.authoring import fit

    monkeypatch.setattr(fit, "reduced", lambda config: {})
    with pytest.raises(Unknown, match=r"[\d,]+ parameters are left"):
        fitted("bert", "AutoModelForMaskedLM")


def test_a_part_of_another_configuration_has_no_model(tmp_path: Path) -> None:
    assert model_classes("aimv2_text_model") == []
    made = draft("aimv2_text_model", tmp_path / "spec.yaml")
    assert (made.text, made.builds, made.observed) == (None, False, False)
    assert "no model class" in made.problems[0]


FACTORY = """
import torch

class Net(torch.nn.Module):
    def forward(self, input_ids):
        return torch.nn.functional.one_hot(input_ids, 128).float().mean(1)

class Other(torch.nn.Module):
    def forward(self, x, scale=2.0):
        return x * scale

def build():
    return Net()

def other():
    return Other()
"""


def test_a_factory_next_to_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "nets.py").write_text(FACTORY)
    assert main(["new", "made/nets.py:build"]) == 0
    assert "factory: nets.py:build" in (tmp_path / "made" / "nets_build.yaml").read_text()
    capsys.readouterr()
    assert main(["new", "made/nets.py:build"]) == 2
    assert "nets_build.yaml exists" in capsys.readouterr().err
    assert main(["new", "made/nets.py:build", "--force"]) == 0
    # Nothing is known of x: a spec to fill in.
    assert main(["new", "made/nets.py:other"]) == 1
    text = (tmp_path / "made" / "nets_other.yaml").read_text()
    assert text.startswith("# nothing is known of the arguments of forward: x, scale.\n")
    assert "x: float32[2, 4]" in text
    assert "scale" not in text.partition("exportcheck: 1")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "berrt"], "'berrt' is no model type"),
        (["new", "berrt"], "did you mean 'bert'?"),
        (["new"], "give a SOURCE, or --all DIR"),
        (["new", "bert", "--all", "x"], "give a SOURCE, or --all DIR"),
        (["new", "bert", "-o", "no/such/folder/x.yaml"], "No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_many_at_a_time(tmp_path: Path) -> None:
    made = {each.name: each for each in draft_all(["gpt2", "aimv2_text_model", "vit"], tmp_path, 2, 300)}
    assert {name: each.observed for name, each in made.items()} == {
        "gpt2": True, "aimv2_text_model": False, "vit": True,
    }  # fmt: skip
    lines = summary(list(made.values()))
    assert lines[:3] == [
        "3 model types",
        "    2 give a model that builds",
        "    2 are observed: their spec is written",
    ]
    assert lines[3] == "    1 have no model class: each is a part of another model"


def test_a_summary_has_the_three_most_frequent_reasons_of_each_kind() -> None:
    def failed(name: str, problem: str, builds: bool) -> Draft:
        return Draft(name, builds=builds, problems=[problem, "AutoModel: another"])

    raised = "AutoModel: specs/{}.yaml:8:5: the forward call {} raised: ValueError: {} of '{}'"
    drafts = [
        Draft("a", text="x", builds=True, observed=True, warnings=["w"]),
        Draft("b", problems=[NO_CLASS]),
        *(
            failed(f"c{i}", f"AutoModelForX: ImportError: C{i}Net requires the x library", False)
            for i in (1, 2)
        ),
        failed("d", "AutoModel: 27,000,000 parameters are left", False),
        *(failed(f"e{i}", raised.format(f"e{i}", i, i, i), True) for i in (1, 2, 3)),
        *(failed(f"f{i}", f"AutoModel: {what}", True) for i, what in enumerate("pqr")),
    ]
    assert summary(drafts) == [
        "11 model types",
        "    7 give a model that builds",
        "    1 are observed: their spec is written",
        "    1 of these with warnings",
        "    1 have no model class: each is a part of another model",
        "    3 not built",
        "          2 ImportError: _ requires the x library",
        "          1 _ parameters are left",
        "    6 built, not observed",
        "          3 a call raised ValueError: _ of _",
        "          1 p",
        "          1 q",
        "          1 for other reasons",
    ]


def test_new_says_where_it_wrote_and_what_the_observation_warns_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from pytest_exportcheck.authoring import bulk, new

    made = Draft("gpt2", text="exportcheck: 1\n", builds=True, observed=True, warnings=["one", "two"])
    monkeypatch.setattr(new, "draft", lambda *given: made)
    monkeypatch.setattr(bulk, "draft", lambda *given: made)
    spec = tmp_path / "gpt2.yaml"
    assert main(["new", "gpt2", "-o", str(spec)]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"{spec}: warning: one", f"{spec}: warning: two"]
    assert said.out.splitlines() == [
        f"{spec}: its calls are observed; next: pytest --exportcheck {spec} --update-shapes",
        "what fails there is a finding about the export; docs/failures.md explains each stage",
    ]
    assert main(["new", "--all", str(tmp_path / "all"), "--type", "gpt2"]) == 0
    said = capsys.readouterr()
    written = tmp_path / "all" / "gpt2.yaml"
    assert f"gpt2: observed, 2 warnings: {written}" in said.out.splitlines()
    assert written.read_text() == made.text
    table = tmp_path / "all" / "new.json"
    assert said.out.splitlines()[-1] == f"{table}: every type with its reasons and warnings"
    assert json.loads(table.read_text())[0]["warnings"] == ["one", "two"]


def test_a_draft_holds_what_the_observation_warns_of(tmp_path: Path) -> None:
    # Its decoder replaces the cache that it is given.
    made = draft("bert-generation", tmp_path / "spec.yaml")
    assert made.observed, made.problems
    assert made.text is not None
    run = SpecRun(parse_spec(made.text, tmp_path / "spec.yaml"))
    graphs = run.observe("cpu", "float32").graphs.values()
    run.close()
    assert made.warnings == [warning for graph in graphs for warning in graph.shapes.warnings] != []


def test_one_that_takes_too_long_or_crashes_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import faulthandler
    import os
    import time

    from pytest_exportcheck.authoring import bulk

    def odd(name: str, path: Path) -> Draft:
        if name == "hangs":
            time.sleep(60)
        if name == "crashes":
            faulthandler.disable()
            os.abort()
        if name == "raises":
            raise RuntimeError("oh")
        return Draft(name, text="x", builds=True, observed=True)

    monkeypatch.setattr(bulk, "draft", odd)
    made = {each.name: each for each in draft_all(["hangs", "crashes", "raises", "fine"], tmp_path, 4, 3)}
    assert made["fine"].observed
    assert made["hangs"].problems == ["took longer than 3 s"]
    assert made["crashes"].problems == ["the process ended with -6"]
    assert made["raises"].problems == ["RuntimeError: oh"]


def test_names_of_files() -> None:
    names = {
        "gpt-sw3": "gpt_sw3.yaml",
        "pkg.nets:build": "nets_build.yaml",
        "made/nets.py:build": "nets_build.yaml",
        "made/tagger.py:build": "tagger_build.yaml",
        "tagger.py:Tagger": "Tagger.yaml",
        "tagger.py:build_tagger": "build_tagger.yaml",
        "my-nets.py:Net.small": "my_nets_Net_small.yaml",
    }
    assert {source: file_name(source) for source in names} == names


STATEFUL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x, kv_cache=None, h0=None, use_cache=None, statement=None):
        return self.lin(x)

def build():
    return Net()
"""


def test_states_that_are_left_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(STATEFUL)
    assert main(["new", "nets.py:build"]) == 0
    first = (tmp_path / "nets_build.yaml").read_text().splitlines()[0]
    assert first == (
        "# Left out, as None is the default: kv_cache, h0. What a call returns can be given to the next one: "
        "`kv_cache: previous.FIELD`."
    )


NETS = """
import torch
from torch import Tensor, nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 5)
    def forward(self, input_ids, attention_mask=None):
        x = self.out(self.embed(input_ids))
        return x if attention_mask is None else x * attention_mask[..., None]

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item, self.out = nn.Embedding(30, 8), nn.Embedding(12, 8), nn.Linear(14, 1)
    def forward(self, user_ids: Tensor, item_ids: Tensor, features: Tensor, scale: float):
        return self.out(torch.cat([self.user(user_ids) * self.item(item_ids), features], -1)) * scale

class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 6, 5), nn.Linear(6 * 12 * 12, 10)
    def forward(self, x):
        return self.out(torch.max_pool2d(self.conv(x / 255), 2).flatten(1))

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, 8), nn.Embedding(8, 8)
    def forward(self, idx, targets=None):
        return self.tokens(idx) + self.places(torch.arange(idx.shape[1]))

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.rnn = nn.Linear(6, 6), nn.GRU(6, 4)
    def forward(self, x, mask: torch.BoolTensor):
        return self.rnn(self.out(x))[0].masked_fill(mask.mT[..., None], 0.0)

class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.time = nn.Conv2d(4, 4, 3), nn.Linear(1, 4)
    def forward(self, sample, timestep):
        return self.conv(sample) + self.time(timestep[:, None])[:, :, None, None]

class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(50, 8), nn.Embedding(40, 8)
    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: torch.BoolTensor):
        own = self.target(tgt) * tgt_mask[..., None]
        return own @ self.source(src).transpose(1, 2)

class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(10, 4)
    def forward(self, batch: dict[str, Tensor]):
        return self.out(batch["x"])

class Never(Mapped):
    def forward(self, x):
        raise ValueError("not today")
"""


def drafted(tmp_path: Path, name: str) -> Draft:
    (tmp_path / "nets.py").write_text(NETS)
    return draft(f"{tmp_path / 'nets.py'}:{name}", tmp_path / "spec.yaml")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("Tagger", {"input_ids": "int64[2, 9] in 3..50", "attention_mask": "int64[2, 9] padded right 2"}),
        (
            "Two",
            {
                "user_ids": "int64[2, 9] < 30",
                "item_ids": "int64[2, 9] < 12",
                "features": "float32[2, 9, 6]",
                "scale": 0.5,
            },
        ),
        (
            "Translator",
            {"src": "int64[2, 5] < 50", "tgt": "int64[2, 9] < 40", "tgt_mask": "bool[2, 9] = true"},
        ),
        ("Digits", {"x": "float32[2, 1, 28, 28]"}),
        ("Text", {"idx": "int64[2, 4] < 65"}),
        ("Recurrent", {"x": "float32[9, 2, 6]", "mask": "bool[2, 9] = true"}),
        ("Timed", {"sample": "float32[2, 4, 32, 48]", "timestep": "float32[2]"}),
    ],
)
def test_calls_of_a_factory_by_its_layers(tmp_path: Path, name: str, first: dict[str, object]) -> None:
    made = drafted(tmp_path, name)
    assert made.observed, made.problems
    assert made.text is not None
    calls = yaml.safe_load(made.text)["observe"]["calls"]
    assert calls[0]["forward"] == first
    assert calls[1]["forward"].keys() == first.keys()
    assert calls[1] != calls[0]


def test_a_draft_of_a_source_and_a_target_gives_them_lengths_of_their_own(tmp_path: Path) -> None:
    made = drafted(tmp_path, "Translator")
    assert made.text is not None
    run = SpecRun(parse_spec(made.text, tmp_path / "spec.yaml"))
    (graph,) = run.observe("cpu", "float32").graphs.values()
    run.close()
    assert graph.shapes.warnings == []
    dims = {leaf.path: str(leaf.dims[1]) for leaf in graph.shapes.tensors()}
    assert dims["src"] != dims["tgt"] == dims["tgt_mask"]


@pytest.mark.parametrize("model_type", ["wav2vec2", "whisper"])
def test_a_draft_for_audio_warns_of_nothing(tmp_path: Path, model_type: str) -> None:
    """A mask of samples is as long as they are; of a model that hears, not its decoder alone is drafted."""
    made = draft(model_type, tmp_path / "spec.yaml")
    assert made.observed, made.problems
    assert made.text is not None
    assert "input_values" in made.text or "input_features" in made.text
    run = SpecRun(parse_spec(made.text, tmp_path / "spec.yaml"))
    graphs = run.observe("cpu", "float32").graphs.values()
    assert [warning for graph in graphs for warning in graph.shapes.warnings] == []
    run.close()


def test_an_input_without_a_batch_keeps_a_draft_from_calling_it_one(tmp_path: Path) -> None:
    made = drafted(tmp_path, "Recurrent")
    assert made.text is not None
    assert "batch_dims" not in made.text


@pytest.mark.parametrize(
    ("name", "problem", "argument"),
    [
        ("Mapped", "nothing is known of the arguments of forward: batch", "batch: float32[2, 4]"),
        (
            "Never",
            "forward takes none of the calls that were tried: ValueError: not today",
            "x: float32[2, 10]",
        ),
    ],
)
def test_a_factory_whose_calls_are_not_found(tmp_path: Path, name: str, problem: str, argument: str) -> None:
    made = drafted(tmp_path, name)
    assert not made.observed
    assert made.problems[0].endswith(problem)
    assert made.text is not None
    assert made.text.startswith(f"# {problem}.\n")
    assert argument in made.text
