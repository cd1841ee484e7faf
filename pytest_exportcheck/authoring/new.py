"""A first spec for a model: made up, run through the observation, and written."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExportCheckError, SpecError
from ..pytrees import flatten_with_paths, register_flattening_functions
from .calls import candidates, refusal
from .fit import PARAMETERS, alternatives, fitted, model_classes, other_classes
from .known import Call, Unknown
from .trials import tried_calls
from .write import spec_text

if TYPE_CHECKING:
    from ..observe.records import RecordedCall

__all__ = ["NO_CLASS", "Draft", "draft", "reference"]

NO_CLASS = "transformers has no model class for it: it is a part of another model's configuration"

_PADDED = "Not compared: what the cache holds at padded positions, where no value is right."
_LARGE = "The model has {:,} parameters: no rule made it smaller. Change `config` for a faster check."
_BLIND = "Text alone: no images were found that the model takes."
#: Calls that are tried with one configuration by other rules.
_TRIES = 40
#: What no other configuration changes.
_NEVER = re.compile(r"nothing is known|forward needs")
#: Arguments that hold what an earlier call left, by their names; flags (``use_cache``) are none.
_STATE = re.compile(
    r"(?!use_|return_|output_)(?:.*_)?(?:past|caches?|states?|mems?|memory|hidden|hx|carry|[hc]_?0)(?:_.*)?"
)
_LEFT_OUT = (
    "Left out, as None is the default: {}. What a call returns can be given to the next one: "
    "`{}: previous.FIELD`."
)
_GRAPHS = re.compile(r"observe: (\{graphs: .*\})")


@dataclass
class Draft:
    """What became of a model.

    Attributes
    ----------
    text:
        The spec; ``None`` if none could be made.
    builds, observed:
        Whether the model was built, and whether the stage ``observe`` passed.
    problems:
        What could not be done, one line each.
    warnings:
        What the observation warns of, one line each.
    """

    name: str
    text: str | None = None
    builds: bool = False
    observed: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def draft(
    source: str,
    path: Path,
    auto_classes: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    moved: bool = True,
) -> Draft:
    """A first spec of `source`, to be written to `path`.

    Parameters
    ----------
    source:
        A model type of transformers, a folder with a pretrained model, or ``module:callable``.
    auto_classes:
        Classes to try instead of those that transformers has for the type.
    base:
        The configuration to make small, where it is not the default of the type.
    moved:
        The spec and the file of a factory may be moved together: it is named relative to the spec.
    """
    made = Draft(source)
    for models, auto_class in _sources(source, path if moved else None, auto_classes, base, made):
        # Where no call can be made up, another configuration is no help.
        with contextlib.suppress(Unknown):
            for position, model in enumerate(models):
                if _observed(model, auto_class, path, made, tried=position > 0):
                    return made
    return made


def _sources(
    source: str, path: Path | None, auto_classes: Sequence[str], base: Mapping[str, Any] | None, made: Draft
) -> Iterator[tuple[Iterator[dict[str, Any]], str]]:
    """(mappings ``model`` of a spec, the best first; class that builds them), the best class first."""
    if ":" in source:
        yield iter([{"factory": reference(source, path)}]), ""
        return
    if Path(source).is_dir():
        folder = Path(source).resolve()
        try:
            shown = folder.relative_to(path.resolve().parent if path else "").as_posix()
        except ValueError:
            shown = folder.as_posix()
        for auto_class in auto_classes or ("AutoModelForCausalLM", "AutoModel"):
            yield iter([{"pretrained": shown, "auto_class": auto_class}]), auto_class
        return
    classes = auto_classes or model_classes(source)
    for auto_class in classes:
        yield _models(source, auto_class, base, made), auto_class
    if not classes:
        made.problems.append(NO_CLASS)
    elif not auto_classes and not made.builds:
        for auto_class in other_classes(source):
            if auto_class not in classes:
                yield _models(source, auto_class, base, made), auto_class


def _models(
    source: str, auto_class: str, base: Mapping[str, Any] | None, made: Draft
) -> Iterator[dict[str, Any]]:
    # Another class of the type takes the same configurations.
    again = made.builds
    model: dict[str, Any] = {"type": source, "auto_class": auto_class}
    try:
        config = fitted(source, auto_class, base)
    except Unknown as error:
        made.problems.append(f"{auto_class}: {error}")
        return
    yield {**model, "config": config} if config else model
    if again:
        return
    for other in alternatives(source, auto_class, base):
        if other != config:
            yield {**model, "config": other}


def reference(source: str, path: Path | None) -> str:
    """A callable of a file is named relative to the spec `path`; without one by its absolute path."""
    file, _, name = source.rpartition(":")
    if not file.endswith(".py"):
        return source
    if path is None:
        return f"{Path(file).resolve().as_posix()}:{name}"
    return f"{Path(os.path.relpath(file, path.parent)).as_posix()}:{name}"


def _observed(model: dict[str, Any], auto_class: str, path: Path, made: Draft, tried: bool = False) -> bool:
    """Whether `model` with some calls is observed; its spec is in `made` then.

    Parameters
    ----------
    tried:
        What is refused is no problem to tell of.

    Raises
    ------
    Unknown
        No call could be made up.
    """
    from ..spec import build_model, parse_spec

    label = auto_class or made.name
    # A call that is never made: the model is built before anything is known of its arguments.
    text = spec_text(model, [Call("forward", {})])
    try:
        spec = parse_spec(text, path)
        built = build_model(spec, "cpu", "float32")
    except (ExportCheckError, SpecError) as error:
        if not tried:
            said = error.message if isinstance(error, ExportCheckError) else error.problems[0].message
            made.problems.append(f"{label}: {said}")
        return False
    made.builds = True
    generation = _generation(built)
    if generation:
        model = {**model, "generation": generation}
        for key, value in generation.items():
            setattr(built.generation_config, key, value)
    size = sum(parameter.numel() for parameter in built.parameters()) if "type" in model else 0
    refusals: list[str] = []
    kept: tuple[str, list[str]] | None = None
    try:
        for number, calls in enumerate(_ways(built, auto_class)):
            if tried and number >= _TRIES:
                break
            comments = [_LARGE.format(size)] if size > PARAMETERS else []
            comments += [] if auto_class else _left_out(built, calls)
            if "pixel_values" in {*inspect.signature(built.forward).parameters} - {*calls[0].arguments}:
                comments.append(_BLIND)
            last = kept is not None
            eager = refusal(built, calls)
            if eager is None:
                way = _Way(model, calls, path, comments)
                refusals += way.refused[:1]
                made.text = made.text or way.text
                if not way.refused and not (last and way.has_lone_call):
                    kept, last = (way.text, way.warnings), last or not way.has_lone_call
            else:
                refusals.append(eager)
                made.text = made.text or spec_text(model, calls, comments=comments)
            # The next way may be one that leaves no call alone in its graph.
            if last:
                break
        if kept is not None:
            made.text, made.warnings = kept
            made.observed = True
            return True
    except Unknown as error:
        if tried:
            return False
        made.text = made.text or _template(model, built, error)
        made.problems.append(f"{label}: {error}")
        if _NEVER.match(str(error)):
            raise
        return False
    if refusals and not tried:
        made.problems.append(f"{label}: {refusals[0]}")
    return False


def _left_out(model: Any, calls: Sequence[Call]) -> list[str]:
    """A comment on caches and states that no call passes: the program will not take them."""
    given = {name for call in calls for name in call.arguments}
    names = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is None and parameter.name not in given and _STATE.fullmatch(parameter.name)
    ]
    return [_LEFT_OUT.format(", ".join(names), names[0])] if names else []


class _Way:
    """A spec with one way to call the model, observed.

    Attributes
    ----------
    text, warnings:
        The spec, and what its observation warns of.
    refused:
        Why it cannot be observed.
    has_lone_call:
        A graph has one call alone: nothing of it is dynamic.
    """

    def __init__(
        self, model: Mapping[str, Any], calls: Sequence[Call], path: Path, comments: Sequence[str]
    ) -> None:
        graphs: str | None = None
        written = [*comments]
        self.warnings: list[str] = []
        for _ in range(2):
            self.text = spec_text(model, calls, graphs, comments=written)
            self.refused = self._observe(path, calls)
            found = next((m for line in self.refused if (m := _GRAPHS.search(line))), None)
            if graphs is not None or found is None:
                break
            graphs = found[1]
            reasons = [line.strip() for line in self.refused if re.match(r"  \w+: ", line)]
            written = [*comments, "Groups of calls, each a graph:", *reasons]
        if self.refused:
            return
        if self.compare:
            written.append(_PADDED)
        self.text = spec_text(model, calls, graphs, self.compare, comments=written)
        batched = spec_text(model, calls, graphs, self.compare, comments=written, batch_dims=self.batched)
        fewer = _settled(batched, path, self.warnings)
        if fewer is not None:
            self.text, self.warnings = batched, fewer

    def _observe(self, path: Path, calls: Sequence[Call]) -> list[str]:
        from ..pipeline import SpecRun
        from ..spec import parse_spec

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = SpecRun(parse_spec(self.text, path))
            refused = _refusal(run)
            if refused is None:
                self.compare = _padded_caches(run, calls)
                self.warnings = _warnings(run)
                graphs = run.observe("cpu", "float32").graphs.values()
                self.has_lone_call = len(calls) > 1 and any(len(graph.seen) == 1 for graph in graphs)
                self.batched = _batched([call for graph in graphs for call in graph.calls])
            run.close()
        return refused or []


def _batched(calls: Sequence[RecordedCall]) -> bool | list[str]:
    """The arguments whose first axis is the batch; true: of all that have one.

    That of ``position_ids`` of several kinds, ``[4, batch, seq]``, is of the model: its size is another one
    than that of most arguments, in some call.
    """
    import torch

    batch: dict[str, bool] = {}
    for call in calls:
        first = {
            name: {
                leaf.shape[0]
                for _, leaf in flatten_with_paths(value)
                if isinstance(leaf, torch.Tensor) and leaf.dim()
            }
            for name, value in call.arguments.items()
        }
        sizes = Counter(size for found in first.values() for size in found)
        most = max(sizes, key=lambda size: sizes[size], default=0)
        for name, found in first.items():
            if found:
                batch[name] = batch.get(name, True) and found == {most}
    return True if all(batch.values()) else [name for name, is_batch in batch.items() if is_batch]


def _warnings(run: Any) -> list[str]:
    """What the observation warns of."""
    graphs = run.observe("cpu", "float32").graphs.values()
    return [warning for graph in graphs for warning in graph.shapes.warnings]


def _settled(text: str, path: Path, warned: Sequence[str]) -> list[str] | None:
    """What `text`, which says of which inputs the first axis is a batch, is warned of; ``None``: not of less.

    Two calls cannot show that the first axes of the inputs of a decoder and of an encoder are one.
    """
    from ..pipeline import SpecRun
    from ..spec import parse_spec

    if not any("axis 0 of " in warning for warning in warned):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = SpecRun(parse_spec(text, path))
        try:
            left = _warnings(run) if _refusal(run) is None else warned
            return list(left) if len(left) < len(warned) else None
        finally:
            run.close()


def _ways(model: Any, auto_class: str) -> Iterator[list[Call]]:
    """Calls that `model` may take: by the rules for models of transformers, and by its layers."""
    if auto_class or hasattr(getattr(model, "config", None), "model_type"):
        try:
            yield from candidates(model, auto_class)
        except Unknown:
            if auto_class:
                raise
    if not auto_class:
        yield from tried_calls(model)


def _padded_caches(run: Any, calls: Sequence[Call]) -> dict[str, Any]:
    """What a cache holds at padded positions is not compared: fully masked rows have no right value."""
    if not any("padded left" in str(call.arguments.get("attention_mask")) for call in calls):
        return {}
    observation = run.observe("cpu", "float32")
    compare: dict[str, Any] = {}
    with register_flattening_functions(None):
        for graph in observation.graphs.values():
            arguments = graph.example.arguments
            mask = dict(flatten_with_paths(arguments)).get("attention_mask")
            for path, leaf in flatten_with_paths(graph.eager(arguments)):
                if not re.fullmatch(r"cache\.layers\.\d+\.(keys|values)", path) or leaf.dim() != 4:
                    continue
                if mask is not None and mask.shape[-1] != leaf.shape[2]:
                    # The cache holds more than the mask tells of: an image comes before the text.
                    return {}
                compare[re.sub(r"\d+", "*", path)] = {"where": "attention_mask", "axis": 2}
    return compare


def _generation(model: Any) -> dict[str, int]:
    """Token ids without which ``generate`` refuses to begin."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return {}
    names = ["pad_token_id"]
    if getattr(model.config, "is_encoder_decoder", False):
        names.append("decoder_start_token_id")
    return {name: 0 for name in names if getattr(settings, name, None) is None}


def _template(model: dict[str, Any], built: Any, unknown: Unknown) -> str:
    """A spec to be filled in: every argument that ``forward`` needs, as a tensor of some shape."""
    parameters = inspect.signature(built.forward).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    guessed = unknown.arguments or [dict.fromkeys(needed, f"float32[{batch}, 4]") for batch in (2, 3)]
    calls = [Call("forward", arguments) for arguments in guessed]
    comments = [
        f"{str(unknown).rstrip('.')}.",
        "Give each argument its dtype and shape, in two calls that differ in what is dynamic.",
    ]
    return spec_text(model, calls, comments=comments)


def _refusal(run: Any) -> list[str] | None:
    """Why the calls cannot be observed; ``None`` if they can."""
    try:
        observation = run.observe("cpu", "float32")
    except ExportCheckError as error:
        return [error.message, *error.details]
    broken = next(iter(observation.failures.values()), None)
    return None if broken is None else [broken.message, *broken.details]
