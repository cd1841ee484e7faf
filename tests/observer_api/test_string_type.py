"""`string_type`."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import DynamicCache, MambaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from pytest_exportcheck import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache, string_type

F, I = torch.zeros(2, 6), torch.zeros(3, dtype=torch.int64)  # noqa: E741
KV = (torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
K = "T1s2x1x3x4"
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Settings:
    width: Any
    other: Any = None


class Opaque:
    pass


class Spiteful:
    @property
    def layers(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (F, "T1s2x6"),
        (F.half(), "T10s2x6"),
        (F.bfloat16(), "T16s2x6"),
        (F > 0, "T9s2x6"),
        (F.to(torch.complex64), "T14s2x6"),
        (torch.tensor(1.0), "T1s"),
        (I, "T7s3"),
        (np.zeros((2, 3), np.float32), "A1s2x3"),
        (np.array(["a"]), "A8s1"),
        (None, "None"),
        ((F, I), "(T1s2x6,T7s3)"),
        ((F,), "(T1s2x6,)"),
        ((), "()"),
        ([F, I], "#2[T1s2x6,T7s3]"),
        ([], "#0[]"),
        ({}, "{}"),
        ({"a": F, "b": [1, 2.0, True, "s"]}, "dict(a:T1s2x6,b:#4[int,float,bool,str])"),
        ({1, 2.5}, "{float,int}"),
        ([1] * 25, "#25[int,...]"),
        ((F,) * 25, "#25(T1s2x6,...)"),
        ([1] * 19, f"#19[{','.join(['int'] * 19)}]"),
        (slice(1, 2), "slice"),
        (2 + 1j, "complex"),
        (Pair(F, 1), "Pair(left:T1s2x6,right:int)"),
        (Settings(F), "Settings(width:T1s2x6)"),
        (
            BaseModelOutput(last_hidden_state=torch.zeros(4, 4, 4)),
            "BaseModelOutput(last_hidden_state:T1s4x4x4)",
        ),
        (Opaque(), "Opaque"),
        (Spiteful(), "Spiteful"),
        (float, "float"),
        (torch.export.Dim("batch"), "Dim(batch)"),
        (2 * torch.export.Dim("batch"), "DerivedDim"),
        (torch.export.Dim.DYNAMIC, "DYNAMIC"),
        (torch.export.Dim.AUTO, "AUTO"),
        ({0: torch.export.Dim("batch"), 1: "seq"}, "{0:Dim(batch),1:DYN(seq)}"),
        (({0: torch.export.Dim.DYNAMIC}, {}), "({0:DYNAMIC},{})"),
        (make_dynamic_cache([KV] * 2), f"DynamicCache(key_cache=#2[{K},{K}], value_cache=#2[{K},{K}])"),
        (DynamicCache(), "DynamicCache(key_cache=#0[], value_cache=#0[])"),
        (
            make_static_cache([KV], max_cache_len=7),
            "StaticCache(key_cache=#1[T1s2x1x7x4], value_cache=#1[T1s2x1x7x4])",
        ),
        (
            make_dynamic_cache([KV] * 2, ["DynamicLayer", DynamicSlidingWindowLayer]),
            f"DynamicCache(DynamicLayer({K}, {K}), DynamicSlidingWindowLayer({K}, {K}))",
        ),
        (
            make_dynamic_cache([KV], DynamicSlidingWindowLayer),
            f"DynamicCache(DynamicSlidingWindowLayer({K}, {K}))",
        ),
        (
            make_encoder_decoder_cache(make_dynamic_cache([KV]), make_dynamic_cache([KV])),
            f"EncoderDecoderCache(self_attention_cache=DynamicCache(key_cache=#1[{K}], value_cache=#1[{K}]), "
            f"cross_attention_cache=DynamicCache(key_cache=#1[{K}], value_cache=#1[{K}]))",
        ),
    ],
)
def test_with_shape(value: Any, text: str) -> None:
    assert string_type(value, with_shape=True) == text


def test_without_shape() -> None:
    assert string_type(F) == "T1r2"
    assert string_type((np.zeros(3), [I])) == "(A11r1,#1[T7r1])"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "int=5"),
        (2.5, "float=2.5"),
        (True, "bool=True"),
        (np.array([1.0, 3.0]), "A11s2[1.0,3.0:A2.0]"),
        (torch.tensor([1.0, float("nan"), 3.0]), "T1s3[1.0,3.0:A2.0N1nans]"),
        (torch.zeros(0), "T1s0[empty]"),
        (torch.tensor([True, False]), "T9s2[0.0,1.0:A0.5]"),
        (torch.tensor([float("nan")]), "T1s1[N1nans]"),
        (torch.tensor([3 + 4j]), "T14s1[5.0,5.0:A5.0]"),
    ],
)
def test_with_min_max(value: Any, text: str) -> None:
    assert string_type(value, with_shape=True, with_min_max=True) == text


def test_with_device() -> None:
    assert string_type([F], with_shape=True, with_device=True) == "#1[CT1s2x6]"
    assert string_type(torch.zeros(2, device="meta"), with_shape=True, with_min_max=True) == "T1s2"


def test_values_of_onnxruntime() -> None:
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
    assert string_type(value, with_shape=True) == "OV1s2x3"
    assert string_type(value._ortvalue) == "OV1r2"


def test_states_of_linear_attention() -> None:
    config = MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1, vocab_size=32)
    cache = DynamicCache(config=config)
    assert string_type(cache, with_shape=True).startswith("DynamicCache(LinearAttentionLayer(")
    cache.layers[0].update_conv_state(torch.zeros(2, 16, 4))
    assert "T1s2x16x4" in string_type(cache, with_shape=True)


def test_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        assert string_type(torch.zeros(2, 3), with_shape=True, with_min_max=True) == "F1s2x3"
