"""Every kind of mistake: one message, at its place, in plain words."""

from __future__ import annotations

import pytest

#: section, its text (line 1 is `exportcheck: 1`, so the section starts on line 4), messages
MISTAKES = [
    ("extra", "descripton: x", ["4:1: unknown key 'descripton' (did you mean 'description'?)"]),
    ("extra", "zzz: x", ["4:1: unknown key 'zzz' (known: exportcheck, description, requires, marks, model, "
                         "observe, matrix, exporter_options, tolerance, compare, resize, expect)"]),
    ("extra", "description: 3", ["4:14: expected text, got 3"]),
    ("extra", "requires: torch", ["4:11: expected a list of texts, got 'torch'"]),
    ("extra", "marks: [a-b]",
     ["4:9: 'a-b' is not a name (letters, digits and _, not starting with a digit)"]),
    *[("extra", f"marks: [slow, {name}]",
       [f"4:15: {name!r} is a mark with a meaning of its own: marks are names to select with -m "
        "(a known failure belongs into 'expect')"])
      for name in ("skip", "skipif", "xfail", "parametrize", "usefixtures", "filterwarnings", "exportcheck")],
    ("extra", "marks: [slow, slow]", ["4:15: 'slow' is in the list twice"]),
    ("extra", "marks:", ["4:7: expected a list of texts, got nothing"]),
    ("extra", "matrix: {devices: [cpu, gpu]}", ["4:25: unknown value 'gpu' (did you mean 'cuda'?)"]),
    ("extra", "matrix: {dtypes: [flot16]}", ["4:19: unknown value 'flot16' (did you mean 'float16'?)"]),
    ("extra", "matrix: {dtypes: float32}",
     ["4:18: expected a list of float32, float16, bfloat16, float64, got 'float32'"]),
    ("extra", "matrix: {devices: [cpu, cpu]}", ["4:25: 'cpu' is in the list twice"]),
    ("extra", "matrix: {exporters: []}", ["4:21: must not be empty"]),
    ("extra", "matrix: {exporter: [a]}", ["4:10: unknown key 'exporter' (did you mean 'exporters'?)"]),
    ("extra", "matrix: cpu", ["4:9: expected a mapping, got 'cpu'"]),
    ("extra", "exporter_options: {onnx-dynamo: 3}", ["4:33: expected a mapping, got 3"]),
    ("extra", "tolerance: {atol: -1}", ["4:19: must be at least 0, got -1"]),
    ("extra", "tolerance: {rtol: .inf}", ["4:19: must be a finite number, got inf"]),
    ("extra", "tolerance: {atol: true}", ["4:19: expected a number, got true"]),
    ("extra", "tolerance: {outputs: {logits: {abs: 1}}}",
     ["4:32: unknown key 'abs' (known: atol, rtol)"]),
    ("extra", "tolerance: {devices: {cdua: {}}}", ["4:23: unknown key 'cdua' (did you mean 'cuda'?)"]),
    ("extra", "tolerance: {dtypes: {float: {}}}", ["4:22: unknown key 'float' (did you mean 'float32'?)"]),
    ("extra", "compare: {logits: {}}", ["4:19: needs one of the keys where, ties, by"]),
    ("extra", "compare: {logits: {were: a}}", ["4:20: unknown key 'were' (did you mean 'where'?)"]),
    ("extra", "compare: {logits: {where: }}", ["4:27: expected text, got nothing"]),
    ("extra", "compare: {logits: {where: a, ties: b}}",
     ["4:30: 'ties' and 'where': give exactly one of where, ties, by"]),
    ("extra", "compare: {logits: {where: a, axis: 0}}", ["4:36: must be at least 1, got 0"]),
    ("extra", "compare: {logits: {ties: a, by: 'b.py:c'}}",
     ["4:29: 'by' and 'ties': give exactly one of where, ties, by"]),
    ("extra", "compare: {logits: {by: 'b.py:c', axis: 1}}",
     ["4:34: 'axis' goes with where or ties, not with by"]),
    ("extra", "compare: {logits: {by: }}", ["4:24: expected text, got nothing"]),
    ("extra", "compare: {ids: {ties: 3}}", ["4:23: expected text, got 3"]),
    ("extra", "compare: {ids: {ties: a, axis: last}}", ["4:32: expected an integer, got 'last'"]),
    ("extra", "resize: no", ["4:9: unknown value 'no' (known: auto, off)"]),
    ("extra", "resize: 3", ["4:9: expected 'auto', 'off' or a mapping of symbols to lists of sizes, got 3"]),
    ("extra", "resize: {batch: 3}", ["4:17: expected a list of integers, got 3"]),
    ("extra", "resize: {batch: [-1, a]}",
     ["4:18: must be at least 0, got -1", "4:22: expected an integer, got 'a'"]),
    ("extra", "expect: {fails: run}", ["4:9: expected a list of mappings, got a mapping"]),
    ("extra", "expect: [{fails: exprt, reason: a}]",
     ["4:18: unknown value 'exprt' (did you mean 'export'?)"]),
    ("extra", "expect: [{fails: run}]", ["4:10: missing key 'reason'"]),
    ("extra", "expect: [{fails: run, reason: ' '}]", ["4:31: must not be empty"]),
    ("extra", "expect: [{fails: run, reason: a, when: {exportr: x}}]",
     ["4:41: unknown key 'exportr' (did you mean 'exporter'?)"]),
    ("extra", "expect: [{fails: run, reason: a, when: {device: [cuda, gpu]}}]",
     ["4:56: unknown value 'gpu' (did you mean 'cuda'?)"]),
    ("extra", "expect: [{fails: run, reason: a, when: {torch: '2.14'}}]",
     ["4:48: '2.14' is not a version condition such as '>=2.14' or '>=2.9,<2.14'"]),
    ("extra", "expect: [{fails: run, reason: a, when: {torch: 2.14}}]",
     ["4:48: expected text or a list of texts, got 2.14"]),
    ("extra", "expect: [{fails: run, reason: a, when: {graph: x}}]",
     ["4:48: observe.graphs and observe.target name no graphs, so no case has one"]),
    ("exportcheck", "exportcheck: 2", ["1:14: expected 1, got 2"]),
    ("exportcheck", "exportcheck: true", ["1:14: expected 1, got true"]),
    ("exportcheck", "exportcheck: '1'", ["1:14: expected 1, got '1'"]),
    ("model", "model: llama", ["2:8: expected a mapping, got 'llama'"]),
    ("model", "model: {}", ["2:8: needs one of the keys type, pretrained, factory"]),
    ("model", "model: {type: }", ["2:15: expected text, got nothing"]),
    ("model", "model: {seed: 1}", ["2:8: needs one of the keys type, pretrained, factory"]),
    ("model", "model: {tpye: llama}", ["2:9: unknown key 'tpye' (did you mean 'type'?)"]),
    ("model", "model: {type: a, pretrained: b, factory: 'c:d'}",
     ["2:18: 'pretrained' and 'type': give exactly one of type, pretrained, factory",
      "2:33: 'factory' and 'type': give exactly one of type, pretrained, factory"]),
    ("model", "model: {factory: 'a:b', config: {}}", ["2:25: 'config' goes with type, not with factory"]),
    ("model", "model: {type: a, online: true}", ["2:18: 'online' goes with pretrained, not with type"]),
    ("model", "model: {type: a, kwargs: {}}", ["2:18: 'kwargs' goes with factory, not with type"]),
    ("model", "model: {factory: make}",
     ["2:18: expected 'file.py:callable' or 'package.module:callable', got 'make'"]),
    ("model", "model: {type: a, seed: -1}", ["2:24: must be at least 0, got -1"]),
    ("model", "model: {type: a, seed: 1.5}", ["2:24: expected an integer, got 1.5"]),
    ("model", "model: {pretrained: a, online: yes}", ["2:32: expected true or false, got 'yes'"]),
    ("model", "model: {type: 3}", ["2:15: expected text, got 3"]),
    ("observe", "observe: {}", ["3:10: missing key 'calls'"]),
    ("observe", "observe: {calls: []}", ["3:18: at least one call is needed"]),
    ("observe", "observe: {calls: 3}", ["3:18: expected a list of calls or 'file.py:callable', got 3"]),
    ("observe", "observe: {calls: make}",
     ["3:18: expected 'file.py:callable' or 'package.module:callable', got 'make'"]),
    ("observe", "observe: {calls: [3]}", ["3:19: expected a call such as 'forward: {...}', got 3"]),
    ("observe", "observe: {calls: [{}]}", ["3:19: a call needs one of the keys forward, generate, call"]),
    ("observe", "observe: {calls: [forwrd: {}]}", ["3:19: unknown key 'forwrd' (did you mean 'forward'?)"]),
    ("observe", "observe: {calls: [{forward: {}, generate: {}}]}",
     ["3:33: one call has both 'forward' and 'generate': make them two calls"]),
    ("observe", "observe: {calls: [forward: 3]}",
     ["3:28: expected arguments by name (a mapping) or by position (a list), got 3"]),
    ("observe", "observe: {calls: [generate: [3]]}",
     ["3:29: generate takes its arguments by name: write a mapping"]),
    ("observe", "observe: {calls: [call: 3]}",
     ["3:25: expected 'file.py:callable' or 'package.module:callable', got 3"]),
    ("observe", "observe: {calls: [forward: {a-b: 3}]}", ["3:29: 'a-b' is not an argument name"]),
    ("observe", "observe: {calls: [forward: {a: hello}]}",
     ["3:32: 'hello' is neither a tensor ('int64[2, 3] < 256') nor 'previous.NAME'; for text write "
      "{str: 'hello'}"]),
    ("observe", "observe: {calls: [forward: {a: {str: 3}}]}", ["3:38: expected text, got 3"]),
    ("observe", "observe: {calls: [forward: {a: {tuple: 3}}]}", ["3:40: expected a list, got 3"]),
    ("observe", "observe: {calls: [forward: {args: 3, kwargs: 4}]}",
     ["3:35: expected a list, got 3", "3:46: expected a mapping, got 4"]),
    ("observe", "observe: {calls: [forward: {a: previous.cache}]}",
     ["3:32: 'previous.cache' in the first call: there is no previous output"]),
    ("observe", "observe: {calls: [forward: {a: 'int64[batch] < 3'}]}",
     ["3:39: unknown dim 'batch': declare it in observe.dims"]),
    ("observe", "observe: {dims: [batch], calls: [forward: {a: 'int64[2, batc]'}]}",
     ["3:57: unknown dim 'batc' (did you mean 'batch'?)"]),
    ("observe", "observe: {dims: [batch], calls: [forward: {a: 'int64[2, batch + 1]'}]}",
     ["3:57: dim 'batch' has no value in this call: give it in 'dims: {batch: ...}'"]),
    ("observe", "observe: {dims: [b], calls: [{forward: {a: 'int64[b - 3]'}, dims: {b: 2}}]}",
     ["3:51: dim 'b - 3' is -1: a size cannot be negative"]),
    ("observe", "observe: {dims: [b], calls: [{forward: {a: 'int64[b] values [1, 2]'}, dims: {b: 3}}]}",
     ["3:45: 2 values for shape [3], which has 3 elements"]),
    ("observe", "observe: {dims: [b], calls: [{forward: {a: 'int64[b]'}, dims: {b: x, c: 1}}]}",
     ["3:67: expected a size (an integer, 0 or more), got 'x'",
      "3:70: unknown dim 'c': declare it in observe.dims"]),
    ("observe", "observe: {dims: [b, b], calls: [forward: {}]}", ["3:21: 'b' is in the list twice"]),
    ("observe", "observe: {dims: [1b], calls: [forward: {}]}",
     ["3:18: '1b' is not a name (letters, digits and _, not starting with a digit)"]),
    ("observe", "observe: {calls: [forward: {}], batch_dims: abc}",
     ["3:45: expected true, false or a list of argument names, got 'abc'"]),
    ("observe", "observe: {calls: [forward: {}], value_if_missing: {a: 3, b: 'int64[p + ]'}}",
     ["3:55: expected a tensor such as 'int64[batch, seq] = 1', got 3", "3:68: dim 'p +' ends with a sign"]),
    ("observe", "observe: {calls: [forward: {}], store_n_calls: 0}", ["3:48: must be at least 1, got 0"]),
    ("observe", "observe: {calls: [forward: {}], graphs: two}", ["3:41: unknown value 'two' (known: one)"]),
    ("observe", "observe: {calls: [forward: {}], graphs: {A: [0], b: []}}",
     ["3:42: 'A' is not a graph name (lower-case letters, digits and _, starting with a letter)",
      "3:53: must not be empty"]),
    ("observe", "observe: {calls: [forward: {}, forward: {}], graphs: {a: [0, 0], b: [0, 2]}}",
     ["3:62: call 0 is twice in 'a': a call belongs to one graph",
      "3:70: call 0 is in both 'a' and 'b': a call belongs to one graph",
      "3:73: there is no call 2: 2 calls are made, counted from 0"]),
    ("observe", "observe: {calls: [forward: {}], example: 1}",
     ["3:42: there is no call 1: 1 call is made, counted from 0"]),
    ("observe", "observe: {calls: [forward: {}], example: {a: 0}}",
     ["3:42: with one graph, example is the index of a call"]),
    ("observe",
     "observe: {calls: [forward: {}, forward: {}], graphs: {ab: [0], c: [1]}, example: {abb: 0, c: 0}}",
     ["3:83: unknown graph 'abb' (did you mean 'ab'?)", "3:94: call 0 is not in graph 'c' ([1])"]),
    ("observe", "observe: {calls: [forward: {}], graphs: {a: [0]}, example: 0}",
     ["3:60: with several graphs, example is a mapping: {graph: index}"]),
    ("observe", "observe: {calls: [forward: {}], target: [a]}",
     ["3:41: expected the path of a submodule, or a mapping of names to such paths, got a list"]),
    ("observe", "observe: {calls: [forward: {}], target: {}}", ["3:41: must not be empty"]),
    ("observe", "observe: {calls: [forward: {}], target: 'a..b'}",
     ["3:41: 'a..b' names no submodule: a dotted path such as 'model.vision_tower', "
      "'model.encoder:encode' for a method of it, ':encode' for a method of the model"]),
    ("observe", "observe: {calls: [forward: {}], target: {A: a, b: c.0, c: c.0:forward}}",
     ["3:42: 'A' is not a graph name (lower-case letters, digits and _, starting with a letter)",
      "3:59: 'c.0:forward' is the target 'b' already"]),
    *[("observe", f"observe: {{calls: [forward: {{}}], target: {{a: b, c: d}}, {key}: {value}}}",
       [f"3:55: {key!r} is about one target, and here are several: write it at the target it is about "
        f"(target: {{a: {{path: ..., {key}: ...}}}})"])
      for key, value in (("graphs", "{e: [0]}"), ("example", 0), ("ignore_calls", "[1]"),
                         ("value_if_missing", "{x: 'int64[2]'}"))],
    ("observe", "observe: {calls: [forward: {}], target: {a: b, c: {path: d, batch_dims: [x], graphs: "
                "{e: [0], f: [7, 8]}, example: {f: 8}, value_if_missing: {m: 'int64[p, 1] = 1'}, "
                "ignore_calls: [9], store_n_calls: 30}}}", []),
    ("observe", "observe: {calls: [forward: {}], target: {a: b, c: {paths: d}}}",
     ["3:51: missing key 'path'", "3:52: unknown key 'paths' (did you mean 'path'?)"]),
    ("observe", "observe: {calls: [forward: {}], target: {a: b, c: {path: 'd..e'}, f: 3}}",
     ["3:58: 'd..e' names no submodule: a dotted path such as 'model.vision_tower', "
      "'model.encoder:encode' for a method of it, ':encode' for a method of the model",
      "3:70: expected the path of a submodule, or a mapping with the key 'path', got 3"]),
    ("observe", "observe: {calls: [forward: {}], target: {a: b, c: {path: b}}}",
     ["3:58: 'b' is the target 'a' already"]),
    ("observe", "observe: {calls: [forward: {}], target: {a: {path: b, graphs: {p: [0, 0], q: [0, x]}}}}",
     ["3:71: call 0 is twice in 'p': a call belongs to one graph",
      "3:79: call 0 is in both 'p' and 'q': a call belongs to one graph",
      "3:82: expected an integer, got 'x'"]),
    ("observe", "observe: {calls: [forward: {}], target: {a: {path: b, graphs: {p: [0]}, example: 0, "
                "ignore_calls: [0, 1, 1]}}}",
     ["3:82: with several graphs, example is a mapping: {graph: index}",
      "3:100: call 0 is in graph 'p': it cannot be ignored as well", "3:106: 1 is in the list twice"]),
    ("observe", "observe: {calls: [forward: {}], target: {a: {path: b, store_n_calls: 2, graphs: {p: [5]}, "
                "value_if_missing: {m: 3}, batch_dims: x}}}",
     ["3:113: expected a tensor such as 'int64[batch, seq] = 1', got 3",
      "3:129: expected true, false or a list of argument names, got 'x'"]),
    ("observe", "observe: {calls: [forward: {}], target: {a: {path: b, example: 1, ignore_calls: [1]}}}",
     ["3:64: call 1 is ignored (ignore_calls): it cannot be the example"]),
    ("observe", "observe: {calls: [forward: {}, forward: {}], ignore_calls: [1, 1], example: 1}",
     ["3:64: 1 is in the list twice", "3:77: call 1 is ignored (ignore_calls): it cannot be the example"]),
    ("observe", "observe: {calls: [forward: {}], target: {path: b, graphs: b.c}}",
     ["3:42: a mapping gives names to several targets: for one, write its path alone (target: path), and its "
      "rules beside it in 'observe'"]),
    ("observe", "observe: {calls: [forward: {}], target: a, graphs: {b: [7]}, ignore_calls: [8]}", []),
    ("observe", "observe: {calls: [forward: {}], methd: f}",
     ["3:33: unknown key 'methd' (did you mean 'method'?)"]),
]  # fmt: skip


