"""What a capture depends on besides the model and its arguments: code, versions, variables, flags of torch.

Installed code is told by its version and, where a capture runs through it, by its content; what was put into
it while the process ran (a function of another file, another function under a known name, another value of a
constant) is looked for in the modules that the model's classes come from and in those of torch that every
model calls.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import os
import platform
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._config_module import ConfigModule

from ..spec.imports import siblings_of
from .content import Content, file_digest
from .installed import state_of
from .origins import is_genuine, is_installed

__all__ = ["add_flags", "add_installed", "process_digest", "variables"]

_ROOT = Path(__file__).parent.parent

#: Where commands lie that installed distributions bring.
_SCRIPTS = sysconfig.get_paths()["scripts"]

#: Variables that differ from run to run and that say nothing of a capture to torch or transformers. Where
#: code of the user's reads variables, all but the first group count. ``CI`` itself counts: torch asks for it
#: (``torch._functorch.config``).
_OF_A_TEST = re.compile(r"PYTEST_CURRENT_TEST|PYTEST_XDIST_\w+|PYTEST_VERSION|EXPORTCHECK_\w+|_|SHLVL|OLDPWD")
_OF_A_RUN = re.compile(
    # Families of names: CI services, sessions, terminals and desktops, shells, package managers.
    r"(GITHUB|RUNNER|ACTIONS|GITLAB|BUILD|BUILDKITE|JENKINS|CIRCLE|TRAVIS|AGENT|SYSTEM|TF_BUILD|DRONE|"
    r"BITBUCKET|CODEBUILD|APPVEYOR|SEMAPHORE|TEAMCITY|CIRRUS|WOODPECKER|KUBERNETES|"
    r"SSH|XDG|DBUS|GPG|LC|VSCODE|SYSTEMD|JOURNAL|INVOCATION|SUDO|WSL|"
    r"TMUX|STY|ZELLIJ|BYOBU|KITTY|WEZTERM|ALACRITTY|ITERM|KONSOLE|GNOME|KDE|VTE|WT|XPC|"
    r"BASH|ZSH|FISH|DIRENV|STARSHIP|"
    r"PIP|PIPX|PIPENV|UV|POETRY|PDM|HATCH|TOX|NOX|PIXI|MAMBA|PYENV|NVM|NPM|npm|HOMEBREW|CARGO|RUSTUP|SDKMAN"
    r")(_\w+)?|CI_\w+|PWD|TERM\w*|HIST\w*|WSLENV|COLUMNS|LINES|HOSTNAME|HOST|WINDOWID|DISPLAY|"
    r"WAYLAND_DISPLAY|XAUTHORITY|DESKTOP_SESSION|SESSION_MANAGER|LOGNAME|USER|USERNAME|MAIL|PS[0-4]|PROMPT(_COMMAND)?|RPROMPT|SHELL|MACHTYPE|HOSTTYPE|OSTYPE|"
    r"EDITOR|VISUAL|PAGER|MANPAGER|MANPATH|INFOPATH|LESS\w*|LS_COLORS|LSCOLORS|COLORTERM|COLORFGBG|CLICOLOR\w*|"
    r"NO_COLOR|FORCE_COLOR|LANG|LANGUAGE|VIRTUAL_ENV\w*|CONDA_\w+|_CE_\w+|ImageOS|ImageVersion|TMPDIR|TEMP|TMP|"
    r"COVERAGE_\w+|COV_CORE_\w+|PYTEST_\w+"
)

#: Variables that installed code writes itself, sooner or later as a run goes: where caches lie (torch does so
#: when it asks for the folder first), and that threads or profilers are started otherwise. Whether one is set
#: says what ran before, and no model has a reason to ask.
_WRITTEN_BY_LIBRARIES = frozenset(
    (
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TOKENIZERS_PARALLELISM"),
        *("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI", "NCCL_GRAPH_MIXING_SUPPORT"),
    )
)

#: Modules of torch that hold what models call.
_CALLED = (
    *("torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch.nn.modules.module"),
    *("torch.linalg", "torch.fft", "torch.special", "torch.signal.windows", "torch.nn.parameter"),
    *("torch.nn.init", "torch.nn.utils.rnn", "torch.nn.utils.parametrize", "torch.nn.attention"),
    *("torch.utils.checkpoint", "torch._jit_internal", "torch.autograd.function", "torch.compiler"),
    *("torch.nn.attention.flex_attention", "torch.distributions.utils"),
)


def variables(*, every: bool) -> dict[str, str]:
    """Environment variables that a capture may depend on.

    Parameters
    ----------
    every:
        Code of the user's reads variables: those that name a run, a terminal or a user count too.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if not _OF_A_TEST.fullmatch(name)
        and name not in _WRITTEN_BY_LIBRARIES
        and (every or not _OF_A_RUN.fullmatch(name))
    }


