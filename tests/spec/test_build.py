"""Models: transformers types, folders, packages, factories; and how each of them fails."""

from __future__ import annotations

import random
import socket
import sys

import numpy as np
import pytest
import torch

from pytest_exportcheck.errors import LoadError
from pytest_exportcheck.spec import build_model, missing_requirements

from .conftest import TINY_LLAMA

FACTORY = """
import random

import numpy as np
import torch


class Net(torch.nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout()
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.drawn = (random.random(), float(np.random.rand()))

    def forward(self, x):
        return self.drop(self.linear(x)) * self.table


def make(width=2):
    return Net(width)


def pair():
    return Net(), "tokenizer"


def breaks():
    inner()


def inner():
    raise ValueError("no weights\\nsecond line")


def leaves():
    raise SystemExit(3)


def interrupts():
    raise KeyboardInterrupt


number = 3
"""


@pytest.fixture
def factory_spec(spec_of, write):
    write(f_DOT_py=FACTORY)

    def factory_spec(model):
        return spec_of(model=f"model: {model}")

    return factory_spec


def failure(spec, dtype="float32"):
    with pytest.raises(LoadError) as error:
        build_model(spec, "cpu", dtype)
    return error.value


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_a_factory_model_is_ready_to_observe(factory_spec):
    before = states()
    model = build_model(factory_spec('{factory: "f.py:make", kwargs: {width: 3}, seed: 1}'), "cpu", "float32")
    assert states() == before
    assert model.linear.in_features == 3
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_seeds(factory_spec):
    models = [
        build_model(factory_spec(f'{{factory: "f.py:make", seed: {seed}}}'), "cpu", "float32")
        for seed in (1, 1, 2)
    ]
    assert torch.equal(models[0].linear.weight, models[1].linear.weight)
    assert models[0].drawn == models[1].drawn
    assert not torch.equal(models[0].linear.weight, models[2].linear.weight)
    assert models[0].drawn != models[2].drawn


def test_a_factory_model_is_cast_whole(factory_spec):
    model = build_model(factory_spec('{factory: "f.py:make"}'), "cpu", "bfloat16")
    assert {model.linear.weight.dtype, model.table.dtype} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('{factory: "f.py:mke"}', "a.yaml:2: f.py has no 'mke' (did you mean 'make'?)"),
        ('{factory: "ff.py:make"}',
         "a.yaml:2: there is no file ff.py next to the spec (did you mean 'f.py'?)"),
        ('{factory: "f.py:number"}', "a.yaml:2: f.py:number is not callable, it is a int"),
        ('{factory: "f.py:pair"}', "a.yaml:2: f.py:pair returned a tuple, not a torch.nn.Module"),
        ('{factory: "f.py:breaks"}', "a.yaml:2: f.py:breaks raised ValueError: no weights"),
        ('{factory: "f.py:leaves"}', "a.yaml:2: f.py:leaves raised SystemExit: 3"),
        (
            '{factory: "f.py:make", kwargs: {wdth: 1}}',
            "a.yaml:2: f.py:make raised TypeError: make() got an unexpected keyword argument 'wdth'",
        ),
        (
            '{factory: "f:make"}',
            "a.yaml:2: cannot import f: ModuleNotFoundError: No module named 'f' "
            "(for the file next to the spec write f.py:make)",
        ),
        ('{type: lama}', "a.yaml:2: transformers has no model type 'lama' (did you mean 'llama'?)"),
        (
            "{type: llama, auto_class: AutoModelForCausalM}",
            "a.yaml:2: transformers has no model class 'AutoModelForCausalM' "
            "(did you mean 'AutoModelForCausalLM'?)",
        ),
        (
            "{type: llama, config: {hidden_sze: 8}}",
            "a.yaml:2: LlamaConfig does not know 'hidden_sze' (did you mean 'hidden_size'?); "
            "transformers would ignore it",
        ),
        (
            "{type: clip, config: {text_config: {hidden_sze: 8}}}",
            "a.yaml:2: CLIPTextConfig does not know 'hidden_sze' (did you mean 'hidden_size'?); "
            "transformers would ignore it",
        ),
        ("{pretrained: ./absent}", "a.yaml:2: there is no folder ./absent next to the spec"),
        ("{pretrained: 'package:no_such_package/x'}", "a.yaml:2: package 'no_such_package' is not installed"),
        ("{pretrained: 'package:torch/no/such'}", "a.yaml:2: package 'torch' has no folder 'no/such'"),
        ("{pretrained: 'package:torch/../..'}", "a.yaml:2: package 'torch' has no folder '../..'"),
        (
            "{pretrained: 'package:a.b/c'}",
            "a.yaml:2: 'package:a.b/c': expected package:NAME/sub/folder, NAME being a top-level package",
        ),
    ],
)  # fmt: skip
def test_failures(factory_spec, model, message):
    assert failure(factory_spec(model)).message == message


def test_the_users_traceback_is_in_the_details(factory_spec):
    details = failure(factory_spec('{factory: "f.py:breaks"}')).details
    assert details[:2] == ["ValueError: no weights", "second line"]
    assert any("in inner" in line for line in details)
    assert not any("pytest_exportcheck" in line for line in details)


def test_keyboard_interrupt_passes(factory_spec):
    with pytest.raises(KeyboardInterrupt):
        build_model(factory_spec('{factory: "f.py:interrupts"}'), "cpu", "float32")


