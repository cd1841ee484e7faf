"""The one-line language: what it means, and where its mistakes are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.spec import TensorSyntaxError, parse_tensor, resolve_tensor


def make(text, folder=None, sizes=None, key="k", dtype="float32"):
    spec = parse_tensor(text, folder) if folder else parse_tensor(text)
    return resolve_tensor(spec, sizes or {}, key, "cpu", dtype)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int64[2, 2] = 1", torch.ones(2, 2, dtype=torch.int64)),
        ("float32[2] = -1.5e-1", torch.tensor([-0.15, -0.15])),
        ("float32[1] = -inf", torch.tensor([-math.inf])),
        ("bool[2] = true", torch.tensor([True, True])),
        ("float16[] = 2", torch.tensor(2, dtype=torch.float16)),
        ("int8[2, 3] arange", torch.arange(6, dtype=torch.int8).reshape(2, 3)),
        ("int64[2, 2] values [[1, 2], [3, -4]]", torch.tensor([[1, 2], [3, -4]])),
        ("int64[2, 2] values [1, 2, 3, 4]", torch.tensor([[1, 2], [3, 4]])),
        ("bool[2] values [true, false]", torch.tensor([True, False])),
        ("complex64[1] = 2", torch.tensor([2 + 0j], dtype=torch.complex64)),
        ("int64[0] values []", torch.zeros(0, dtype=torch.int64)),
        ("int64[2, 3] padded left 2", torch.tensor([[0, 0, 1], [1, 1, 1]])),
        ("int64[2, 3] padded right 1", torch.tensor([[1, 1, 0], [1, 1, 1]])),
        ("int64[2, 3] padded left 0", torch.ones(2, 3, dtype=torch.int64)),
        ("bool[3] padded left 1", torch.tensor([False, True, True])),
    ],
)
def test_exact_fills(text, expected):
    torch.testing.assert_close(make(text), expected, rtol=0, atol=0)


def test_random_fills():
    below = make("int64[1000] < 3")
    assert below.unique().tolist() == [0, 1, 2]
    assert make("int32[1000] in 5..7").unique().tolist() == [5, 6]
    assert make("uint8[1000]").unique().tolist() == list(range(10))
    assert make("bool[1000]").unique().tolist() == [False, True]
    between = make("float32[1000] in -1..0.5")
    assert -1 <= between.min() < -0.9
    assert 0.4 < between.max() <= 0.5
    normal = make("float32[10000]")
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    assert make("complex64[2]").dtype is torch.complex64
    assert math.isnan(make("float32[1] = nan").item())


def test_dims_are_sums_of_names():
    sizes = {"past": 3, "seq": 2}
    spec = parse_tensor("int64[ past+seq ,seq - 1, 4 - past, ] < 5".replace(", ]", "]"))
    assert [dim.text for dim in spec.dims] == ["past + seq", "seq - 1", "4 - past"]
    assert spec.names == ("past", "seq")
    assert spec.shape(sizes) == (5, 1, 1)
    with pytest.raises(ObserveError, match="dim 'past' has no value"):
        resolve_tensor(spec, {"seq": 1}, "k", "cpu", "float32")
    with pytest.raises(ObserveError, match=r"dim '4 - past' is -1: a size cannot be negative"):
        resolve_tensor(spec, {"seq": 1, "past": 5}, "k", "cpu", "float32")


def test_values_depend_on_the_key_alone():
    torch.manual_seed(1)
    first = make("float32[4]")
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, make("float32[4]"))
    assert not torch.equal(first, make("float32[4]", key="other"))
    torch.set_rng_state(state)
    make("float32[4]")
    assert torch.equal(state, torch.get_rng_state())
    # A value fixed here notices a seed that depends on the process (hash) or the platform.
    assert make("int64[6] < 1000", key="0/call 0/x").tolist() == [981, 443, 502, 638, 170, 137]


def test_dtype_follows_the_case_unless_exact():
    full = make("float32[64]")
    assert make("float32[64]", dtype="float16").dtype is torch.float16
    assert torch.equal(make("float32[64]", dtype="float16"), full.half())
    assert torch.equal(make("float[64]", dtype="bfloat16"), full.bfloat16())
    assert torch.equal(make("float32[64]", dtype="float64"), full.double())
    assert torch.equal(make("float32![64]", dtype="float16"), full)
    assert make("float64[2]", dtype="float16").dtype is torch.float64
    assert make("int64[2]", dtype="float16").dtype is torch.int64


def test_files(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "d.npz", x=array)
    save_file({"x": torch.from_numpy(array)}, tmp_path / "d.safetensors")
    for file in ("d.npz", "d.safetensors"):
        assert torch.equal(make(f"float32[2, 3] from {file}:x", tmp_path), torch.from_numpy(array))
        assert make(f"float32[2, 3] from {file}:x", tmp_path, dtype="float16").dtype is torch.float16
        for text, message in (
            (f"float32[2, 3] from {file}:y", r"d\.\w+ has no 'y' \(known: x\)"),
            (f"float32[3, 2] from {file}:x", r"gives shape \[2, 3\], the description says \[3, 2\]"),
            (f"int64[2, 3] from {file}:x", "gives torch.float32, the description says torch.int64"),
        ):
            with pytest.raises(ObserveError, match=message):
                make(text, tmp_path)
    with pytest.raises(ObserveError, match=r"there is no file no\.npz next to the spec"):
        make("float32[2] from no.npz:x", tmp_path)
    (tmp_path / "bad.npz").write_text("not a zip")
    with pytest.raises(ObserveError, match=r"bad\.npz cannot be read: "):
        make("float32[2] from bad.npz:x", tmp_path)


def test_callables(tmp_path, write):
    write(
        make_DOT_py="""
        import torch

        def image(shape, dtype, generator):
            return torch.rand(shape, generator=generator).to(dtype)

        def plain():
            return torch.ones(2)

        def wrong(**kwargs):
            return sorted(kwargs)

        def breaks(shape):
            raise ValueError("no image")
        """
    )
    first = make("float32[2, 2] by make.py:image", tmp_path)
    assert torch.equal(first, make("float32[2, 2] by make.py:image", tmp_path))
    assert make("float32[2] by make.py:plain", tmp_path).tolist() == [1, 1]
    with pytest.raises(ObserveError, match=r"make.py:wrong gives a list, not a torch.Tensor"):
        make("float32[2] by make.py:wrong", tmp_path)
    with pytest.raises(ObserveError, match=r"make.py has no 'imagee' \(did you mean 'image'\?\)"):
        make("float32[2] by make.py:imagee", tmp_path)
    with pytest.raises(ObserveError, match=r"make.py:breaks raised ValueError: no image") as error:
        make("float32[2] by make.py:breaks", tmp_path)
    assert error.value.details[-1].endswith('make.py:14 in breaks: raise ValueError("no image")')
    assert "make.py" in error.value.details[0]
    assert not any("imports.py" in line for line in error.value.details)


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("int46[2]", 0, "unknown dtype 'int46' (did you mean 'int64'?)"),
        ("float![2]", 0, "'float' is the dtype of the case: write float32! for exactly float32"),
        ("int64[2", 7, "']' is missing after the dims"),
        ("int64[2,, 3]", 8, "a dim is missing between the commas"),
        ("int64[2, a b]", 11, "'a b' is not a dim: expected an integer, a name or a sum like 'past + seq'"),
        ("int64[2 * 3]", 8, "'2 * 3' is not a dim: expected an integer, a name or a sum like 'past + seq'"),
        ("int64[a +]", 6, "dim 'a +' ends with a sign"),
        ("int64[-1]", 6, "dim '-1' is -1: a size cannot be negative"),
        ("int64[100000, 100000]", 0, "10000000000 elements are too many"),
        ("int64[2] < 0", 11, "expected a positive integer after '<', got '0'"),
        ("int64[2] < ", 10, "expected a positive integer after '<', got ''"),
        ("int8[2] < 129", 10, "129 does not fit int8"),
        ("float32[2] < 3", 11, "'< high' is for integers: for float32 write 'in low..high'"),
        ("int64[2] in 3", 12, "expected low..high after 'in', got '3'"),
        ("int64[2] in 3..3", 12, "the range '3..3' is empty"),
        ("uint8[2] in 3..257", 15, "257 does not fit uint8"),
        ("bool[2] in 0..1", 8, "'in low..high' is for integers and floats, not for bool"),
        ("int64[2] = 1.5", 11, "expected an integer for int64, got '1.5'"),
        ("int64[2] = inf", 11, "int64 cannot hold inf"),
        ("bool[2] = 1", 10, "expected true or false for bool, got '1'"),
        ("float32[2] = x", 13, "expected a number, got 'x'"),
        ("uint8[2] = -1", 11, "-1 does not fit uint8"),
        ("bool[2] arange", 8, "'arange' is for numbers, not for bool"),
        ("int8[200] arange", 0, "arange of 200 elements does not fit int8"),
        ("int64[2] arange 3", 16, "unexpected '3' after 'arange'"),
        ("int64[2] values 1, 2", 16, "expected a list in brackets after 'values', got '1, 2'"),
        ("int64[2] values [1 2]", 19, "',' is missing between two values"),
        ("int64[2] values [1,, 2]", 19, "a value is missing before ','"),
        ("int64[2] values [[1, 2]", 16, "unbalanced brackets after 'values'"),
        ("int64[2] values [1, 2]]", 21, "unbalanced brackets after 'values'"),
        ("int64[2] values [1, 2.5]", 20, "expected an integer for int64, got '2.5'"),
        ("int64[3] values [1, 2]", 0, "2 values for shape [3], which has 3 elements"),
        ("int64[2] padded up 1", 16, "expected 'left N' or 'right N' after 'padded', got 'up 1'"),
        ("int64[2, 3] padded left 4", 0, "'padded' by 4 does not fit the last axis of [2, 3]"),
        ("int64[] padded left 1", 0, "'padded' needs at least one row, the shape is []"),
        ("int64[2] from a.txt:k", 14, "expected FILE.npz:KEY or FILE.safetensors:KEY after 'from'"),
        ("int64[2] by f.py", 12, "expected FILE.py:CALLABLE or PACKAGE.MODULE:CALLABLE after 'by'"),
    ],
)
def test_syntax_errors(text, offset, message):
    with pytest.raises(TensorSyntaxError) as error:
        parse_tensor(text)
    assert (error.value.offset, error.value.message) == (offset, message)


def test_unknown_fill_names_the_known_ones():
    with pytest.raises(
        TensorSyntaxError, match=r"unknown fill '> 3': a fill is one of: nothing, < high, in "
    ):
        parse_tensor("int64[2] > 3")
