"""Patch modes: what they change is there inside the block, and gone after it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from pytest_exportcheck.errors import PatchError
from pytest_exportcheck.patches.base import PatchMode
from pytest_exportcheck.patches.hf import HfPatches, _internals
from pytest_exportcheck.patches.registry import load_patch_mode, patch_mode_names


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _attributes() -> dict[str, Any]:
    """Every attribute of the modules and classes in which transformers.exporters has its patches."""
    found: dict[str, Any] = {}
    names = [
        "torch", "torch.nn.functional", "torch.onnx", "transformers.masking_utils",
        "transformers.cache_utils", "transformers.modeling_utils", "transformers.integrations.sdpa_attention",
        "transformers.models.llama.modeling_llama",
    ]  # fmt: skip
    for name in names:
        module = import_module(name)
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{inner}": item for inner, item in list(vars(value).items())})
    for key in (
        "__getitem__",
        "__setitem__",
        "expand",
        "unfold",
        "split",
        "repeat",
        "index_put_",
        "masked_fill",
    ):
        found[f"Tensor.{key}"] = getattr(torch.Tensor, key)
    return found


def _changed(before: dict[str, Any]) -> set[str]:
    after = _attributes()
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


@pytest.fixture
def hf(model: torch.nn.Module) -> HfPatches:
    mode = HfPatches()
    with mode.apply(model, "onnx"):
        pass  # everything that is imported lazily is imported
    return mode


@pytest.mark.parametrize("target", ["eager", "torch", "onnx", "torchscript"])
def test_hf_patches_something_and_restores_everything(
    hf: HfPatches, model: torch.nn.Module, target: str
) -> None:
    before, own = _attributes(), dict(vars(model))
    with hf.apply(model, target):
        assert _changed(before), "nothing is patched"
    assert not _changed(before)
    assert vars(model) == own


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hf_restores_after_an_error(
    hf: HfPatches, model: torch.nn.Module, error: type[BaseException]
) -> None:
    before = _attributes()
    with pytest.raises(error), hf.apply(model, "onnx"):
        raise error
    assert not _changed(before)


def test_hf_inside_hf(hf: HfPatches, model: torch.nn.Module) -> None:
    """A case is observed under the mode, and exported under it inside."""
    before = _attributes()
    with hf.apply(model, "eager"):
        inside = _attributes()
        with hf.apply(model, "onnx"):
            pass
        assert not _changed(inside)
    assert not _changed(before)


def test_hf_does_not_change_what_the_model_computes(hf: HfPatches, model: torch.nn.Module) -> None:
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        plain = model(ids).logits
        with hf.apply(model, "eager"):
            patched = model(ids).logits
    assert torch.allclose(plain, patched, atol=1e-6)


def test_the_internals_of_transformers_are_where_they_were() -> None:
    _internals(
        "_PATCHES",
        "apply_patches",
        "reset_model_state",
        "_ONNX_TRANSLATION_TABLE",
        "apply_fx_node_fixes",
        "apply_onnx_ir_fixes",
    )
    with pytest.raises(PatchError, match=r"has no transformers.exporters name 'apply_patchez'"):
        _internals("apply_patchez")


def test_hf_has_its_patches_before_anything_else_was_imported() -> None:
    """Its registries are filled by imports: what is observed first must be observed under them too."""
    script = (
        "from pytest_exportcheck.patches.registry import load_patch_mode\n"
        "names = [patch.name for patch in load_patch_mode('hf').patches(None, 'eager')]\n"
        "assert 'dynamo:transformers.cache_utils.DynamicSlidingWindowLayer.update' in names, names\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_hf_takes_owners_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.20 registers them; as paths they would name nothing, and the mode patch nothing."""
    (registry,) = _internals("_PATCHES")
    owners = [
        (torch, "sin", lambda original: torch.cos),
        (torch.nn.Linear, "forward", lambda original: lambda self, x: x),
    ]
    monkeypatch.setitem(registry, "dynamo", owners)
    layer = torch.nn.Linear(2, 3)
    with HfPatches().apply(None, "eager") as activity:
        assert torch.sin(torch.zeros(1)).item() == 1.0
        assert layer(torch.ones(1, 2)).shape == (1, 2)
        assert not activity.resting
    assert list(activity.called()) == [
        "dynamo:torch.sin",
        "dynamo:torch.nn.modules.linear.Linear.forward",
    ]
    assert layer(torch.ones(1, 2)).shape == (1, 3)
    monkeypatch.setitem(registry, "dynamo", [(3, "sin", None)])
    with pytest.raises(PatchError, match="registers a patch of 3, neither a path, a module nor a class"):
        HfPatches().patches(None, "eager")


def test_none_changes_nothing(model: torch.nn.Module) -> None:
    mode = load_patch_mode("none")
    assert isinstance(mode, PatchMode)
    before = _attributes()
    with mode.apply(model, "onnx"):
        assert not _changed(before)
    program = torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))
    assert mode.before_convert(program) is None


def test_modes_are_found_by_name() -> None:
    assert patch_mode_names()[:2] == ["none", "torch"]
    assert load_patch_mode("hf") is load_patch_mode("hf")
    with pytest.raises(LookupError, match=r"unknown patch mode 'hff' .did you mean 'hf'"):
        load_patch_mode("hff")