@pytest.mark.parametrize(("section", "text", "messages"), MISTAKES, ids=[text for _, text, _ in MISTAKES])
def test_mistake(problems_of, section, text, messages):
    assert problems_of(**{section: text}) == [f"a.yaml:{message}" for message in messages]


SEVERAL = "observe: {calls: [forward: {}], target: {a: b, c: {path: d, graphs: {prefill: [0], decode: [1]}}}}"


@pytest.mark.parametrize(
    ("graph", "problems"),
    [
        ("a", []),
        ("c.prefill", []),
        ("[a, c]", []),
        ("c.prefil", ["a.yaml:4:48: unknown graph 'c.prefil' (did you mean 'c.prefill'?)"]),
        ("prefill", ["a.yaml:4:48: unknown graph 'prefill' (did you mean 'c.prefill'?)"]),
        ("[a.decode]", ["a.yaml:4:49: unknown graph 'a.decode' (did you mean 'c.decode'?)"]),
    ],
)
def test_a_condition_names_a_target_or_a_graph_of_it(problems_of, graph, problems):
    expect = f"expect: [{{fails: run, reason: a, when: {{graph: {graph}}}}}]"
    assert problems_of(observe=SEVERAL, extra=expect) == problems


def test_missing_sections(problems_of):
    assert problems_of("exportcheck: 1\n") == [
        "a.yaml:1:1: missing key 'model'",
        "a.yaml:1:1: missing key 'observe'",
    ]


