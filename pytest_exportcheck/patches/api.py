"""Patches as a context manager, for exports that are not made by the plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..pytrees import register_flattening_functions
from ..pytrees.make import replacement_before_exporting
from .engine import Activity, applied
from .for_transformers import transformers_patches
from .modes import PatchList
from .ours.torch_functions import torch_patches
from .patch import LOADED, Patch
from .rewrite import patches_for
from .rewrite.apply import Calls
from .rewrite.patches import Dump
from .stop_if_static import stop_if_static_patch
from .user import as_patches

__all__ = ["torch_export_patches", "torch_export_rewrite"]


@contextlib.contextmanager
def torch_export_patches(
    patch_torch: bool | int = True,
    patch_transformers: bool = False,
    patch_diffusers: bool = False,
    *,
    rewrite: Any = None,
    custom_patches: Any = None,
    stop_if_static: int = 0,
    dump_rewriting: Dump | None = None,
    verbose: int = 0,
    patch: bool = True,
    calls: Calls = (),
    dynamic_shapes: Any = None,
) -> Iterator[Callable[[Any], Any]]:
    """Caches flatten, and torch and transformers are patched, inside the block; undone on exit.

    Blocks nest. Another thread that enters one waits until this one has left it.

    Parameters
    ----------
    patch_torch, patch_transformers:
        Our patches of each: the modes ``torch`` and ``transformers``. Those of transformers are for the
        models whose modules are imported when the block is entered.
    patch_diffusers:
        Accepted; there is no patch of diffusers.
    rewrite:
        What is rewritten, as `torch_export_rewrite` takes it, with its `calls` and `dynamic_shapes`.
    custom_patches:
        Patches of your own: ``{"package.module.Class.method": replacement}``, classes with
        ``_PATCHED_CLASS_`` and ``_PATCHES_``, a context manager, `Patch` objects, or a list of these.
    stop_if_static:
        1: a dynamic axis that becomes a constant raises `StaticAxisError` at the line that does it.
    dump_rewriting:
        As `torch_export_rewrite` takes it.
    verbose:
        1: print the patches that are in place; 2: the diffs of rewritten methods too.
    patch:
        False: no patch at all, caches flatten all the same.
    calls, dynamic_shapes:
        For `rewrite`.

    Yields
    ------
    callable
        Prepares the inputs of an export; today it returns them unchanged.

    Raises
    ------
    PatchError
        A target is missing, another thread holds the patches, or something is no patch.
    """
    patches: list[Patch] = []
    if patch:
        sources = [
            *([torch_patches] if patch_torch else []),
            *([transformers_patches] if patch_transformers else []),
        ]
        patches += PatchList("torch_export_patches", sources).patches(LOADED, "onnx")
        if custom_patches is not None:
            patches += as_patches(custom_patches)
    with register_flattening_functions(patch_transformers or None), contextlib.ExitStack() as stack:
        rewritten = []
        if patch and rewrite is not None and rewrite is not False:
            # What stops the export is found with the others in place, as the mode `all` does it.
            stack.enter_context(applied(patches))
            rewritten = patches_for(
                rewrite, dump_rewriting, verbose, calls=calls, dynamic_shapes=dynamic_shapes
            )
        last = [stop_if_static_patch()] if patch and stop_if_static else []
        activity = stack.enter_context(applied([*patches, *rewritten, *last]))
        if verbose:
            _print(activity)
        yield replacement_before_exporting


def _print(activity: Activity) -> None:
    for name, patch in activity.patches.items():
        print(f"[torch_export_patches] {name}: {patch.why or 'patched'}")
    for name, reason in activity.resting.items():
        print(f"[torch_export_patches] {name} rests: {reason}")


@contextlib.contextmanager
def torch_export_rewrite(
    rewrite: Any = None,
    dump_rewriting: Dump | None = None,
    verbose: int = 0,
    *,
    calls: Calls = (),
    dynamic_shapes: Any = None,
) -> Iterator[None]:
    """Methods whose control flow depends on data are rewritten inside the block.

    Parameters
    ----------
    rewrite:
        A model, a function or method, the result of `patches.rewrite.rewrite_for_export`, or a list of these.
    dump_rewriting:
        A folder for one ``.diff`` and one ``.py`` file per method, or what is called with each.
    verbose:
        1: print what is rewritten; 2: the diffs too.
    calls:
        Observed ``(args, kwargs)`` of the model (of the function): the values at a branch are taken from
        them, and the rewriting is compared with the original on them. A model is exported with the first.
    dynamic_shapes:
        As `torch.export.export` takes them, for a model.

    Raises
    ------
    PatchError
        A branch cannot be rewritten: says where it is and what to write by hand.
    """
    with register_flattening_functions(None):
        patches = patches_for(rewrite, dump_rewriting, verbose, calls=calls, dynamic_shapes=dynamic_shapes)
        with applied(patches):
            yield
