"""What observing costs: time per call and memory kept, beside `torch.onnx.InputObserver`, in one run.

    python benchmarks/observer_overhead.py                # Markdown tables, half a minute
    python benchmarks/observer_overhead.py --repeats 3    # a quick look
    python benchmarks/observer_overhead.py --json FILE    # the times alone, for `exportcheck compare`

Time: a module that returns at once, called with three tensors, and with a `DynamicCache` of 16 layers; so
what is measured is the observer and nothing else. A median over repeats, in which the ways of calling take
turns: a machine that slows down slows all of them. Recording copies the inputs; of a call beyond the limit
nothing is kept, but ours looks whether its shapes show anything new.

Memory: a tiny llama decodes 1,000 tokens with the limit at 3, each observer in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from pytest_exportcheck.observe import InputObserver
from pytest_exportcheck.pytrees import register_flattening_functions

LIMIT = 3
STEPS = 1000

OBSERVERS: dict[str, Callable[[], Any]] = {"ours": InputObserver, "torch.onnx": torch.onnx.InputObserver}


class Three(torch.nn.Module):
    """Three tensors in, one of them out."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x


class WithCache(torch.nn.Module):
    """A tensor and a cache in, the tensor out."""

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        return x


def _three() -> tuple[torch.nn.Module, dict[str, Any]]:
    x = torch.randn(2, 8, 64)
    return Three(), {"x": x, "mask": torch.ones(2, 8), "positions": torch.arange(8)}


def _with_cache() -> tuple[torch.nn.Module, dict[str, Any]]:
    cache = DynamicCache()
    for layer in range(16):
        cache.update(torch.randn(2, 4, 32, 16), torch.randn(2, 4, 32, 16), layer)
    return WithCache(), {"x": torch.randn(2, 1, 64), "cache": cache}


def _per_call(model: torch.nn.Module, inputs: dict[str, Any], calls: int) -> float:
    """Microseconds."""
    begin = time.perf_counter()
    for _ in range(calls):
        model(**inputs)
    return (time.perf_counter() - begin) / calls * 1e6


def _recording(observer: Callable[[], Any], model: torch.nn.Module, inputs: dict[str, Any]) -> float:
    calls = 20
    with observer()(model, store_n_calls=calls + 1):
        model(**inputs)  # the first one imports
        return _per_call(model, inputs, calls)


def _beyond(observer: Callable[[], Any], model: torch.nn.Module, inputs: dict[str, Any]) -> float:
    with observer()(model, store_n_calls=LIMIT):
        for _ in range(LIMIT + 2):
            model(**inputs)
        return _per_call(model, inputs, 2000)


def measure_time(repeats: int) -> dict[tuple[str, str], dict[str, float]]:
    """(arguments, phase) -> median microseconds of a call: ``bare``, and under each observer."""
    rows = {}
    for what, make in (("3 tensors", _three), ("16-layer DynamicCache", _with_cache)):
        model, inputs = make()
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(repeats):
            times.setdefault(("bare", ""), []).append(_per_call(model, inputs, 2000))
            for name, observer in OBSERVERS.items():
                for phase, run in (("beyond the limit", _beyond), ("recording", _recording)):
                    times.setdefault((name, phase), []).append(run(observer, model, inputs))
        median = {key: statistics.median(found) for key, found in times.items()}
        for phase in ("beyond the limit", "recording"):
            rows[what, phase] = {
                "bare": median["bare", ""],
                **{name: median[name, phase] for name in OBSERVERS},
            }
    return rows


def _shown(what: str, phase: str, found: dict[str, float]) -> list[str]:
    bare, our, their = found["bare"], found["ours"], found["torch.onnx"]
    cells = [f"{value:.1f} ({value / bare:.1f}x, +{value - bare:.1f} µs)" for value in (our, their)]
    return [what, phase, f"{bare:.1f}", *cells, f"{our / their:.2f}"]


def _as_json(rows: dict[tuple[str, str], dict[str, float]]) -> str:
    """Ratios only: microseconds say little of another machine."""
    figures = {
        f"{what}, {phase}": {
            "ratio": round(found["ours"] / found["torch.onnx"], 3),
            "of_bare": round(found["ours"] / found["bare"], 3),
        }
        for (what, phase), found in rows.items()
    }
    return json.dumps({"benchmark": "observer", "rows": figures}, indent=1)


def _kept(value: Any) -> Iterable[torch.Tensor]:
    """Every tensor that an object holds, whatever it is made of."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (type, torch.nn.Module)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()


def measure_memory(name: str | None) -> dict[str, float]:
    """Bytes kept after `STEPS` decode steps, by the observer of this name; ``None``: none."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    observer = None if name is None else OBSERVERS[name]()

    def decode(steps: int) -> None:
        cache = DynamicCache(config=config)
        token = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(steps):
            token = model(token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)

    with torch.no_grad(), register_flattening_functions():
        decode(STEPS)  # what the allocator grows by anyway
        before = _resident()
        block = contextlib.nullcontext() if observer is None else observer(model, store_n_calls=LIMIT)
        begin = time.perf_counter()
        with block:
            decode(STEPS)
        seconds = time.perf_counter() - begin
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _kept(observer)}
    return {"tensors": sum(tensors.values()), "resident": _resident() - before, "seconds": seconds}


def _in_a_process(name: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write ratios of the times there, and measure no memory")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.memory_of:
        name = None if options.memory_of == "none" else options.memory_of
        print(json.dumps(measure_memory(name)))
        return
    with register_flattening_functions():
        rows = measure_time(options.repeats)
    print(f"Microseconds per call, median of {options.repeats} repeats (torch {torch.__version__}):\n")
    _print_table(
        ["arguments", "phase", "bare", "ours", "torch.onnx", "ours / torch.onnx"],
        [_shown(*key, found) for key, found in rows.items()],
    )
    if options.json is not None:
        options.json.write_text(_as_json(rows), encoding="utf-8")
        return
    print(f"\n{STEPS} decode steps of a tiny llama, limit {LIMIT}, each in a process of its own:\n")
    found = {name: _in_a_process(name) for name in ("none", *OBSERVERS)}
    _print_table(
        ["observer", "tensors held", "resident memory grew by", "a step took"],
        [
            [
                name,
                f"{kept['tensors'] / 1024:.1f} KiB",
                f"{kept['resident'] / 2**20:.1f} MiB",
                f"{kept['seconds'] / STEPS * 1e6:.0f} µs",
            ]
            for name, kept in found.items()
        ],
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
