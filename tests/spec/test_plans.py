"""Calls: inputs, earlier outputs, user callables."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.spec import build_calls, build_model

from .conftest import TINY_LLAMA


class Recorder(torch.nn.Module):
    """Returns what it was given."""

    def forward(self, *args, **kwargs):
        return {"args": args, "kwargs": kwargs, "deep": [{"x": torch.ones(1)}, None]}

    def other(self, *args, **kwargs):
        return "other"


def plans_of(spec, dtype="float32", **options):
    return build_calls(spec, "cpu", dtype, **options)


def run_all(plans, model=None):
    previous, outputs = None, []
    for plan in plans:
        previous = plan.run(model or Recorder(), previous)
        outputs.append(previous)
    return outputs


@pytest.fixture
def calls_spec(spec_of):
    def calls_spec(calls, rest=""):
        return spec_of(observe=f"observe: {{calls: {calls}{rest}}}")

    return calls_spec


def test_arguments(calls_spec):
    calls = (
        "[{forward: {x: 'float32[2, 3]', n: null, t: {tuple: [1, 'int64[1] = 4']},"
        " s: {str: a}, d: {k: [true]}}},"
        " {forward: ['float32[2]', 4]}, {forward: {args: [1], kwargs: {b: 2.5}}}, {forward: {}}]"
    )
    plans = plans_of(calls_spec(calls))
    places = [f"a.yaml:3:{18 + found.start()}" for found in re.finditer("{forward", calls)]
    assert [(plan.index, plan.kind, plan.place) for plan in plans] == [
        (i, "forward", place) for i, place in enumerate(places)
    ]
    first, second, third, fourth = run_all(plans)
    assert first["args"] == ()
    assert first["kwargs"]["x"].shape == (2, 3)
    assert first["kwargs"]["t"] == (1, torch.tensor([4]))
    assert (first["kwargs"]["n"], first["kwargs"]["s"], first["kwargs"]["d"]) == (None, "a", {"k": [True]})
    assert second["args"][1] == 4
    assert (third["args"], third["kwargs"]) == ((1,), {"b": 2.5})
    assert (fourth["args"], fourth["kwargs"]) == ((), {})


def test_inputs_are_the_same_in_every_run_dtype_and_process(calls_spec):
    text = "[{forward: {x: 'float32[4]', y: 'float32[4]'}}, {forward: {x: 'float32[4]'}}]"
    plans = plans_of(calls_spec(text))
    first, second = (output["kwargs"] for output in run_all(plans))
    assert not torch.equal(first["x"], first["y"]), "arguments differ"
    assert not torch.equal(first["x"], second["x"]), "calls differ"
    expected = first["x"].clone()
    first["x"].zero_()
    assert torch.equal(run_all(plans)[0]["kwargs"]["x"], expected), "a model may write into its inputs"
    assert torch.equal(run_all(plans_of(calls_spec(text), "float16"))[0]["kwargs"]["x"], expected.half())


def test_previous(calls_spec):
    spec = calls_spec(
        "[forward: {}, forward: {a: previous.deep.0.x, b: [previous.deep]}, forward: {a: previous}]"
    )
    first, second, third = run_all(plans_of(spec))
    assert torch.equal(second["kwargs"]["a"], torch.ones(1))
    assert second["kwargs"]["a"] is not first["deep"][0]["x"]
    assert second["kwargs"]["b"][0] is not first["deep"]
    assert third["kwargs"]["a"].keys() == second.keys()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("previous.dep", "a.yaml:3: 'previous.dep': previous.dep is not there (did you mean 'deep'?); "
                         "previous is a dict"),
        ("previous.deep.5", "a.yaml:3: 'previous.deep.5': previous.deep.5 is not there (known: 0, 1); "
                            "previous.deep is a list"),
        ("previous.deep.1", "a.yaml:3: 'previous.deep.1': previous.deep.1 is None; previous.deep is a list"),
        ("previous.cache", "a.yaml:3: 'previous.cache': previous.cache is not there "
                           "(known: args, kwargs, deep); previous is a dict"),
    ],
)  # fmt: skip
def test_previous_that_is_not_there(calls_spec, reference, message):
    with pytest.raises(ObserveError) as error:
        run_all(plans_of(calls_spec(f"[forward: {{}}, forward: {{a: {reference}}}]")))
    assert error.value.message == message


def test_method(calls_spec):
    assert run_all(plans_of(calls_spec("[forward: {}]", ", method: other"))) == ["other"]


def test_hooks_run_and_gradients_are_off(calls_spec):
    model, seen = Recorder(), []
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    run_all(plans_of(calls_spec("[forward: {}]")), model)
    assert seen == [False]


def test_an_input_that_cannot_be_built_names_its_line(spec_of):
    spec = spec_of(
        "exportcheck: 1\nmodel: {factory: 'f.py:make'}\nobserve:\n  calls:\n    - forward:\n"
        "        args:\n          - 1\n        kwargs:\n          x: float32[2] from no.npz:x\n"
    )
    with pytest.raises(ObserveError) as error:
        plans_of(spec)
    assert error.value.message == (
        "a.yaml:9: tensor 'float32[2] from no.npz:x': there is no file no.npz next to the spec"
    )


def test_a_real_model_with_its_cache_and_generate(spec_of):
    spec = spec_of(TINY_LLAMA)
    model = build_model(spec, "cpu", "float32")
    plans = plans_of(spec)
    state = torch.get_rng_state()
    _, second, tokens = run_all(plans, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert second.logits.shape == (2, 2, 32)
    cache = next(
        value for name in ("cache", "past_key_values") if (value := getattr(second, name, None)) is not None
    )
    assert cache.get_seq_length() == 6
    assert plans[2].kind == "generate"
    assert tokens.shape == (2, 6)
    assert torch.equal(run_all(plans, model)[2], tokens), "sampling is seeded"
    other_name = spec_of(TINY_LLAMA.replace("previous.cache", "previous.past_key_values"))
    assert torch.equal(run_all(plans_of(other_name), model)[1].logits, second.logits)
    no_cache = spec_of(TINY_LLAMA.replace("use_cache: true", "use_cache: false"))
    with pytest.raises(
        ObserveError, match=r"a\.yaml:11: 'previous.cache': .*does the previous call have use_cache"
    ):
        run_all(plans_of(no_cache), model)


CALLS = """
import torch