def test_requirement_syntax(problems_of):
    (problem,) = problems_of(extra="requires: ['torch >>= 2']")
    assert problem.startswith("a.yaml:4:12: 'torch >>= 2' is not a requirement: ")


def test_all_problems_of_a_file_are_told_in_order(problems_of):
    text = """\
exportcheck: 1
modl: {}
model: {type: llama, sed: 1}
observe:
  dims: [batch]
  calls:
    - forward: {input_ids: "int64[2, 3] << 4"}
      dims: {batch: 2}
    - forward:
        x: >-
          int64[2,
          q]
matrix: {devices: [gpu]}
matrix: {devices: [cpu]}
"""
    assert problems_of(text) == [
        "a.yaml:2:1: unknown key 'modl' (did you mean 'model'?)",
        "a.yaml:3:22: unknown key 'sed' (did you mean 'seed'?)",
        "a.yaml:7:42: expected a positive integer after '<', got '< 4'",
        "a.yaml:10:12: unknown dim 'q': declare it in observe.dims",
        "a.yaml:13:20: unknown value 'gpu' (did you mean 'cuda'?)",
        "a.yaml:14:1: duplicate key 'matrix', first on line 13",
    ]


def test_names_are_checked_only_if_known(problems_of):
    sections = {
        "matrix": "matrix: {exporters: [onnx-dynamo, onx-dynamo], patch_modes: [hff]}",
        "options": "exporter_options: {torch-exprt: {}}",
        "expect": "expect: [{fails: run, reason: r, when: {exporter: [torch-exprt], patch_mode: nne}}]",
        "compare": "compare: {a: {by: iuo}, b: {by: iou}, c: {by: 'own.py:iuo'}, d: {ties: iuo}}",
    }
    known = {
        "exporters": ["onnx-dynamo", "torch-export"],
        "patch_modes": ["none", "hf"],
        "comparisons": ["iou"],
    }
    assert problems_of(**sections) == []
    assert problems_of(known=known, **sections) == [
        "a.yaml:4:35: unknown exporter 'onx-dynamo' (did you mean 'onnx-dynamo'?)",
        "a.yaml:4:62: unknown patch mode 'hff' (did you mean 'hf'?)",
        "a.yaml:5:20: unknown exporter 'torch-exprt' (did you mean 'torch-export'?)",
        "a.yaml:6:52: unknown exporter 'torch-exprt' (did you mean 'torch-export'?)",
        "a.yaml:6:78: unknown patch mode 'nne' (did you mean 'none'?)",
        "a.yaml:7:19: unknown comparison 'iuo' (did you mean 'iou'?)",
    ]


