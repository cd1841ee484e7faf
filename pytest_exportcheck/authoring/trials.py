"""Calls of a model of one's own: guessed from names, annotations and layers, and tried in eager.

Each argument has forms, the likeliest first. A layer that is reached by an argument as it is (or by a view of
it) says of which form the argument must be; what the layers do not say is found by trying.
"""

from __future__ import annotations

import inspect
import itertools
import re
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..spec import parse_tensor, resolve_tensor
from .known import Call, Unknown

if TYPE_CHECKING:
    import torch

__all__ = ["tried_calls"]

#: Eager calls of one model, and ways to call it that are handed out.
_TRIALS, _WAYS = 400, 4
#: Combinations of forms that are tried at one pair of sizes.
_COMBINATIONS = 60
#: How many places a form that no layer names comes behind those that one does.
_UNLIKELY = 8

#: Sides of images where two sizes are refused (a layer behind a flattening has its number of pixels).
_SIDES = (28, 32, 64, 96, 128, 224, 299)
#: Lengths of the two calls for arguments that need not be as long as the others: no sums of other sizes.
_OWN_LENGTHS = ((5, 8), (13, 4), (7, 11))
_LENGTHS = (8, 16, 32, 64, 128, 256, 512)

#: Forms by the name of an argument, and by its annotation. ``{b}``: batch, ``{n}``: length, ``{h}``, ``{w}``:
#: pixels, ``{f}``: a width that a layer corrects.
_IDS = "int64[{b}, {n}] in 3..96"
_MASK = ("int64[{b}, {n}] padded right 2", "bool[{b}, {n}] = true", "float32[{b}, {n}] = 1")
_BY_NAME: dict[str, tuple[Any, ...]] = {
    "input_ids": (_IDS,),
    "decoder_input_ids": (_IDS,),
    "attention_mask": _MASK,
    "padding_mask": _MASK,
    "token_type_ids": ("int64[{b}, {n}] < 2",),
    "position_ids": ("int64[{b}, {n}] < {n}",),
    "pixel_values": ("float32[{b}, 3, {h}, {w}]", "float32[{b}, 1, {h}, {w}]"),
    "input_values": ("float32[{b}, {h}00]",),
    "lengths": ("int64[{b}] in 1..{n}",),
}
#: Given though they have a default: calls with padding show more.
_OPTIONAL = ("attention_mask", "padding_mask", "token_type_ids")
_SCALARS: dict[Any, Any] = {"int": 2, "float": 0.5, "bool": True, int: 2, float: 0.5, bool: True}
_DTYPES = {"LongTensor": "int64", "IntTensor": "int32", "BoolTensor": "bool", "FloatTensor": "float32"}
_CONTAINERS = re.compile(r"(typing\.)?(dict|list|tuple|str|mapping|sequence)\b", re.IGNORECASE)
#: What an argument may be that no layer takes as it is.
_ANYTHING = (
    "float32[{b}, {f}]",
    "float32[{b}, {n}, {f}]",
    "bool[{b}, {n}]",
    "int64[{b}, {n}] < 2",
    "float32[{b}]",
    "int64[{b}] < 2",
)


@dataclass(frozen=True)
class _Size:
    b: int
    n: int
    h: int
    w: int


def _sizes(varied: str) -> Iterator[tuple[_Size, _Size]]:
    """Sizes of the two calls: everything varies; then less, where the forms have such an axis."""
    yield _Size(2, 9, 32, 48), _Size(3, 6, 64, 80)
    if "{n}" in varied:
        yield _Size(2, 4, 32, 48), _Size(3, 3, 64, 80)
    if "{h}" in varied:
        for side in _SIDES:
            yield _Size(2, 9, side, side), _Size(3, 6, side, side)
    if "{n}" in varied:
        for length in _LENGTHS:
            yield _Size(2, length, 32, 48), _Size(3, length, 64, 80)


