"""Registration of classes as pytree nodes: scoped, reversible, and loud about foreign registrations.

The one module that touches torch's private pytree registry (`torch.utils._pytree` and `torch.fx._pytree`,
checked on torch 2.13).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree

from ..plurals import counted
from . import caches
from .layouts import Registration, describe_layout

__all__ = [
    "FlatteningWarning",
    "register_cache_serialization",
    "register_class_flattening",
    "register_class_serialization",
    "register_flattening_functions",
    "registered_classes",
    "registration_owner",
    "unregister_cache_serialization",
    "unregister_class_flattening",
    "unregister_class_serialization",
    "without_our_flattening",
]

_LOCK = threading.RLock()

#: Classes that this module registered, with how many nested scopes hold them.
_OURS: dict[type, int] = {}

#: The classes held by each open block that registers any.
_OPEN: list[list[type]] = []

#: What was there before, by class, until the last scope that holds the class is left.
_REPLACED: dict[type, _Saved] = {}

_SUFFIX = "#pytest_exportcheck"


class FlatteningWarning(UserWarning):
    """Another library registered a class as a pytree node before us."""


def register_class_flattening(
    cls: type,
    f_flatten: Callable[[Any], tuple[list[Any], Any]],
    f_unflatten: Callable[[Any, Any], Any],
    f_flatten_with_keys: Callable[[Any], tuple[list[tuple[Any, Any]], Any]],
    f_check: Callable[[], Any] | None = None,
    *,
    to_dumpable_context: Callable[[Any], Any] | None = None,
    from_dumpable_context: Callable[[Any], Any] | None = None,
) -> bool:
    """Register `cls` as a pytree node.

    Parameters
    ----------
    f_flatten, f_unflatten, f_flatten_with_keys:
        As for `torch.utils._pytree.register_pytree_node`.
    to_dumpable_context, from_dumpable_context:
        Likewise; needed to save a program.
    f_check:
        Returns an instance; when given, a round trip of it is made at once and must keep the leaves.

    Returns
    -------
    bool
        ``True`` if newly registered, ``False`` if `cls` already was a pytree node (nothing is changed).
    """
    with _LOCK:
        if cls in _pytree.SUPPORTED_NODES:
            return False
        # Not `register_pytree_node`: that one also tells optree, where there is no way back, so that the
        # second registration of a process fails wherever optree is installed.
        _pytree._private_register_pytree_node(
            cls,
            f_flatten,
            f_unflatten,
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}{_SUFFIX}",
            flatten_with_keys_fn=f_flatten_with_keys,
            to_dumpable_context=to_dumpable_context,
            from_dumpable_context=from_dumpable_context,
        )
    if f_check is not None:
        leaves, context = f_flatten(f_check())
        again, _ = f_flatten(f_unflatten(leaves, context))
        if len(leaves) != len(again):
            unregister_class_flattening(cls)
            raise ValueError(
                f"flattening {cls.__name__} does not round trip: "
                f"{counted(len(leaves), 'leaf', 'leaves')} became {len(again)}"
            )
    return True


def unregister_class_flattening(cls: type) -> None:
    """Undo `register_class_flattening`; nothing happens if `cls` is not registered."""
    with _LOCK:
        if cls in _pytree.SUPPORTED_NODES:
            _pytree._deregister_pytree_node(cls)


def registration_owner(cls: type) -> str | None:
    """Who registered `cls`: ``pytest_exportcheck``, the name of another registration, or ``None``."""
    if cls not in _pytree.SUPPORTED_NODES:
        return None
    node = _pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
    name = str(node.serialized_type_name) if node is not None else "unknown"
    return "pytest_exportcheck" if name.endswith(_SUFFIX) else name


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _cache_classes(patch_transformers: bool | None) -> list[type]:
    if patch_transformers is False:
        return []
    if patch_transformers and importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers.cache_utils")
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return []
    seen: dict[type, None] = dict.fromkeys([module.Cache, *_subclasses(module.Cache)])
    for name, imported in list(sys.modules.items()):
        # Caches of a model's own, which are no subclasses: xLSTM, Reformer, the padding caches of codecs.
        if name.startswith("transformers.models.") and name.rpartition(".")[2].startswith(_MODEL_FILES):
            for cls in list(vars(imported).values()):
                if isinstance(cls, type) and cls.__module__ == name and _is_container(cls, module):
                    seen[cls] = None
    return list(seen)


#: Files of a model that define what its calls take and return.
_MODEL_FILES = ("modeling_", "generation_")


def _is_container(cls: type, module: Any) -> bool:
    # `DeepseekV4HCACache` is the layer of a cache.
    return caches.is_cache_class(cls) and not issubclass(cls, module.CacheLayerMixin)


def _functions(cls: type) -> tuple[Any, Any, Any]:
    module = sys.modules["transformers.cache_utils"]
    if issubclass(cls, module.EncoderDecoderCache):
        return (
            caches.flatten_encoder_decoder,
            caches.unflatten_encoder_decoder,
            caches.flatten_encoder_decoder_with_keys,
        )
    return caches.flatten_cache, caches.unflatten_cache, caches.flatten_cache_with_keys


class _Saved:
    """A foreign registration, taken out and to be put back.

    A class may also be known to `torch.fx._pytree`, by which an ExportedProgram flattens its inputs: left
    there, a foreign entry would be applied to our layout.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.node = _pytree.SUPPORTED_NODES.get(cls)
        self.serialized = _pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
        self.fx = [(table, table.pop(cls)) for table in _fx_tables() if cls in table]

    def restore(self) -> None:
        for table, entry in self.fx:
            table.setdefault(self.cls, entry)
        if self.node is None or self.cls in _pytree.SUPPORTED_NODES:
            return
        _pytree.SUPPORTED_NODES[self.cls] = self.node
        if self.serialized is not None:
            _pytree.SUPPORTED_SERIALIZED_TYPES[self.cls] = self.serialized
            _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[self.serialized.serialized_type_name] = self.cls