KEPT = torch.ones(2)


class Holder:
    def __init__(self):
        self.inner = [torch.ones(2)]
        self.name = "kept"


def listed(dtype, device, folder=None, model="absent"):
    assert dtype is torch.float16 and device == torch.device("cpu") and folder is None
    x = torch.rand(2)
    return [((x, x), {"h": Holder(), "i": torch.ones(1, dtype=torch.int64), "m": model}), ([], {})]


def calling(model, *, dtype):
    model(1)
    return model(2, d=dtype)


def nothing():
    return []


def odd():
    return [((), {}), (1, 2)]


def breaks():
    return [][0]
"""


def test_a_callable_that_lists_calls(calls_spec, write):
    write(calls_DOT_py=CALLS)
    first, second = run_all(plans_of(calls_spec("'calls.py:listed'"), "float16", model="given"))
    x, same = first["args"]
    assert x is same, "one tensor given twice stays one"
    assert x.dtype is torch.float16
    assert first["kwargs"]["h"].inner[0].dtype is torch.float16
    assert first["kwargs"]["h"].name == "kept"
    assert first["kwargs"]["i"].dtype is torch.int64
    assert first["kwargs"]["m"] == "given"
    assert second["kwargs"] == {}


@pytest.mark.parametrize("calls", ["'calls.py:calling'", "[call: 'calls.py:calling']"])
def test_a_callable_that_is_given_the_model(calls_spec, write, calls):
    write(calls_DOT_py=CALLS)
    (plan,) = plans_of(calls_spec(calls))
    output = plan.run(Recorder(), None)
    assert plan.kind == "custom"
    assert (output["args"], output["kwargs"]) == ((2,), {"d": torch.float32})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "calls.py:nothing must return a list of (args, kwargs), got a list of length 0"),
        ("odd", "calls.py:odd: item 1 is not (args, kwargs), it is a tuple of length 2"),
        ("breaks", "calls.py:breaks raised IndexError: list index out of range"),
        ("brake", "calls.py has no 'brake' (did you mean 'breaks'?)"),
    ],
)
def test_callables_that_fail(calls_spec, write, name, message):
    write(calls_DOT_py=CALLS)
    with pytest.raises(ObserveError) as error:
        plans_of(calls_spec(f"'calls.py:{name}'"))
    assert error.value.message == f"a.yaml:3: {message}"


@pytest.mark.parametrize("given", ["cache", "past_key_values"])
@pytest.mark.parametrize("known", ["cache", "past_key_values"])
def test_the_cache_goes_under_the_name_that_the_model_has_for_it(given: str, known: str) -> None:
    from pytest_exportcheck.spec.plans import _as_called

    namespace: dict[str, object] = {}
    exec(f"def forward(x, {known}=None, **kwargs): pass", namespace)
    assert _as_called(namespace["forward"], {"x": 1, given: 2}) == {"x": 1, known: 2}  # type: ignore[arg-type]


def test_a_name_that_no_parameter_has_stays() -> None:
    from pytest_exportcheck.spec.plans import _as_called

    assert _as_called(lambda **kwargs: None, {"cache": 1}) == {"cache": 1}
    both = {"cache": 1, "past_key_values": 2}
    assert _as_called(lambda cache, **kwargs: None, both) == both
