"""Each of our patches: an export that fails without it, passes with it, and eager is the same under it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.patches.engine import applied
from pytest_exportcheck.patches.modes import TransformersPatches
from pytest_exportcheck.patches.ours import vision
from pytest_exportcheck.pytrees import flatten_with_paths

from .helpers import make_run, verdict

_HEAD = """
import transformers as T


def ids(batch, length):
    return torch.randint(5, 90, (batch, length))


def ones(batch, length):
    return torch.ones(batch, length, dtype=torch.int64)


def text(*sizes, **more):
    return [((), dict(input_ids=ids(*size), attention_mask=ones(*size), **more)) for size in sizes]


TEXT = dict(
    vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


def built(cls, config):
    torch.manual_seed(0)
    return cls(config).eval()

"""

_ROPE = """
def build_model():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = T.LlamaConfig(**{**TEXT, "max_position_embeddings": 16, "rope_parameters": rope})
    return built(T.LlamaForCausalLM, config)


def calls():
    return text((2, 7), (3, 23))
"""

_MISTRAL = """
def build_model():
    return built(T.MistralForCausalLM, T.MistralConfig(**TEXT, sliding_window=6))


def calls():
    return text((2, 4), (3, 5), (2, 9))
"""

_VISUAL_BERT = """
def build_model():
    config = T.VisualBertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        visual_embedding_dim=12,
    )
    return built(T.VisualBertModel, config)


def call(batch, length, regions):
    aligned = torch.randint(0, length, (batch, regions, 3))
    aligned[0, 0] = -1  # a region without a word: the divisor is 0
    aligned[:, 1, 2] = -1
    return (), dict(
        input_ids=ids(batch, length), attention_mask=ones(batch, length),
        visual_embeds=torch.randn(batch, regions, 12), visual_attention_mask=ones(batch, regions),
        visual_token_type_ids=ones(batch, regions), image_text_alignment=aligned,
    )


def calls():
    return [call(2, 7, 4), call(3, 9, 5)]
"""

_TOWER = """
from transformers.models.MODULE.modeling_MODULE import CLASS


def build_model():
    torch.manual_seed(0)
    config = T.CONFIG(vision_config=dict(
        depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=1, in_channels=3, SIZES
    )).vision_config
    return CLASS._from_config(config).eval()


def call(*grids):
    count = sum(t * h * w for t, h, w in grids)
    return (), dict(hidden_states=torch.randn(count, 3 * 16), grid_thw=torch.tensor(grids))


def calls():
    return [call((1, 4, 4), (1, 8, 4)), call((1, 4, 8), (2, 6, 4), (1, 10, 12)), call((1, 4, 4))]
"""

_QWEN2 = (
    _TOWER.replace("MODULE", "qwen2_vl")
    .replace("CLASS", "Qwen2VisionTransformerPretrainedModel")
    .replace("CONFIG", "Qwen2VLConfig")
    .replace("SIZES", "embed_dim=16, hidden_size=16, mlp_ratio=2")
)
_QWEN2_5 = (
    _TOWER.replace("MODULE", "qwen2_5_vl")
    .replace("CLASS", "Qwen2_5_VisionTransformerPretrainedModel")
    .replace("CONFIG", "Qwen2_5_VLConfig")
    .replace(
        "SIZES",
        "hidden_size=16, out_hidden_size=16, intermediate_size=32, window_size=16, fullatt_block_indexes=[1]",
    )
)

_LFM2 = """
def build_model():
    more = {**TEXT, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = T.Lfm2Config(**more, block_multiple_of=8, conv_L_cache=3)
    return built(T.Lfm2ForCausalLM, config)


def calls():
    return text((2, 7), (3, 11))
"""

_MIXTRAL = """
def build_model():
    return built(T.MixtralForCausalLM, T.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2))


def calls():
    return text((2, 4), (3, 5))
"""

_PADDED = """
def build_model():
    return built(T.LlamaForCausalLM, T.LlamaConfig(**TEXT))


def calls():
    found = text((2, 7), (3, 11))
    for _, kwargs in found:
        kwargs["attention_mask"][0, :2] = 0  # left padding: the first rows may look at nothing
    return found
"""

_REPEATED = """
class Repeats(nn.Module):
    def forward(self, x, y):
        many = y.shape[0]  # SAM repeats an image once for each of its points
        return x.repeat_interleave(many, dim=0) + torch.repeat_interleave(x, many, 0)


def build_model():
    return Repeats()


def calls():
    return [((torch.rand(2, 5), torch.rand(3)), {}), ((torch.rand(4, 5), torch.rand(2)), {})]
"""

_CHECKED = """
class Checked(nn.Module):
    def forward(self, image, features):
        # Language models with images check that there is a place for each feature.
        torch._check_tensor_all(image.sum() == features.shape[0])
        return torch.cumsum(image, 0) * features.sum()


