"""Calls that ``generate`` makes: hybrid models and their caches, prompt lookup and assisted decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.observe import InputObserver, infer_shapes
from pytest_exportcheck.observe.groups import propose_groups
from pytest_exportcheck.observe.infer import ConstantsDiffer
from pytest_exportcheck.pytrees import clone_tree, flatten_with_paths, register_flattening_functions

from .helpers import make_run, verdict

TEXT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

SSM = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2}

#: Class of the model -> what its config has beside `TEXT`, and a path of its cache that is no key.
HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "GraniteMoeHybrid": (
        {
            "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
            "shared_intermediate_size": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
            "mamba_chunk_size": 4, **SSM,
        },
        "cache.layers.0.recurrent_states.0",
    ),
    "Jamba": (
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
            "mamba_dt_rank": 4, "use_mamba_kernels": False, **SSM,
        },
        "cache.layers.0.conv_states.0",
    ),
    "MiniMax": (
        {
            "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2,
            "num_experts_per_tok": 1, "block_size": 4,
        },
        "cache.linear_cache.0",
    ),
}  # fmt: skip


def build(name: str, config: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(model: Any, ids: torch.Tensor, **kwargs: Any) -> InputObserver:
    observer = InputObserver()
    with observer(model, store_n_calls=20), torch.no_grad():
        model.generate(ids, do_sample=False, **kwargs)
    assert observer.info.lost == 0
    return observer


def assert_replays(model: Any, observer: InputObserver) -> None:
    assert observer.info.signature is not None
    for call in observer.info.calls:
        args, kwargs = observer.info.signature.call(clone_tree(call.arguments))
        with torch.no_grad():
            again = flatten_with_paths(model(*args, **kwargs))
        for (path, expected), (_, got) in zip(call.output_leaves(), again, strict=True):
            assert torch.equal(torch.as_tensor(expected), torch.as_tensor(got)), (call.index, path)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_model_is_observed_inferred_and_replays(name: str, padded: bool) -> None:
    config, path = HYBRIDS[name]
    model = build(name, TEXT | config)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0 if padded else 1
    observer = generate(
        model, torch.randint(1, 16, (2, 6)), attention_mask=mask, max_new_tokens=3, min_new_tokens=3
    )
    calls, signature = observer.info.calls, observer.info.signature
    assert len(calls) == 3
    assert signature is not None
    with register_flattening_functions():
        assert_replays(model, observer)
        shapes = infer_shapes(calls, signature_order=signature.names, defaults=signature.defaults)
        assert path in shapes.leaves
        keys = str(shapes.leaves["cache.layers.1.keys"])
        assert keys == "float32[2, 1, past, 8]"
        if calls[0].arguments.get("cache") is None:  # minimax makes its own
            with pytest.raises(ObserveError, match="call 0 has no cache"):
                shapes.complete(calls[0])
        else:
            # Nothing in it yet: zeros stand in for the states, length 0 for keys and values.
            first = dict(flatten_with_paths(shapes.complete(calls[0])["cache"], "cache"))
            assert first["cache.layers.1.keys"].shape[2] == 0
            assert not first[path].any()
        entries = observer.infer_dynamic_shapes()
        assert {2: torch.export.Dim.DYNAMIC} in entries["cache"]


# decoding that guesses ahead

PROMPT = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4]])


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_constants_that_guessing_changes_are_refused_with_groups(kind: str) -> None:
    model = build("Llama", TEXT)
    other = build("Llama", TEXT, seed=1)
    guess = {"assistant_model": other} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    observer = generate(model, PROMPT, max_new_tokens=6, **guess)
    calls, signature = observer.info.calls, observer.info.signature
    assert signature is not None
    values = [call.arguments["logits_to_keep"] for call in calls]
    assert len(set(values)) == 2
    with register_flattening_functions():
        assert_replays(model, observer)
        with pytest.raises(ConstantsDiffer) as caught:
            infer_shapes(calls, signature_order=signature.names, defaults=signature.defaults)
        groups = propose_groups(calls, signature.defaults)
        for group in groups:
            mine = [calls[index] for index in group.indices]
            assert len({call.arguments["logits_to_keep"] for call in mine}) == 1
            assert infer_shapes(mine, signature_order=signature.names, defaults=signature.defaults).leaves
    message = "\n".join([caught.value.message, *caught.value.details])
    assert "logits_to_keep" in message
    first = [index for index, value in enumerate(values) if value == values[0]]
    rest = [index for index, value in enumerate(values) if value != values[0]]
    for value, indices in ((values[0], first), (values[rest[0]], rest)):
        assert f"{value} in call{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}" in message
    assert f"observe: {{graphs: {{graph_0: {first}, graph_1: {rest}}}}}" in message


LOOKUP = f"""
from transformers import LlamaConfig, LlamaForCausalLM


def build_model():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{TEXT!r})).eval()
    model.generation_config.pad_token_id = 0
    return model


def calls(model):
    ids = torch.tensor({PROMPT.tolist()})
    model.generate(ids, do_sample=False, max_new_tokens=6, prompt_lookup_num_tokens=3)
"""


def test_a_spec_with_groups_serves_prompt_lookup(tmp_path: Path) -> None:
    refused = make_run(tmp_path, LOOKUP, 'observe: {calls: [{call: "net.py:calls"}]}\n')
    stage, error, _ = verdict(refused, "torch-export")
    assert stage == "observe"
    assert "4 in calls 0, 4; 1 in calls 1, 2, 3, 5" in error.message
    assert "graphs: {graph_0: [0, 4], decode: [1, 2, 3, 5]}" in "\n".join(error.details)
    grouped = make_run(
        tmp_path,
        LOOKUP,
        """\
        observe:
          calls: [{call: "net.py:calls"}]
          graphs: {guess: [0, 4], step: [1, 2, 3, 5]}
        resize: {past: [3, 14, 20], seq: [4, 14, 29]}
        """,
    )
    for graph in ("guess", "step"):
        stage, error, _ = verdict(grouped, "torch-export", graph=graph)
        assert stage == "pass", (graph, error, error and error.details)