@functools.cache
def process_digest() -> str:
    """Versions of Python, the machine and everything installed; the content of torch's and our own code.

    The places are part of it: a capture notes the lines of source that it went through.
    """
    digest = hashlib.sha256()
    lines = [sys.version, platform.machine(), str(torch.version.git_version), repr(sys.flags)]
    lines += [str(_ROOT), sysconfig.get_paths()["purelib"], os.path.dirname(torch.__file__)]
    folders = dict.fromkeys(path for path in sys.path if os.path.isdir(path))
    lines += sorted(
        entry.name
        for folder in folders
        for entry in os.scandir(folder)
        if entry.name.endswith((".dist-info", ".egg-info", ".egg-link"))
    )
    digest.update("\n".join(lines).encode())
    for root in (_ROOT, Path(torch.__file__).parent):
        for folder, names, files in os.walk(root):
            names.sort()
            for name in sorted(files):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        digest.update(path.encode() + hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def add_flags(content: Content) -> None:
    """Add what torch was told: modes, defaults, what it may use; and filters that make warnings errors."""
    backends = torch.backends
    deterministic: Any = torch.utils.deterministic
    function_modes: Any = torch.overrides._get_current_function_mode_stack
    flags: dict[str, Any] = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "sdp": [
            getattr(backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        ],
        "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "mkldnn": (backends.mkldnn.enabled, backends.mkldnn.deterministic),
        "attention": backends.mha.get_fastpath_enabled(),
        "einsum": (backends.opt_einsum.enabled, backends.opt_einsum.strategy),
        "quantized": backends.quantized.engine,
        "uninitialized": deterministic.fill_uninitialized_memory,
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "hooks of every module": {
            name: [*hooks.values()]
            for name, hooks in sorted(vars(torch.nn.modules.module).items())
            if name.startswith("_global_") and isinstance(hooks, dict)
        },
        "function modes": list(function_modes()),
        "dispatch modes": [
            type(mode) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        ],
        "warnings": [
            (getattr(text, "pattern", text), kind, getattr(module, "pattern", module), line)
            for action, text, kind, module, line in list(warnings.filters)
            if action == "error"
        ],
    }
    content.add("flags", flags)
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, ConfigModule) and name.startswith("torch."):
            # What an environment variable says is in the key; what was set and put back is as it was.
            changed = {
                key: value
                for key in sorted(module._config)
                if not module._is_default(key) and (value := getattr(module, key)) != _default(module, key)
            }
            if changed:
                content.add(name, changed)


def _default(module: ConfigModule, key: str) -> Any:
    entry = module._config[key]
    for value in (entry.env_value_force, entry.env_value_default):
        if type(value) is not object:  # The mark of a variable that is not set.
            return value
    return entry.default


