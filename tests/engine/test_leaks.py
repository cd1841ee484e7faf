"""What an export leaves behind is named; ours leave nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.checks.leaks import difference, snapshot
from pytest_exportcheck.patches.registry import load_patch_mode

from .helpers import make_run, verdict


def _texts(before: Any) -> list[str]:
    return [str(leak) for leak in difference(before)]


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2))


def test_nothing_is_nothing(model: torch.nn.Module) -> None:
    before = snapshot(model)
    model(torch.ones(1, 2))
    assert difference(before) == []


def test_a_function_of_a_module_and_a_method(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    before = snapshot()
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x)
    monkeypatch.setattr(DynamicLayer, "update", lambda self, k, v: (k, v))
    # Inherited before, its own now: what restoring with setattr does.
    monkeypatch.setattr(DynamicSlidingWindowLayer, "reorder_cache", DynamicSlidingWindowLayer.reorder_cache)
    texts = _texts(before)
    assert any(text.startswith("torch.nn.functional.gelu was changed") for text in texts)
    assert any(text.startswith("transformers.cache_utils.DynamicLayer.update was changed") for text in texts)
    assert any(
        text.startswith("transformers.cache_utils.DynamicSlidingWindowLayer.reorder_cache was added")
        for text in texts
    )


def test_attributes_and_buffers_of_the_model(model: torch.nn.Module) -> None:
    before = snapshot(model)
    model.forward = lambda x: x  # type: ignore[method-assign]
    model[0].register_buffer("seen", torch.ones(1))
    model[0].training = False
    assert [f"{leak.place} {leak.change}" for leak in difference(before)] == [
        "vars(0) _buffers['seen'] added",
        "vars(0) training changed",
        "vars(model) forward added",
    ]


def test_a_pytree_node_and_an_attention_function(model: torch.nn.Module) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    class Leaked:
        pass

    before = snapshot()
    _pytree._private_register_pytree_node(Leaked, lambda x: ([], None), lambda leaves, context: Leaked())
    ALL_ATTENTION_FUNCTIONS["leaked"] = len
    try:
        texts = _texts(before)
    finally:
        _pytree._deregister_pytree_node(Leaked)
        del ALL_ATTENTION_FUNCTIONS["leaked"]
    assert any("pytree node" in text and "Leaked was added" in text for text in texts)
    assert any("ALL_ATTENTION_FUNCTIONS['leaked'] was added" in text for text in texts)
    gc.collect()
    assert difference(before) == []


def test_kernels_and_decompositions_of_operators(model: torch.nn.Module) -> None:
    operator = torch.ops.aten.erfinv.default
    key = torch._C.DispatchKey.AutocastCPU
    decompositions = torch._decomp.global_decomposition_table["post_autograd"]
    decomposed = decompositions[operator]
    before = snapshot(model)
    library = torch.library.Library("aten", "IMPL")
    library.impl("erfc", lambda x: x, "AutocastCPU")
    operator.py_impl(key)(lambda x: x)
    decompositions[operator] = lambda x: x
    try:
        assert [f"{leak.place} {leak.change}" for leak in difference(before)] == [
            "decomposition (post_autograd) of aten.erfinv.default changed",
            f"kernel of aten.erfinv.default for {key} added",
            "operator kernel aten/erfc/AutocastCPU added",
        ]
    finally:
        decompositions[operator] = decomposed
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()
        library._destroy()
    assert difference(before) == []


def test_a_class_of_a_module_imported_meanwhile_is_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of models of transformers are registered where they are defined."""
    (tmp_path / "registers_on_import.py").write_text(
        "from torch.utils import _pytree\n\n\nclass Output:\n    pass\n\n\n"
        "_pytree._private_register_pytree_node(\n"
        "    Output, lambda x: ([], None), lambda leaves, context: Output()\n)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = snapshot()
    import registers_on_import  # type: ignore[import-not-found]

    try:
        assert difference(before) == []
    finally:
        _pytree._deregister_pytree_node(registers_on_import.Output)


_LLAMA = """
import transformers as T


def build_model():
    torch.manual_seed(0)
    return T.MistralForCausalLM(T.MistralConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=6,
    )).eval()


def calls():
    return [((), dict(input_ids=torch.randint(5, 90, size))) for size in ((2, 4), (3, 9))]
"""


@pytest.mark.parametrize("mode", ["none", "all", "hf"])
def test_a_case_leaves_nothing(tmp_path: Path, mode: str) -> None:
    run = make_run(tmp_path, _LLAMA)
    run.model("cpu", "float32")
    with load_patch_mode(mode).apply(run.model("cpu", "float32"), "onnx"):  # type: ignore[attr-defined]
        pass  # what is imported and filled lazily is there
    verdict(run, "torch-export", mode)
    before = snapshot(run.model("cpu", "float32"))
    verdict(run, "torch-export", mode)
    assert _texts(before) == []
