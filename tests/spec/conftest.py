from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_exportcheck.errors import SpecError
from pytest_exportcheck.spec import ModelSpec, load_spec

#: The smallest valid spec; tests append to it or replace a section.
SECTIONS = {
    "exportcheck": "exportcheck: 1",
    "model": 'model: {factory: "f.py:make"}',
    "observe": 'observe: {calls: [forward: {x: "float32[2, 3]"}]}',
}

TINY_LLAMA = """\
exportcheck: 1
model:
  type: llama
  auto_class: AutoModelForCausalLM
  config: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, vocab_size: 32, max_position_embeddings: 64}
  generation: {pad_token_id: 0, eos_token_id: null}
observe:
  calls:
    - forward: {input_ids: "int64[2, 4] < 32", use_cache: true}
    - forward: {input_ids: "int64[2, 2] < 32", cache: previous.cache, use_cache: true}
    - generate: {input_ids: "int64[2, 4] < 32", max_new_tokens: 2, do_sample: true}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write files into the test's folder; returns the last one."""

    def write(**files: str) -> Path:
        path = tmp_path
        for name, text in files.items():
            path = tmp_path / name.replace("_DOT_", ".")
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., ModelSpec]:
    """A spec from its text, or from the minimal sections with some replaced or added."""

    def spec_of(
        text: str | None = None, known: dict[str, list[str]] | None = None, **sections: str
    ) -> ModelSpec:
        if text is None:
            text = "\n".join({**SECTIONS, **sections}.values()) + "\n"
        path = tmp_path / "a.yaml"
        path.write_text(text, encoding="utf-8")
        return load_spec(path, tmp_path, known)

    return spec_of


@pytest.fixture
def problems_of(spec_of: Callable[..., ModelSpec]) -> Callable[..., list[str]]:
    """The problems of such a spec, as text; empty if it is valid."""

    def problems_of(*args: object, **sections: object) -> list[str]:
        try:
            spec_of(*args, **sections)
        except SpecError as error:
            return [str(problem) for problem in error.problems]
        return []

    return problems_of