def add_installed(content: Content, classes: Sequence[type], folder: Path, named: str | None = None) -> None:
    """Add what of installed code was changed, and the files of everybody else's.

    Parameters
    ----------
    classes:
        Those of the model's modules.
    folder:
        Of the spec: files next to another one are none of its business.
    named:
        Text of the spec: of the files next to it those count that it names, and what they import (``None``:
        all). Whether another spec in the folder has had its file imported says what ran before.
    """
    own = __name__.partition(".")[0]
    met = {cls.__module__ for cls in classes}
    met |= {name for name in content.modules if name.partition(".")[0] not in (own, *sys.stdlib_module_names)}
    names = _modules_of(met)
    for name in _CALLED:
        # Whether something has imported it says what ran before; it takes milliseconds.
        with contextlib.suppress(ImportError):  # of another version of torch
            importlib.import_module(name)
    for name in sorted({*names, *_CALLED, *met}):
        module = sys.modules.get(name)
        filename = getattr(module, "__file__", None)
        if module is None or filename is None or not is_installed(filename):
            continue
        if name in names:
            content.add(name, _digest_of(filename))
        state, strangers = state_of(module)
        content.add(name, state)
        if strangers:
            content.add(name, strangers)
    for name, filename in _outside(folder, named, content.files):
        content.add(name, file_digest(filename))
    for cls, node in sorted(_pytree.SUPPORTED_NODES.items(), key=lambda entry: str(entry[0])):
        functions = (node.flatten_fn, node.unflatten_fn)
        if not all(map(is_genuine, functions)):
            content.add(f"flattening of {cls.__qualname__}", functions)
        elif cls.__module__ == "transformers.cache_utils":
            content.add(f"flattening of {cls.__qualname__}", list(functions))


@functools.cache
def _digest_of(filename: str) -> str:
    """Of installed code: it was read when it was imported."""
    return file_digest(filename)


def _outside(folder: Path, named: str | None, met: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, file) of imported modules that are no installed code, in order."""
    # Modules that torch makes itself have a name for a file.
    outside = [
        (name, filename)
        for name, module in list(sys.modules.items())
        if (filename := getattr(module, "__file__", None))
        and not is_installed(filename)
        and os.path.isabs(filename)
        # The command `pytest`, which no worker of xdist and no `python -m pytest` has.
        and not (name == "__main__" and os.path.dirname(filename) == _SCRIPTS)
    ]
    root = folder.resolve()
    siblings = siblings_of(folder)
    beside: dict[str, list[tuple[str, str]]] = {}
    others = []
    for name, filename in sorted(outside):
        if name.startswith("_exportcheck_"):
            if Path(filename).parent == root:
                beside.setdefault(Path(filename).stem, []).append((Path(filename).name, filename))
        elif name in siblings:
            beside.setdefault(name.partition(".")[0], []).append((name, filename))
        else:
            others.append((name, filename))
    wanted = beside.keys() if named is None else _reached(beside, named, set(met))
    yield from sorted({*others, *(each for top in wanted for each in beside[top])})


def _reached(beside: Mapping[str, list[tuple[str, str]]], named: str, met: set[str]) -> set[str]:
    """Names of the modules in `beside` that a spec names, whose code was met, and what these import."""
    stack = [
        top
        for top, modules in beside.items()
        if re.search(rf"\b{re.escape(top)}(\.[\w.]+)?:", named)
        or any(filename in met for _, filename in modules)
    ]
    found: set[str] = set()
    while stack:
        top = stack.pop()
        if top in found:
            continue
        found.add(top)
        for _, filename in beside[top]:
            names = _imported(Path(filename).read_bytes())
            if names is None:
                return set(beside)
            stack += [name for name in names if name in beside]
    return found


@functools.lru_cache(maxsize=256)
def _imported(source: bytes) -> frozenset[str] | None:
    """Top-level names that a file imports; ``None``: it may import by a text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            return None
    return None if names & {"importlib", "runpy", "pkgutil"} else frozenset(names)


def _modules_of(met: Iterable[str]) -> set[str]:
    """Modules of installed distributions, torch's aside, that the code of those in `met` imports by name."""
    packages = {name.partition(".")[0] for name in met} - {"torch", "builtins", *sys.stdlib_module_names}
    found: set[str] = set()
    stack = [name for name in met if name.partition(".")[0] in packages]
    while stack:
        name = stack.pop()
        module = sys.modules.get(name)
        # A lazy package holds what somebody asked for, not what the code needs.
        if name in found or type(module) is not types.ModuleType or hasattr(module, "__path__"):
            continue
        found.add(name)
        for value in list(vars(module).values()):
            owner = value.__name__ if isinstance(value, types.ModuleType) else _module_name(value)
            if owner.partition(".")[0] in packages:
                stack.append(owner)
    return found


def _module_name(value: Any) -> str:
    if isinstance(value, (type, types.FunctionType)):
        return str(value.__module__)
    return str(type(value).__module__)