def test_a_file_that_cannot_be_imported(spec_of, write):
    write(f_DOT_py="import no_such_module\n")
    error = failure(spec_of())
    assert (
        error.message
        == "a.yaml:2: f.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    )
    write(f_DOT_py="def make(:\n")
    assert failure(spec_of()).message.startswith("a.yaml:2: f.py cannot be imported: SyntaxError: ")
    write(f_DOT_py="raise SystemExit('bye')\n")
    assert failure(spec_of()).message == "a.yaml:2: f.py cannot be imported: SystemExit: bye"


def test_files_are_loaded_once_and_again_when_changed(spec_of, write):
    write(f_DOT_py=FACTORY)
    first = type(build_model(spec_of(), "cpu", "float32"))
    assert type(build_model(spec_of(), "cpu", "float32")) is first
    write(f_DOT_py=FACTORY + "\n# changed\n")
    assert type(build_model(spec_of(), "cpu", "float32")) is not first


def test_siblings_of_two_folders_do_not_mix(tmp_path, write):
    from pytest_exportcheck.spec import load_spec

    path = list(sys.path)
    widths = {}
    for name, width in (("one", 3), ("two", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helpers.py").write_text(f"width = {width}\n")
        # One import at the top, one while the factory runs.
        (folder / "f.py").write_text(
            "import helpers\nimport torch\n\n\ndef make():\n    import helpers as again\n\n"
            "    assert again is helpers\n    return torch.nn.Linear(helpers.width, again.width)\n"
        )
        (folder / "a.yaml").write_text(
            'exportcheck: 1\nmodel: {factory: "f.py:make"}\nobserve: {calls: [forward: {}]}\n'
        )
    for name in ("one", "two", "one"):
        model = build_model(load_spec(tmp_path / name / "a.yaml"), "cpu", "float32")
        widths.setdefault(name, set()).add(model.in_features)
    assert widths == {"one": {3}, "two": {5}}
    assert sys.path == path
    assert "helpers" not in sys.modules


def test_a_model_type(spec_of):
    before = states()
    spec = spec_of(TINY_LLAMA)
    model = build_model(spec, "cpu", "float32")
    assert states() == before
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, None)
    assert not model.training
    again = build_model(
        spec_of(TINY_LLAMA.replace("AutoModelForCausalLM", "LlamaForCausalLM")), "cpu", "float16"
    )
    weight, half = model.model.embed_tokens.weight, again.model.embed_tokens.weight
    assert half.dtype is torch.float16
    assert torch.equal(weight.half(), half), "the same weights in every dtype"
    frequencies = again.model.rotary_emb.inv_freq
    assert frequencies.dtype is torch.float32, "as from_pretrained would load it"
    assert again(torch.ones(1, 2, dtype=torch.int64)).logits.dtype is torch.float16
    assert again.lm_head.weight.dtype is torch.float16


def test_attn_implementation_and_old_spellings(spec_of):
    text = TINY_LLAMA.replace("  generation:", "  attn_implementation: eager\n  generation:")
    spec = spec_of(text.replace("vocab_size: 32", "vocab_size: 32, rope_theta: 1000.0, num_labels: 3"))
    config = build_model(spec, "cpu", "float32").config
    assert config._attn_implementation == "eager"
    assert config.rope_parameters["rope_theta"] == 1000.0


def test_keys_that_only_the_model_code_reads_are_known(spec_of):
    text = TINY_LLAMA.replace("llama", "qwen3_moe").replace("vocab_size: 32", "vocab_size: 32, head_dim: 8")
    assert build_model(spec_of(text), "cpu", "float32").config.head_dim == 8


def test_wrong_values(spec_of):
    error = failure(spec_of(TINY_LLAMA.replace("hidden_size: 16", "hidden_size: big")))
    assert error.message.startswith("a.yaml:5: transformers refuses this config: ")
    error = failure(spec_of(TINY_LLAMA.replace("pad_token_id: 0", "pad_token: 0")))
    assert error.message == "a.yaml:7: generation_config has no 'pad_token' (did you mean 'pad_token_id'?)"
    error = failure(spec_of(TINY_LLAMA.replace("AutoModelForCausalLM", "AutoModel")))
    assert "has no generation_config" in error.message or error.message.startswith("a.yaml:7")
    error = failure(spec_of(TINY_LLAMA.replace("AutoModelForCausalLM", "AutoModelForImageClassification")))
    assert error.message.startswith(
        "a.yaml:3: cannot build the model: ValueError: Unrecognized configuration"
    )


def test_pretrained_folder(spec_of, tmp_path, monkeypatch):
    model = build_model(spec_of(TINY_LLAMA), "cpu", "float32")
    model.save_pretrained(tmp_path / "weights")

    def refuse(*args, **kwargs):
        raise AssertionError("the network was reached")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    text = "{pretrained: weights, auto_class: AutoModelForCausalLM}"
    loaded = build_model(spec_of(model=f"model: {text}"), "cpu", "bfloat16")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert loaded.model.rotary_emb.inv_freq.dtype is torch.float32
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    message = failure(spec_of(model="model: {pretrained: nobody/no-such-model}")).message
    assert message == (
        "a.yaml:2: 'nobody/no-such-model' is not a folder next to the spec and not in the local hub cache; "
        "download it beforehand, or set 'online: true'"
    )


def test_pretrained_package(spec_of, tmp_path, monkeypatch):
    package = tmp_path / "packed_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    build_model(spec_of(TINY_LLAMA), "cpu", "float32").save_pretrained(package / "deep" / "weights")
    monkeypatch.syspath_prepend(tmp_path)
    spec = spec_of(model="model: {pretrained: 'package:packed_model/deep/weights'}")
    assert type(build_model(spec, "cpu", "float32")).__name__ == "LlamaModel"
    assert "packed_model" not in sys.modules


def test_missing_requirements(spec_of):
    listed = ["torch", "no-such-distribution", "torch<1", "PyYAML>=5", "x; python_version < '3'"]
    assert missing_requirements(spec_of(extra=f"requires: {listed!r}")) == ["no-such-distribution", "torch<1"]