def test_a_comparison_that_nobody_brings(problems_of):
    assert problems_of(known={"comparisons": []}, extra="compare: {a: {by: iou}}") == [
        "a.yaml:4:19: unknown comparison 'iou': no package or conftest.py brings one; "
        "one of your own is 'file.py:callable'"
    ]


def test_a_full_spec(spec_of):
    spec = spec_of(
        """\
exportcheck: 1
description: free text
requires: ["transformers>=5.1"]
marks: [slow]
model: {type: llama, config: {vision_config: {id2label: {0: a}}}, attn_implementation: eager, seed: 3}
observe:
  dims: [batch, seq]
  calls:
    - forward: {ids: "int64[batch, seq] < 9", flag: false, n: null, s: {str: text}, t: {tuple: [1, 2.5]}}
      dims: {batch: 2, seq: 0}
    - forward: ["float32[2, 3]", 4, {deep: [previous.cache.layers.0.keys]}]
    - forward: {args: [1], kwargs: {args: 2}}
    - generate:
    - call: "calls.py:Class.method"
  batch_dims: [ids]
  value_if_missing: {mask: "int64[batch, past + seq - 1] = 1"}
  graphs: {prefill: [0], decode: [1, 2]}
  example: {decode: 1}
tolerance: {atol: 1e-5, rtol: 0, outputs: {logits: {atol: 2e-5}}, dtypes: {float16: {atol: 1e-2}}}
compare: {logits: {where: mask}}
resize: off
expect:
  - when: {exporter: onnx-dynamo, device: [cpu, cuda], graph: decode, torch: ">=2.14,<3"}
    fails: export
    reason: text
  - {fails: run, reason: always}
"""
    )
    first, second, third, fourth, fifth = spec.observe.calls
    assert first.kwargs["ids"].shape(first.dims) == (2, 0)
    assert {k: first.kwargs[k] for k in "nst"} == {"n": None, "s": "text", "t": (1, 2.5)}
    assert second.args[2]["deep"][0].path == ("cache", "layers", 0, "keys")
    assert (third.args, third.kwargs) == ((1,), {"args": 2})
    assert (fourth.kind, fourth.kwargs, fifth.kind, fifth.ref) == (
        "generate",
        {},
        "call",
        "calls.py:Class.method",
    )
    assert spec.resize == "off"
    assert spec.graph_names == ("prefill", "decode")
    assert spec.observe.graphs == {"prefill": (0,), "decode": (1, 2)}
    assert spec.tolerance.rtol == 0
    assert spec.tolerance.outputs["logits"].rtol is None
    assert spec.expect[0].when.device == ("cpu", "cuda")
    assert spec.expect[1].when.exporter == ()
    assert spec.matrix.exporters == ("torch-export", "onnx-dynamo")
    assert spec.observe.value_if_missing["mask"].names == ("batch", "past", "seq")
    with pytest.raises(Exception, match="frozen"):
        spec.resize = "auto"