def _fx_tables() -> list[dict[type, Any]]:
    return [fx_pytree.SUPPORTED_NODES, fx_pytree.SUPPORTED_NODES_EXACT_MATCH]


@contextlib.contextmanager
def register_flattening_functions(patch_transformers: bool | None = True) -> Iterator[Callable[[Any], Any]]:
    """Make the cache classes of transformers pytree nodes inside the block; undone on exit.

    A foreign registration of the same class is replaced inside the block, with a `FlatteningWarning` that
    names its owner, and put back on exit. Blocks nest. Wrap observation, inference and export in one block.

    Parameters
    ----------
    patch_transformers:
        Whether the cache classes are registered; ``None``: if something imported them already, which is all
        that is needed once a model exists.

    Yields
    ------
    callable
        The identity function, for code written as ``inputs = f(inputs)``.
    """
    held: list[type] = []
    try:
        if patch_transformers is not False:
            with _LOCK:
                _OPEN.append(held)
        _hold(_cache_classes(patch_transformers), held)
        yield lambda value: value
    finally:
        _release(held)


def _foreign(cls: type) -> str:
    """Who registered `cls` before us, how, and what that means."""
    found = describe_layout(cls, _pytree.SUPPORTED_NODES[cls].flatten_fn)
    layout = f" ({found.layout})" if found.layout else ""
    advice = (
        "; exports of your own fail with it: call torch.onnx.export inside register_flattening_functions(), "
        f"or do not register the class through {found.owner} in the same process"
        if found.breaks_onnx
        else ""
    )
    return (
        f"{cls.__name__} was registered as a pytree node by {registration_owner(cls)!r}, in {found.owner}"
        f"{layout}; its layout is replaced while pytest-exportcheck works and put back afterwards{advice}"
    )


def registered_classes() -> list[Registration]:
    """How every class that is no container of Python flattens now, sorted by name."""
    with _LOCK:
        nodes = [(cls, node) for cls, node in _pytree.SUPPORTED_NODES.items() if isinstance(cls, type)]
    found = [
        describe_layout(cls, node.flatten_fn)
        for cls, node in nodes
        if cls.__module__ not in ("builtins", "collections")
    ]
    return sorted(found, key=lambda one: (one.cls.__module__, one.cls.__qualname__))