def tried_calls(model: torch.nn.Module) -> Iterator[list[Call]]:
    """Ways to call ``model.forward`` that eager takes, the likeliest first; each has two calls.

    Raises
    ------
    Unknown
        There is none. `Unknown.arguments` holds what is known all the same.
    """
    search = _Search(model)
    yield from search.ways()
    if not search.found:
        raise search.unknown()


class _Search:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.names = [parameter.name for parameter in named]
        self.required = [parameter for parameter in named if parameter.default is parameter.empty]
        self.optional = [p for p in named if p.default is None and p.name in _OPTIONAL]
        self.by_layer = list(dict.fromkeys(form for layer in model.modules() for form in _layer_forms(layer)))
        self.of_sequences = any(type(layer).__name__ in _SEQUENCES for layer in model.modules())
        self.by_layer.sort(key=lambda form: not self._is_likely(form))
        #: What a layer said of an argument that it got as it is.
        self.known: dict[str, list[str]] = {}
        #: What an argument's last axis has to be, by what a layer lacked.
        self.width: dict[str, int] = {}
        self.trials = 0
        self.found: list[list[Call]] = []
        self.refusal = ""

    def ways(self) -> Iterator[list[Call]]:
        sets = [[*self.required, *self.optional], self.required] if self.optional else [self.required]
        for parameters in sets:
            if not parameters or not all(self._is_told(parameter) for parameter in self.required):
                continue
            varied = str([self._forms(parameter) for parameter in parameters])
            for sizes in _sizes(varied):
                for calls in self._at(parameters, sizes):
                    if calls not in self.found:
                        self.found.append(calls)
                        yield calls
                    if len(self.found) >= _WAYS:
                        return
                if self.found and parameters is not sets[-1]:
                    break
            if self.found:
                return

    def unknown(self) -> Unknown:
        if not all(self._is_told(parameter) for parameter in self.required) or not self.required:
            return Unknown(f"nothing is known of the arguments of forward: {', '.join(self.names[:6])}")
        sizes = next(_sizes(""))
        arguments = {p.name: self._forms(p)[0] for p in self.required}
        filled = [{name: self._text(name, form, size) for name, form in arguments.items()} for size in sizes]
        return Unknown(f"forward takes none of the calls that were tried: {self.refusal}", filled)

    def _is_told(self, parameter: inspect.Parameter) -> bool:
        """Whether anything speaks for a form: without a layer every one is as good."""
        annotation = parameter.annotation
        named = _last_name(annotation)
        if _CONTAINERS.match(str(annotation) if typing.get_origin(annotation) else named):
            return False
        told = parameter.name in _BY_NAME or annotation in _SCALARS or named in _DTYPES
        return told or bool(self.by_layer)

    def _is_likely(self, form: str) -> bool:
        """Recurrent layers and attention take one sequence without a batch too: not meant, as a rule."""
        return not self.of_sequences or form.startswith("int64") or "{n}" in form

    def _forms(self, parameter: inspect.Parameter) -> list[Any]:
        annotation = parameter.annotation
        if annotation in _SCALARS:
            return [_SCALARS[annotation]]
        named = _last_name(annotation)
        forms: list[Any] = [*self.known.get(parameter.name, ()), *_BY_NAME.get(parameter.name, ())]
        if not parameter.name.endswith("mask"):
            forms += self.by_layer
        forms += [*(_MASK if "mask" in parameter.name else ()), *_ANYTHING]
        if named in _DTYPES:
            dtype = _DTYPES[named]
            forms = [form for form in forms if form.startswith(dtype)] or [f"{dtype}[{{b}}, {{n}}]"]
        elif annotation is parameter.empty:
            forms.append(2)
        own = self.known.get(parameter.name, [])
        claimed = {form for known in self.known.values() for form in known} - {*own}
        # What another argument was found to be is the least likely.
        return sorted(dict.fromkeys(forms), key=lambda form: form in claimed)

    def _at(
        self, parameters: Sequence[inspect.Parameter], sizes: tuple[_Size, _Size]
    ) -> Iterator[list[Call]]:
        """Calls of these sizes that eager takes."""
        again = True
        while again:
            again = False
            told = (len(self.known), len(self.width))
            for forms in _likeliest([(self._forms(p), len(self.known.get(p.name, ()))) for p in parameters]):
                chosen = {p.name: form for p, form in zip(parameters, forms, strict=True)}
                if self._runs(chosen, sizes[0]) and self._runs(chosen, sizes[1]):
                    yield [
                        Call(
                            "forward",
                            {name: self._text(name, form, size, own) for name, form in chosen.items()},
                        )
                        for size, own in zip(sizes, self._lengths(chosen, sizes), strict=True)
                    ]
                if self.trials >= _TRIALS:
                    return
                if (len(self.known), len(self.width)) != told:
                    again = True
                    break

    def _lengths(
        self, chosen: Mapping[str, Any], sizes: tuple[_Size, _Size]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """For each call the lengths of arguments that eager takes at another length than the rest.

        Source and target of a translation: of one length they would get one symbol. A mask goes with what it
        masks, so arguments are tried alone, then two and three together.
        """
        names = [name for name, form in chosen.items() if isinstance(form, str) and "{n}" in form]
        found: tuple[dict[str, int], dict[str, int]] = ({}, {})
        lengths = [pair for pair in _OWN_LENGTHS if pair[0] != sizes[0].n and pair[1] != sizes[1].n]
        groups = (group for count in (1, 2, 3) for group in itertools.combinations(reversed(names), count))
        for group in groups:
            rest = [name for name in names if name not in found[0] and name not in group]
            if not lengths or self.trials >= _TRIALS:
                break
            if len(rest) + len(group) + len(found[0]) > len(names) or not all(
                map(_has_values, (group, rest))
            ):
                continue
            tried = tuple(
                {**known, **dict.fromkeys(group, length)}
                for known, length in zip(found, lengths[0], strict=True)
            )
            if all(self._runs(chosen, size, own) for size, own in zip(sizes, tried, strict=True)):
                found = (tried[0], tried[1])
                lengths.pop(0)
        return found

    def _text(self, name: str, form: Any, size: _Size, lengths: Mapping[str, int] | None = None) -> Any:
        if not isinstance(form, str):
            return form
        own = (lengths or {}).get(name, size.n)
        return form.format(**{**vars(size), "n": own}, f=self.width.get(name, 4))

    def _runs(self, chosen: Mapping[str, Any], size: _Size, lengths: Mapping[str, int] | None = None) -> bool:
        import torch

        self.trials += 1
        given: dict[str, Any] = {}
        for name, form in chosen.items():
            value = self._text(name, form, size, lengths)
            if isinstance(value, str):
                value = resolve_tensor(parse_tensor(value), {}, name, _device(self.model), _dtype(self.model))
            given[name] = value
        free = [name for name, form in chosen.items() if isinstance(form, str) and "{f}" in form]
        handles = [
            layer.register_forward_pre_hook(lambda layer, inputs: self._look(layer, inputs, given, free))
            for layer in self.model.modules()
            if _layer_forms(layer)
        ]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model(**given)
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            self.refusal = f"{type(error).__name__}: {first}"
            return False
        finally:
            for handle in handles:
                handle.remove()
        return True

    def _look(
        self, layer: torch.nn.Module, inputs: tuple[Any, ...], given: Mapping[str, Any], free: Sequence[str]
    ) -> None:
        """Learn from what reaches a layer."""
        import torch

        value = inputs[0] if inputs else None
        if not isinstance(value, torch.Tensor):
            return
        for name, argument in given.items():
            if not isinstance(argument, torch.Tensor) or name in self.known:
                continue
            if argument.numel() and _storage(argument) == _storage(value):
                forms = [form for form in _layer_forms(layer) if self._is_likely(form)]
                self.known[name] = sorted(forms, key=self.by_layer.index)
                if name == "input_ids":
                    self.known[name] = [re.sub(r"< (\d\d+)$", r"in 3..\1", form) for form in forms]
                return
        width = getattr(layer, "in_features", getattr(layer, "input_size", None))
        if len(free) == 1 and isinstance(width, int) and value.dim() and value.shape[-1] != width:
            lacking = self.width.get(free[0], 4) + width - value.shape[-1]
            if lacking > 0 and free[0] not in self.width:
                self.width[free[0]] = lacking


def _has_values(names: Sequence[str]) -> bool:
    """Whether one of them is more than what goes with another one: masks, types, positions."""
    return any(not name.endswith(("mask", "token_type_ids", "position_ids")) for name in names)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _last_name(annotation: Any) -> str:
    return str(getattr(annotation, "__name__", annotation)).rpartition(".")[2]


def _likeliest(arguments: Sequence[tuple[Sequence[Any], int]]) -> list[tuple[Any, ...]]:
    """Combinations of forms of the arguments, by how unlikely their forms are together.

    With the forms of an argument comes how many of them a layer named: the others are far less likely.
    """
    ranks = [
        [place + (_UNLIKELY if known and place >= known else 0) for place in range(len(forms))]
        for forms, known in arguments
    ]
    found: list[tuple[int, ...]] = []
    for total in range(sum(each[-1] for each in ranks) + 1):
        if len(found) >= _COMBINATIONS:
            break
        places = [[place for place, rank in enumerate(each) if rank <= total] for each in ranks]
        found += (
            combination
            for combination in itertools.product(*places)
            if sum(each[place] for each, place in zip(ranks, combination, strict=True)) == total
        )
    return [
        tuple(forms[place] for (forms, _), place in zip(arguments, combination, strict=True))
        for combination in found[:_COMBINATIONS]
    ]


_SEQUENCES = ("RNN", "LSTM", "GRU", "MultiheadAttention")


def _layer_forms(layer: torch.nn.Module) -> list[str]:
    """What a layer takes, the likeliest first; nothing of one that says nothing of its input."""
    from torch import nn

    match layer:
        case nn.Embedding() | nn.EmbeddingBag():
            count = layer.num_embeddings
            return [f"int64[{{b}}, {{n}}] < {count}", f"int64[{{b}}] < {count}"]
        case nn.Linear():
            return [f"float32[{{b}}, {layer.in_features}]", f"float32[{{b}}, {{n}}, {layer.in_features}]"]
        case nn.RNNBase():
            axes = "{b}, {n}" if layer.batch_first else "{n}, {b}"
            return [f"float32[{axes}, {layer.input_size}]"]
        case nn.MultiheadAttention():
            axes = "{b}, {n}" if layer.batch_first else "{n}, {b}"
            return [f"float32[{axes}, {layer.embed_dim}]"]
        case nn.Conv1d() | nn.ConvTranspose1d():
            return [f"float32[{{b}}, {layer.in_channels}, {{h}}]"]
        case nn.Conv2d() | nn.ConvTranspose2d():
            return [f"float32[{{b}}, {layer.in_channels}, {{h}}, {{w}}]"]
        case nn.Conv3d() | nn.ConvTranspose3d():
            return [f"float32[{{b}}, {layer.in_channels}, {{n}}, {{h}}, {{w}}]"]
        case nn.LayerNorm() if len(layer.normalized_shape) == 1:
            return [f"float32[{{b}}, {{n}}, {layer.normalized_shape[0]}]"]
        case nn.BatchNorm1d():
            return [f"float32[{{b}}, {layer.num_features}]", f"float32[{{b}}, {layer.num_features}, {{h}}]"]
        case nn.BatchNorm2d():
            return [f"float32[{{b}}, {layer.num_features}, {{h}}, {{w}}]"]
        case _:
            return []


def _device(model: torch.nn.Module) -> str:
    return str(next((each.device for each in model.parameters()), "cpu"))


def _dtype(model: torch.nn.Module) -> Any:
    import torch

    floats = (each.dtype for each in model.parameters() if each.dtype.is_floating_point)
    return next(floats, torch.float32)
