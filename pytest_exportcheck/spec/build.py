"""The model of a spec. torch and transformers are imported here, and only when a model is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LoadError
from ..tracebacks import user_lines
from .configs import ConfigError, build_config, mentioned, model_class
from .imports import UserCodeError, call_user, load_callable, package_folder
from .model import ModelSpec
from .names import suggest
from .seeding import seeded

if TYPE_CHECKING:
    import torch

__all__ = ["build_model", "pretrained_folder"]


def build_model(spec: ModelSpec, device: str, dtype: str) -> torch.nn.Module:
    """Build or load the model of `spec`, ready to be observed.

    Parameters
    ----------
    spec:
        The spec.
    device:
        ``cpu``, ``cuda`` or ``cuda:1``.
    dtype:
        Name of a torch dtype.

    Returns
    -------
    torch.nn.Module
        In eval mode, without gradients, on `device`, in `dtype`. Random weights depend on the seed of the
        spec alone and are drawn in float32 on the CPU, so that devices and dtypes share them. The global
        random generators are left as they were.

    Raises
    ------
    LoadError
        Whatever goes wrong; the message names the line of the spec.
    """
    import torch

    target, target_dtype = torch.device(device), getattr(torch, dtype)
    source = "type" if spec.model.type else "pretrained" if spec.model.pretrained else "factory"
    with _as_load_error(spec, source):
        with seeded(spec.model.seed, target):
            if spec.model.type is not None:
                model = _from_type(spec)
            elif spec.model.pretrained is not None:
                model = _from_pretrained(spec, target_dtype)
            else:
                model = _from_factory(spec)
        model.eval()
        model.requires_grad_(False)
        _cast(model, target_dtype)
        model.to(target)
    _set_generation(spec, model)
    return model


def pretrained_folder(spec: ModelSpec) -> Path | None:
    """The local folder that ``pretrained`` names, None for a hub id or another source."""
    name = spec.model.pretrained
    if name is None:
        return None
    if name.startswith("package:"):
        return package_folder(name)
    folder = spec.folder / name
    return folder.resolve() if folder.exists() else None


@contextmanager
def _as_load_error(spec: ModelSpec, source: str) -> Iterator[None]:
    """Everything but KeyboardInterrupt becomes a LoadError that names a line; SystemExit too."""
    try:
        yield
    except LoadError:
        raise
    except ConfigError as error:
        raise LoadError(f"{spec.place('model', *error.where)}: {error.message}") from error
    except UserCodeError as error:
        raise LoadError(f"{spec.place('model', source)}: {error.message}", details=error.details) from error
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(
            f"{spec.place('model', source)}: cannot build the model: {type(error).__name__}: {first}",
            details=user_lines(error),
        ) from error


def _attention(spec: ModelSpec) -> dict[str, Any]:
    name = spec.model.attn_implementation
    return {} if name is None else {"attn_implementation": name}


def _from_type(spec: ModelSpec) -> torch.nn.Module:
    import torch

    cls = model_class(spec.model.auto_class)
    try:
        config = build_config(str(spec.model.type), spec.model.config)
    except ConfigError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        raise LoadError(
            f"{spec.place('model', 'config')}: transformers refuses this config: {type(error).__name__}: "
            f"{' '.join(line.strip() for line in first[:3])}",
            details=user_lines(error),
        ) from error
    # Auto classes have a public from_config; a model class only has the one they call.
    make = getattr(cls, "from_config", None) or cls._from_config
    model: torch.nn.Module = make(config, dtype=torch.float32, **_attention(spec))
    return model


def _from_pretrained(spec: ModelSpec, dtype: torch.dtype) -> torch.nn.Module:
    cls = model_class(spec.model.auto_class)
    folder = pretrained_folder(spec)
    if folder is None and _looks_like_path(str(spec.model.pretrained)):
        raise UserCodeError(f"there is no folder {spec.model.pretrained} next to the spec")
    options: dict[str, Any] = {"local_files_only": not spec.model.online, "trust_remote_code": False}
    if folder is None and spec.model.revision is not None:
        options["revision"] = spec.model.revision
    try:
        model: torch.nn.Module = cls.from_pretrained(
            str(folder or spec.model.pretrained), dtype=dtype, **options, **_attention(spec)
        )
    except OSError as error:
        if folder is not None or spec.model.online:
            raise
        raise UserCodeError(
            f"{spec.model.pretrained!r} is not a folder next to the spec and not in the local hub cache; "
            "download it beforehand, or set 'online: true'",
            user_lines(error),
        ) from error
    return model


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _from_factory(spec: ModelSpec) -> torch.nn.Module:
    import torch

    ref = str(spec.model.factory)
    function = load_callable(ref, spec.folder)
    model = call_user(function, ref, spec.folder, **spec.model.kwargs)
    if not isinstance(model, torch.nn.Module):
        raise UserCodeError(f"{ref} returned a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserCodeError(
            f"{ref} returned a {type(model).__name__}: TorchScript can neither be observed nor captured by "
            "torch.export, return the Python module that it was made from"
        )
    lazy = [name for name, parameter in model.named_parameters() if torch.nn.parameter.is_lazy(parameter)]
    if lazy:
        raise UserCodeError(
            f"{ref} returned a model whose {lazy[0]} has no shape yet: call it once before it is returned, "
            "so that its weights depend on the seed of the spec alone"
        )
    return model


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point weights.

    A transformers model is cast as `from_pretrained` would load it: buffers that are not saved (rotary
    frequencies) and modules that ask for it stay in float32. Any other module is cast as by
    ``module.to(dtype)``, except to float32: its factory may have built parts of it in another dtype.
    """
    import torch

    # transformers takes seconds to import, and a model of its classes has imported it already.
    utils = sys.modules.get("transformers.modeling_utils")
    if utils is None or not isinstance(model, utils.PreTrainedModel):
        # float32 is the default: it leaves a factory's model, and its inputs, in the dtypes they were made
        # in.
        if dtype is not torch.float32:
            model.to(dtype)
        return
    keep: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    saved = model.state_dict(keep_vars=True)
    half = dtype in (torch.float16, torch.bfloat16)
    for name, tensor in saved.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        if half and keep.intersection(name.split(".")):
            continue
        tensor.data = tensor.data.to(dtype)
    if dtype is torch.float64:
        model.to(dtype)  # nothing is lost by widening the rest
    model.config.dtype = dtype


def _set_generation(spec: ModelSpec, model: torch.nn.Module) -> None:
    if not spec.model.generation:
        return
    config = getattr(model, "generation_config", None)
    if config is None:
        raise LoadError(
            f"{spec.place('model', 'generation')}: {type(model).__name__} has no generation_config "
            "(is auto_class right?)"
        )
    for key, value in spec.model.generation.items():
        # Some models read settings of their own from it (whisper: is_multilingual), which no class declares.
        if not hasattr(config, key) and not mentioned(type(model), key, "generation_config"):
            names = [name for name in vars(config) if not name.startswith("_")]
            raise LoadError(
                f"{spec.place('model', 'generation', key)}: generation_config has no {key!r}"
                f"{suggest(key, names)}"
            )
        setattr(config, key, value)