def _hold(classes: list[type], held: list[type]) -> None:
    """Register each class, or count one more holder of it; `held` grows as it goes, also where it raises."""
    with _LOCK:
        for cls in classes:
            if cls not in _OURS:
                if registration_owner(cls) is not None:
                    # An exception where warnings are errors: the caller releases what is held already.
                    warnings.warn(_foreign(cls), FlatteningWarning, stacklevel=4)
                _REPLACED[cls] = _Saved(cls)
                unregister_class_flattening(cls)
                flatten, unflatten, with_keys = _functions(cls)
                register_class_flattening(
                    cls,
                    flatten,
                    unflatten,
                    with_keys,
                    to_dumpable_context=caches.context_to_json,
                    from_dumpable_context=caches.context_from_json,
                )
            _OURS[cls] = _OURS.get(cls, 0) + 1
            held.append(cls)


def _release(held: list[type]) -> None:
    with _LOCK:
        # By identity: two blocks may hold equal lists.
        _OPEN[:] = [other for other in _OPEN if other is not held]
        for cls in held:
            if _OPEN and _OURS[cls] == 1:
                # Of a model imported since the block around this one was entered: needed until that ends.
                _OPEN[-1].append(cls)
                continue
            _OURS[cls] -= 1
            if not _OURS[cls]:
                del _OURS[cls]
                if registration_owner(cls) == "pytest_exportcheck":
                    unregister_class_flattening(cls)
                _REPLACED.pop(cls).restore()


def register_class_serialization(
    cls: type,
    f_flatten: Callable[[Any], tuple[list[Any], Any]],
    f_unflatten: Callable[[Any, Any], Any],
    f_flatten_with_keys: Callable[[Any], tuple[list[tuple[Any, Any]], Any]],
    f_check: Callable[[], Any] | None = None,
    verbose: int = 0,
) -> bool:
    """`register_class_flattening` under its older name; `verbose` prints what was done."""
    done = register_class_flattening(cls, f_flatten, f_unflatten, f_flatten_with_keys, f_check)
    if verbose:
        print(f"[register_class_serialization] {cls.__name__} {'is registered' if done else 'already was'}")
    return done


def unregister_class_serialization(cls: type, verbose: int = 0) -> None:
    """`unregister_class_flattening` under its older name."""
    unregister_class_flattening(cls)
    if verbose:
        print(f"[unregister_class_serialization] {cls.__name__} is no pytree node")


def register_cache_serialization(
    patch_transformers: bool = True, patch_diffusers: bool = False, verbose: int = 0
) -> dict[type, bool]:
    """Make the cache classes pytree nodes until `unregister_cache_serialization` gets the result.

    Prefer `register_flattening_functions`, a context manager that cannot be left without undoing it.

    Parameters
    ----------
    patch_transformers:
        Whether the cache classes of transformers are registered.
    patch_diffusers:
        Accepted; no class of diffusers needs it.

    Returns
    -------
    dict
        Class -> whether this call holds it.
    """
    held: list[type] = []
    try:
        _hold(_cache_classes(patch_transformers), held)
    except BaseException:
        _release(held)
        raise
    if verbose:
        print(f"[register_cache_serialization] {', '.join(cls.__name__ for cls in held) or 'nothing'}")
    return dict.fromkeys(held, True)


def unregister_cache_serialization(undo: dict[type, bool], verbose: int = 0) -> None:
    """Undo one `register_cache_serialization`: what was registered before is back. Twice undoes nothing."""
    held = [cls for cls, ours in undo.items() if ours]
    undo.update(dict.fromkeys(held, False))
    _release(held)
    if verbose:
        print(f"[unregister_cache_serialization] {', '.join(cls.__name__ for cls in held) or 'nothing'}")


@contextlib.contextmanager
def without_our_flattening() -> Iterator[None]:
    """Take our registrations out inside the block, for an exporter that relies on a layout of its own.

    What the block registers is removed on exit, and ours are put back. A class of a module that was imported
    in the block stays: outputs of transformers' models are registered when defined, and never again.
    """
    loaded = set(sys.modules)
    with _LOCK:
        ours = [cls for cls in _OURS if registration_owner(cls) == "pytest_exportcheck"]
        before = set(_pytree.SUPPORTED_NODES).difference(ours)
        saved = [_Saved(cls) for cls in ours]
        for cls in ours:
            unregister_class_flattening(cls)
    try:
        yield
    finally:
        with _LOCK:
            for cls in set(_pytree.SUPPORTED_NODES).difference(before):
                if cls.__module__ not in loaded:
                    continue
                unregister_class_flattening(cls)
                for table in _fx_tables():
                    table.pop(cls, None)
            for node in saved:
                node.restore()