def build_model():
    return Checked()


def calls():
    return [((torch.ones(n, dtype=torch.int64), torch.rand(n, 3)), {}) for n in (4, 7)]
"""

_MAMBA = """
def build_model():
    config = T.MambaConfig(
        vocab_size=99, hidden_size=8, num_hidden_layers=1, state_size=4, conv_kernel=4, expand=2,
        time_step_rank=2,
    )
    return built(T.MambaForCausalLM, config)


def calls():
    return text((2, 7), (3, 11))
"""

_CASES = {
    "dynamic rope": (_ROPE, "torch-export", "transformers", "export", "LlamaRotaryEmbedding.forward"),
    "sliding window": (_MISTRAL, "torch-export", "transformers", "run", "DynamicSlidingWindowLayer.update"),
    "visual_bert": (_VISUAL_BERT, "torch-export", "transformers", "export", "VisualBertEmbeddings.forward"),
    "qwen2_vl tower": (_QWEN2, "torch-export", "transformers", "export", "VisionAttention.forward"),
    "qwen2_5_vl tower": (_QWEN2_5, "torch-export", "transformers", "export", "VLVisionAttention.forward"),
    "short prompts": (
        _LFM2,
        "torch-export",
        "transformers",
        "resize",
        "LinearAttentionLayer.update_conv_state",
    ),
    "mamba": (_MAMBA, "torch-export", "transformers", "export", "modeling_mamba.mamba_selective_scan"),
    "experts": (_MIXTRAL, "onnx-dynamo", "transformers", "convert", "moe.grouped_mm_experts_forward"),
    "masked rows": (_PADDED, "onnx-dynamo", "torch", "compare", "functional.scaled_dot_product_attention"),
    "repeat_interleave": (_REPEATED, "onnx-dynamo", "torch", "run", "Tensor.repeat_interleave"),
    "checks of tensors": (_CHECKED, "onnx-dynamo", "torch", "convert", "Tensor._is_all_true"),
}


@pytest.mark.parametrize("name", _CASES)
def test_it_cures(tmp_path: Path, name: str) -> None:
    source, exporter, mode, fails, patch = _CASES[name]
    run = make_run(tmp_path, _HEAD + source)
    without, _, _ = verdict(run, exporter)
    assert without == fails
    stage, error, record = verdict(run, exporter, mode)
    assert (stage, error) == ("pass", None)
    called = [target for target in record["patches"]["called"] if target.endswith(patch)]
    assert called
    assert set(called) <= set(record["patches"]["nodes"])


_LOOP = """
class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        def go_on(h):
            return h.abs().sum() > 1.0

        def body(h):
            return (torch.cond(h.sum() > 0, lambda h: self.linear(h) * 0.1, lambda h: h * 0.25, (h,)),)

        return torch.while_loop(go_on, body, (x,))[0]


def build_model():
    return Loop()


def calls():
    return [((torch.randn(n, 4) * s + s,), {}) for n, s in ((2, 3.0), (3, -3.0), (5, 1.0))]
"""


def test_a_branch_in_a_loop_is_converted(tmp_path: Path) -> None:
    run = make_run(tmp_path, _LOOP)
    stage, error, _ = verdict(run, "onnx-dynamo")
    assert stage == "convert"
    assert "Opset mismatch when inlining" in str(error)
    stage, error, record = verdict(run, "onnx-dynamo", "torch")
    assert (stage, error) == ("pass", None)
    assert set(record["patches"]["called"]) == {"torch.onnx._internal.exporter._torchlib.ops.hop.call_op"}


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_a_padded_batch_past_the_window(tmp_path: Path, exporter: str) -> None:
    """The mask is as long as everything seen, the cache holds the last of it: which columns are masked?"""
    source = (
        _MISTRAL.partition("def calls")[0]
        + """
