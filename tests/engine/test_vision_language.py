"""A whole vision-language model under `generate`: what its calls hold, and the graphs that serve them."""

from __future__ import annotations

import pytest
import yaml

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import load_spec

from .helpers import verdict

PROMPTS = """
import torch


def with_image(shape, generator):
    batch, length = shape
    text = torch.randint(5, 90, (batch, length - 5), generator=generator)
    return torch.cat([torch.full((batch, 1), 1), torch.full((batch, 4), 95), text], 1)
"""

SPEC = """
exportcheck: 1
model:
  type: {type}
  auto_class: AutoModelForImageTextToText
  config:
    image_token_id: 95
    {config}
    vision_config: {{{vision}hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, image_size: 16, patch_size: {patch}}}
    text_config: {{model_type: llama, vocab_size: 99, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, pad_token_id: 0, bos_token_id: 1, eos_token_id: 2}}
  generation: {{pad_token_id: 0, bos_token_id: 1, eos_token_id: 2}}
observe:
  calls:
    - generate: {{input_ids: "int64[2, 9] by prompts.py:with_image", pixel_values: "{first}", max_new_tokens: 2, min_new_tokens: 2, do_sample: false}}
    - generate: {{input_ids: "int64[{batch}, 12] by prompts.py:with_image", pixel_values: "{second}", max_new_tokens: 2, min_new_tokens: 2, do_sample: false}}
  {graphs}
matrix: {{exporters: [torch-export]}}
"""  # noqa: E501

LLAVA = {
    "type": "llava",
    "config": "image_seq_length: 4\n    vision_feature_layer: -1",
    "vision": "model_type: clip_vision_model, ",
    "patch": 8,
    "image": "3, 16, 16",
}
IDEFICS3 = {"type": "idefics3", "config": "scale_factor: 2\n    pad_token_id: 0", "vision": "", "patch": 4,
            "image": "1, 3, 16, 16"}  # fmt: skip


def run_of(folder, family, batch, graphs=""):
    (folder / "prompts.py").write_text(PROMPTS)
    path = folder / f"{family['type']}.yaml"
    images = {"first": f"float32[2, {family['image']}]", "second": f"float32[{batch}, {family['image']}]"}
    path.write_text(SPEC.format(**family, **images, batch=batch, graphs=graphs))
    return SpecRun(load_spec(path, folder))


def proposal(failure):
    line = next(line for line in failure.value.details if "graphs:" in line)
    return yaml.safe_load(line)["observe"]["graphs"]


@pytest.mark.parametrize("family", [LLAVA, IDEFICS3], ids=lambda family: family["type"])
def test_images_that_a_tuple_counts_need_a_graph_each(tmp_path, family):
    """`generate` hands the encoder's output to prefill as a tuple of one tensor per image."""
    with pytest.raises(
        ObserveError, match=r"pooler_output holds a varying .* \(2 in call 0; 3 in call 2\)"
    ) as failure:
        run_of(tmp_path, family, batch=3).observe("cpu", "float32")
    graphs = proposal(failure)
    assert graphs == {"prefill": [0], "decode": [1, 3], "prefill_2": [2]}
    assert failure.value.details[2:] == [
        "  decode: no mm_encoder_outputs",
        "  prefill_2: mm_encoder_outputs.image.pooler_output holds 3",
    ]
    seen = run_of(tmp_path, family, 3, f"graphs: {graphs}").observe("cpu", "float32")
    assert list(seen.graphs) == list(graphs)
    assert not seen.failures


@pytest.mark.parametrize("family", [LLAVA, IDEFICS3], ids=lambda family: family["type"])
def test_one_graph_for_prefill_and_one_for_decoding_pass(tmp_path, family):
    with pytest.raises(ObserveError, match="call 1 has no mm_encoder_outputs") as failure:
        run_of(tmp_path, family, batch=2).observe("cpu", "float32")
    graphs = proposal(failure)
    assert graphs == {"prefill": [0, 2], "decode": [1, 3]}
    run = run_of(tmp_path, family, 2, f"batch_dims: [input_ids, position_ids, cache]\n  graphs: {graphs}")
    leaves = run.observe("cpu", "float32").graphs["decode"].shapes.leaves
    assert str(leaves["cache.layers.0.keys"]) == "float32[batch, 1, past, 8]"
    for graph in graphs:
        stage, error, record = verdict(run, "torch-export", graph=graph)
        assert stage == "pass", error
        assert record["calls"] == 2