def calls(model):
    mask = ones(2, 5)
    mask[0, :3] = 0
    model.generate(
        input_ids=ids(2, 5), attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
"""
    )
    # Sizes made up by resizing have a mask longer than what a cache that is not full can have seen.
    run = make_run(tmp_path, _HEAD + source, extra="resize: off\n")
    assert verdict(run, exporter)[0] != "pass"
    stage, error, record = verdict(run, exporter, "transformers")
    assert (stage, error) == ("pass", None)
    assert record["patches"]["called"]["transformers.masking_utils._preprocess_mask_arguments"]


@pytest.mark.parametrize("name", ["sliding window", "qwen2_5_vl tower"])
def test_eager_is_the_same_under_it(tmp_path: Path, name: str) -> None:
    """Beyond the calls of the case: several steps with a cache, and grids of every shape."""
    run = make_run(tmp_path, _HEAD + _CASES[name][0])
    model = run.model("cpu", "float32")
    if name == "sliding window":
        steps = [torch.randint(5, 90, (2, length)) for length in (3, 1, 1, 4, 1, 9, 1)]

        def outputs() -> list[Any]:
            cache, found = None, []
            for step in steps:
                out = model(input_ids=step, cache=cache, use_cache=True)
                cache = out.cache
                found += [out.logits, *(copy.deepcopy(leaf) for _, leaf in flatten_with_paths(cache))]
            return found
    else:
        grids = [[(1, 2, 2)], [(3, 8, 8)], [(1, 12, 6), (2, 4, 10), (1, 2, 14)]]
        inputs = [(torch.randn(sum(t * h * w for t, h, w in grid), 48), torch.tensor(grid)) for grid in grids]

        def outputs() -> list[Any]:
            return [model(*given).last_hidden_state for given in inputs]

    with torch.no_grad():
        plain = outputs()
        with TransformersPatches().apply(model, "torch") as activity:
            patched = outputs()
    assert activity.called()
    for expected, got in zip(plain, patched, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_mask_sizes_on_both_sides_of_the_window() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    patches = [
        patch
        for patch in TransformersPatches().patches(None, "torch")
        if patch.name.endswith("get_mask_sizes")
    ]

    def sizes() -> list[Any]:
        layer = DynamicSlidingWindowLayer(sliding_window=5)
        found = [layer.get_mask_sizes(3)]
        for _ in range(12):
            layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
            found += [layer.get_mask_sizes(query) for query in (1, 3, 8)]
        return found

    plain = sizes()
    with applied(patches) as activity:
        assert sizes() == plain
    assert activity.called()


@pytest.mark.parametrize(
    "grid",
    [[(1, 2, 2)], [(1, 4, 4), (1, 8, 4)], [(2, 6, 4), (1, 10, 12), (3, 2, 8)], [(1, 16, 16)], [(2, 14, 18)]],
)
def test_positions_and_windows_of_patches_are_those_of_the_loops(grid: list[tuple[int, int, int]]) -> None:
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_position_ids,
        get_vision_window_index,
    )

    tensor = torch.tensor(grid)
    count = int(tensor.prod(-1).sum())
    assert torch.equal(vision._position_ids(tensor, 2, count), get_vision_position_ids(tensor, 2))
    ends = vision._frame_ends(tensor, count)
    assert ends.dtype == torch.int32
    assert torch.equal(torch.unique_consecutive(ends), get_vision_cu_seqlens(tensor))
    index, windows = vision._windows(tensor, 2, 16, 4, count)
    expected_index, expected_windows = get_vision_window_index(tensor, 2, 16, 4)
    assert torch.equal(index, expected_index)
    assert torch.equal(torch.unique_consecutive(windows), expected_windows)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_funnel_keeps_its_length_dynamic(separate: bool, truncate: bool) -> None:
    from transformers import FunnelBaseModel, FunnelConfig

    from pytest_exportcheck.patches.ours.funnel import funnel_patches

    torch.manual_seed(0)
    config = FunnelConfig(
        vocab_size=99, block_sizes=[1, 1, 1], num_decoder_layers=1, d_model=8, n_head=2, d_head=4, d_inner=16,
        separate_cls=separate, truncate_seq=truncate,
    )  # fmt: skip
    model = FunnelBaseModel(config).eval()
    structure = model.encoder.attention_structure

    def tables() -> list[Any]:
        return [structure.get_position_embeds(length, torch.float32, "cpu") for length in (8, 9, 12, 24, 25)]

    plain = tables()
    with applied(funnel_patches(model, "torch")):
        patched = tables()
    for expected, got in zip(flatten_with_paths(plain), flatten_with_paths(patched), strict=True):
        assert expected[0] == got[0]
        assert torch.equal(expected[1], got[1]) if isinstance(expected[1], torch.Tensor) else got[1] is None


def test_funnel_exports() -> None:
    from transformers import FunnelBaseModel, FunnelConfig

    from pytest_exportcheck.patches.ours.funnel import funnel_patches

    torch.manual_seed(0)
    config = FunnelConfig(
        vocab_size=99, block_sizes=[1, 1], num_decoder_layers=1, d_model=8, n_head=2, d_head=4, d_inner=16
    )
    model = FunnelBaseModel(config).eval()
    dynamic = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in ("input_ids",)}
    given = {"input_ids": torch.randint(5, 90, (2, 12))}

    def export() -> Any:
        oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with torch.no_grad(), oblivious:
            return torch.export.export(model, (), kwargs=given, dynamic_shapes=dynamic)

    with pytest.raises(Exception, match="specialized it to be a constant"):
        export()
    with applied(funnel_patches(model, "torch")):
        program = export().module()
    for length in (12, 16, 24):
        ids = torch.randint(5, 90, (3, length))
        with torch.no_grad():
            expected = model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(program(input_ids=ids).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
