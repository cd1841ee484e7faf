"""A configuration made small: from the default values of a model type to those that differ in a tiny model.

The rules go by the names of the values, and keep what values have to do with each other: equal widths stay
equal, heads divide widths, lists with an entry per layer lose the same entries, token ids stay inside the
vocabulary. They are rules of thumb: `fit.py` takes back the ones that a model refuses.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["filled", "is_token_id", "likely", "reduced", "with_chained_widths", "with_its_widths"]

WIDTH = 32
INNER = 64
HEADS = 4
HEAD_DIM = WIDTH // HEADS
LAYERS = 2
VOCABULARY = 128
PATCH = 8
IMAGE = 32
#: Images of models that halve them in several stages.
STAGED_IMAGE = 64
#: Token ids from here on are made small.
FIRST_ID = 100

_TOKEN_ID = re.compile(r"(token_ids?|token_index|token_indices|tokens_ids?)$")
_VOCABULARY = re.compile(r"(^|_)vocab_size|vocab_size$|codebook_size$|^n_vocab$|^num_embeddings$")
_NOT_LAYERS = re.compile(r"feat_extract|adapter|residual|conv|lstm|nextn|kv_shared|fuser|levels")
_LAYERS = re.compile(r"(^|_)(n_?layers?|num_hidden_layers|num_layers|layers|depth|num_blocks)$|_num_layers$")
_LAYER_COUNTS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
_KV_HEADS = re.compile(r"(key_value_heads|kv_heads|num_key_heads|n_head_kv)$")
_HEADS = re.compile(r"(^|_)(num_heads|n_heads?|heads|num_attention_heads_per_stage)$")
_HEAD_DIM = re.compile(r"(^|_)(head_dim|d_kv|dim_head|kv_channels|rotary_dim|head_size|attention_head_size)$")
_INNER = re.compile(r"(ffn|intermediate|feedforward|feed_forward|mlp_(hidden_)?(dim|size)|inner|d_ff)")
_NO_WIDTH = re.compile(
    r"image|patch|window|kernel|block|chunk|batch|max|stride|pool|grid|tile|^num_(?!filters|pos_feats|mel)|scale|queue"
    r"|type_vocab|bucket|sampl|frame|crop|temporal|spatial|merge|position|context|seq|length|input_size|dropout|group"
    r"|rate|hop|expand|conv_dim$|state|time|mel|ratio|bins|topk|ids?$|index|pad|tubelet|fpn_top|level"
)
_WIDTH = re.compile(
    r"hidden|dim|d_model|n_embd|embed|channels|width|projection|feature|rank|filters|size|planes|pos_feats"
)
_EXPERTS = re.compile(r"(^|_)(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts)$")
_EXPERTS_USED = re.compile(r"(per_tok(en)?|moe_topk|moe_top_k|top_k_experts|moe_k)$")
_AT_MOST = {
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "max_window_layers": LAYERS, "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0,
    "num_queries": 10, "mamba_n_groups": 1, "num_hash_layers": 1,
}  # fmt: skip
_LAYER_INDICES = re.compile(r"(ind(ex|ic)e?s|global_attn_indexes|mlp_only_layers|_layers)$")
#: Lists with a word for the kind of each layer; a shorter list is repeated.
_PATTERN = re.compile(r"(block_types|_pattern)$")
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")
#: So many of those that are ``None`` are given alone.
_ALONE = 5
#: What a value may be that is ``None`` by default, by its name.
_LIKELY: tuple[tuple[re.Pattern[str], Any], ...] = (
    (_KV_HEADS, HEADS), (_EXPERTS_USED, 2), (_EXPERTS, 4), (_HEAD_DIM, HEAD_DIM), (_VOCABULARY, VOCABULARY),
    (re.compile(r"^(n_group|topk_group|n_shared_experts|pad_token_id)$"), 1),
    (re.compile(r"^image_token_(id|index)$"), VOCABULARY - 2),
    (re.compile(r"^mask_token_id$"), VOCABULARY - 3), (re.compile(r"^prediction_length$"), 4),
    (re.compile(r"^sliding_window$"), 16), (re.compile(r"^layer_types$"), ["full_attention"] * LAYERS),
    (re.compile(r"^mlp_layer_types$"), ["dense", "sparse"]),
    (re.compile(r"_budget$"), 8), (re.compile(r"compress_ratio$"), 2), (_HEADS, HEADS), (_INNER, INNER),
    (re.compile(r"^(vocab_)?(hidden_size|d_model)$"), WIDTH),
    (re.compile(r"dropout"), 0.0), (re.compile(r"^rope_theta$"), 10000.0),
)  # fmt: skip


def reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """What to give the configuration class so that its model is small.

    Parameters
    ----------
    config:
        The default configuration, as ``to_dict()`` gives it; sub-configurations are mappings that have a
        ``model_type``.

    Returns
    -------
    dict
        The values that differ, those of sub-configurations in mappings of their own.
    """
    ids = _ids(config)
    return _reduce(config, ids)


def with_its_widths(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that are widths: fewer layers, tokens and experts, smaller images."""

    def kept(key: str, value: Any, small: Any) -> Any:
        ints = value if isinstance(value, (list, tuple)) else [value]
        wide = _is_width(key) and all(isinstance(item, int) for item in ints)
        return value if wide and not _VOCABULARY.search(key) and not _TOKEN_ID.search(key) else small

    return _each(config, values, kept)


def with_chained_widths(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with other widths: equal ones stay equal everywhere, as stages that follow each other need.

    A width becomes a power of two, `INNER` at most; below 16 it stays.
    """

    def chained(key: str, value: Any, small: Any) -> Any:
        if not (_is_width(key) or key == "conv_dim") or _HEAD_DIM.search(key) or _VOCABULARY.search(key):
            return small
        if _HEADS.search(key) or _KV_HEADS.search(key) or _TOKEN_ID.search(key):
            return small
        if isinstance(value, int) and not isinstance(value, bool):
            return _power(value)
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
            return [_power(item) for item in value]
        return small

    return _each(config, values, chained)


def filled(config: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`values` with one for each key that the configuration leaves ``None``: for all of them, then for one.

    Some architectures have no default for what every pretrained model of theirs sets.
    """
    keys = list(_empty(config))
    if keys:
        yield _with(values, keys)
        for key in keys[:_ALONE] if len(keys) > 1 else ():
            yield _with(values, [key])


def _with(
    values: Mapping[str, Any], items: Sequence[tuple[tuple[tuple[str, str], ...], str, Any]]
) -> dict[str, Any]:
    made = copy.deepcopy(dict(values))
    for path, key, value in items:
        inner = made
        for part, model_type in path:
            inner = inner.setdefault(part, {"model_type": model_type})
        inner[key] = value
    return made


def _empty(
    config: Mapping[str, Any], path: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[str, str], ...], str, Any]]:
    """(where, key, value to give it) for each ``None`` that may be a size."""
    for key, value in config.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _empty(value, (*path, (key, value["model_type"])))
        elif value is None:
            size = likely(key)
            if size is not None:
                yield path, key, size


def likely(key: str) -> Any:
    """What a value of that name may be; ``None``: anything."""
    return next((size for pattern, size in _LIKELY if pattern.search(key)), None)


def _each(
    config: Mapping[str, Any], values: Mapping[str, Any], rule: Callable[[str, Any, Any], Any]
) -> dict[str, Any]:
    """`values` as `rule` (key, default, small value) has them."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        small = values.get(key, value)
        if isinstance(value, Mapping):
            if (
                "model_type" in value
                and isinstance(small, Mapping)
                and small.get("model_type") == value["model_type"]
            ):
                inner = _each(value, small if small is not value else {}, rule)
                small = {"model_type": value["model_type"], **inner} if inner else value
        else:
            small = rule(key, value, small)
        if small != value:
            made[key] = small
    return made


def is_token_id(key: str) -> bool:
    """Whether the value of `key` is a token's number (or a list of them)."""
    return bool(_TOKEN_ID.search(key))


def _is_width(key: str) -> bool:
    if any(each.search(key) for each in (_INNER, _HEADS, _KV_HEADS, _HEAD_DIM)):
        return True
    return bool(_WIDTH.search(key)) and not _NO_WIDTH.search(key)


def _power(value: int) -> int:
    return value if value < 16 else min(1 << (value.bit_length() - 1), INNER)


def _reduce(config: Mapping[str, Any], ids: Mapping[int, int]) -> dict[str, Any]:
    chosen = _chosen_layers(config)
    made: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("id2label", "label2id", "dtype", "architectures", "transformers_version"):
            continue
        if key == "per_layer_config" and isinstance(value, Mapping):
            small = _small_layers(value, config, ids, chosen)
        else:
            small = _small(key, value, config, ids, chosen)
        if small != value:
            made[key] = small
    _relate(config, made)
    _keep_kinds(config, made)
    taps, count = _taps(config), made.get("num_hidden_layers")
    if taps > 1 and count is not None:
        made["num_hidden_layers"] = count = max(count, taps)
        made["out_indices"] = list(range(count - taps + 1, count + 1))
        made["out_features"] = [f"stage{index}" for index in made["out_indices"]]
    return made


def _keep_kinds(config: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Of layers whose kind follows from their index, one of each kind stays."""
    count = made.get("num_hidden_layers", config.get("num_hidden_layers"))
    if not isinstance(count, int) or count == config.get("num_hidden_layers"):
        return
    for key, value in config.items():
        if key.endswith("_layer_period") and isinstance(value, int) and value > count:
            # The last layer is the one that differs.
            made[key] = count
            offset = key.removesuffix("period") + "offset"
            if isinstance(config.get(offset), int):
                made[offset] = count - 1
        elif key.endswith("attention_interval") and isinstance(value, int) and value > count:
            made[key] = count
        elif key == "attn_layer_indices" and not value:
            made[key] = [count - 1]
        elif _PATTERN.search(key) and _are_words(value) and len(value) > count:
            kinds = list(dict.fromkeys(value))
            made[key] = kinds[:count] if len(kinds) <= count else list(value)
            if len(kinds) > count:
                made["num_hidden_layers"] = len(value)
        elif key == "layer_types" and value and set(value) == {"linear_attention"}:
            # Caches of linear attention alone have no length.
            made[key] = ["linear_attention"] * (count - 1) + ["full_attention"]


def _small_layers(
    layers: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[int, int], chosen: list[int]
) -> dict[str, Any]:
    """What single layers have otherwise, under the number of each layer that stays."""
    digits = max(map(len, layers), default=0)
    return {
        f"{place:0{digits}}": {
            key: _small(key, value, {**config, **layers[number]}, ids, chosen)
            for key, value in layers[number].items()
        }
        for place, index in enumerate(chosen)
        if (number := f"{index:0{digits}}") in layers
    }


def _are_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _small(key: str, value: Any, config: Mapping[str, Any], ids: Mapping[int, int], chosen: list[int]) -> Any:
    if isinstance(value, Mapping):
        if key == "backbone_config" and str(value.get("model_type")).startswith("timm_"):
            # timm is another package; this one is at hand.
            return dict(_RESNET)
        if "model_type" in value:
            inner = _reduce(value, ids)
            return {"model_type": value["model_type"], **inner} if inner else value
        return _small_rope(value, config) if key in _ROPE else value
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _small_int(key, value, config, ids)
    if isinstance(value, (list, tuple)):
        return _small_list(key, list(value), config, ids, chosen)
    return value


def _small_int(key: str, value: int, config: Mapping[str, Any], ids: Mapping[int, int]) -> int:
    if _TOKEN_ID.search(key):
        return ids.get(value, value)
    if key in _AT_MOST:
        return min(value, _AT_MOST[key])
    if _VOCABULARY.search(key):
        return min(value, VOCABULARY)
    if _LAYERS.search(key) and isinstance(config.get("depths"), (list, tuple)):
        return value
    if _LAYERS.search(key) and not _NOT_LAYERS.search(key):
        return (
            min(value, max(LAYERS, len(_chosen_layers(config))))
            if key in _LAYER_COUNTS
            else min(value, LAYERS)
        )
    if key.endswith("groups") and value > WIDTH:
        return WIDTH
    if _EXPERTS_USED.search(key):
        return min(value, 2)
    if _EXPERTS.search(key):
        return min(value, 4)
    if _KV_HEADS.search(key):
        heads = config.get(re.sub(r"key_value_|kv_|key_", lambda m: {"key_": "value_"}.get(m[0], ""), key))
        heads = heads or config.get("num_attention_heads")
        return min(value, HEADS if heads == value else 2)
    if _HEADS.search(key):
        return min(value, HEADS)
    if _HEAD_DIM.search(key):
        return min(value, HEAD_DIM)
    if key == "image_size":
        return _image(config) if value > _image(config) else value
    if key in ("patch_size", "vision_patch_size") and value > PATCH and not _staged(config):
        return PATCH
    if _INNER.search(key):
        return min(value, INNER)
    if value >= WIDTH and _WIDTH.search(key) and not _NO_WIDTH.search(key):
        return WIDTH
    return value


def _small_list(
    key: str, value: list[Any], config: Mapping[str, Any], ids: Mapping[int, int], chosen: list[int]
) -> list[Any]:
    if _TOKEN_ID.search(key):
        return [ids.get(item, item) if isinstance(item, int) else item for item in value]
    count = _layer_count(config)
    if value and count > LAYERS and len(value) == count:
        return [value[index] for index in chosen]
    if not value or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if key in (
        "depths",
        "num_blocks",
        "layers",
        "blocks_per_stage",
        "num_layers",
        "layer_depths",
        "stage_num_blocks",
    ):
        return [min(item, 1) for item in value]
    if count > LAYERS and _LAYER_INDICES.search(key):
        last = len(chosen) - 1
        return list(dict.fromkeys(min(item, last) if item >= 0 else item for item in value))
    if key == "image_size":
        return [min(item, _image(config)) for item in value]
    if _HEADS.search(key) or _KV_HEADS.search(key):
        return [min(1 << (item.bit_length() - 1), HEADS) for item in value]
    if key == "conv_dim":
        return [min(item, 16) for item in value]
    if max(value) >= WIDTH and (_INNER.search(key) or (_WIDTH.search(key) and not _NO_WIDTH.search(key))):
        if value == sorted(value) and value[0] < value[-1]:
            # The channels of an image stay.
            return [item if item < 4 else min(16 << position, INNER) for position, item in enumerate(value)]
        return [min(item, WIDTH) for item in value]
    return value


def _relate(config: Mapping[str, Any], made: dict[str, Any]) -> None:
    """What follows from other values of the same configuration."""

    def now(key: str) -> Any:
        return made.get(key, config.get(key))

    if isinstance(config.get("qk_head_dim"), int) and isinstance(now("qk_nope_head_dim"), int):
        made["qk_head_dim"] = now("qk_nope_head_dim") + now("qk_rope_head_dim")
        if config.get("head_dim") == config["qk_head_dim"]:
            made["head_dim"] = made["qk_head_dim"]
    # State-space models: heads times their width is the expanded width.
    expand = config.get("mamba_expand", config.get("expand"))
    for heads, width in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        if expand and isinstance(config.get(heads), int) and isinstance(config.get(width), (int, str)):
            made[heads] = HEADS
            made[width] = int(expand * (now("hidden_size") or WIDTH)) // HEADS
            for groups in ("n_groups", "mamba_n_groups", "mamba_ngroups"):
                if isinstance(config.get(groups), int) and config[groups] > 1:
                    made[groups] = HEADS // 2
    # Layouts: the parts of a box's embedding make up a row together.
    if isinstance(config.get("coordinate_size"), int) and isinstance(config.get("shape_size"), int):
        row = now("hidden_size") or WIDTH
        made["shape_size"], made["coordinate_size"] = row // 8, (row - 2 * (row // 8)) // 4
    # Shifted windows: each stage must be at least as large as a window.
    window, stages = config.get("window_size"), config.get("depths")
    if isinstance(window, int) and isinstance(stages, (list, tuple)) and isinstance(now("image_size"), int):
        last = now("image_size") // (now("patch_size") or 4) // 2 ** (len(stages) - 1)
        made["window_size"] = max(1, min(window, last))
    image, patch = now("image_size"), now("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and patch and "num_patches" in config:
        made["num_patches"] = (image // patch) ** 2
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        inner = made.get("vision_config", {})
        image, patch = (inner.get(key, vision.get(key)) for key in ("image_size", "patch_size"))
        if isinstance(image, int) and isinstance(patch, int) and patch:
            patches = (image // patch) ** 2
            if "image_seq_length" in config:
                made["image_seq_length"] = patches
            if "mm_tokens_per_image" in config:
                made["mm_tokens_per_image"] = max(1, patches // 4)
    if isinstance(config.get("image_grid_pinpoints"), (list, tuple)):
        made["image_grid_pinpoints"] = [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]


def _small_rope(value: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(value)
    sections = value.get("mrope_section")
    if isinstance(sections, (list, tuple)) and len(sections) == 3:
        half = HEAD_DIM // 2
        made["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    for key in ("short_factor", "long_factor"):
        if isinstance(value.get(key), (list, tuple)):
            made[key] = list(value[key])[: HEAD_DIM // 2]
    return made


def _staged(config: Mapping[str, Any]) -> bool:
    """Whether the model halves its images in several stages."""
    return any(isinstance(config.get(key), (list, tuple)) for key in ("depths", "hidden_sizes", "embed_dims"))


def _image(config: Mapping[str, Any]) -> int:
    return STAGED_IMAGE if _staged(config) else IMAGE


def _taps(config: Mapping[str, Any]) -> int:
    """How many layers of a backbone hand out their result."""
    indices = config.get("out_indices")
    return len(indices) if isinstance(indices, (list, tuple)) and _layer_count(config) else 0


def _layer_count(config: Mapping[str, Any]) -> int:
    if isinstance(config.get("depths"), (list, tuple)):
        return 0  # what these count are stages
    return next((config[key] for key in _LAYER_COUNTS if isinstance(config.get(key), int)), 0)


def _chosen_layers(config: Mapping[str, Any]) -> list[int]:
    """Indices of the layers that stay: the first of each kind, at least `LAYERS`."""
    count = _layer_count(config)
    if count <= LAYERS:
        return list(range(count))
    kinds = [value for value in config.values() if isinstance(value, (list, tuple)) and len(value) == count]
    first: dict[Any, int] = {}
    for index in range(count):
        first.setdefault(tuple(str(value[index]) for value in kinds), index)
    # Widths and the like may differ at every layer; more kinds than these are no kinds.
    chosen = sorted(first.values())[: 2 * LAYERS]
    for index in range(count):
        if len(chosen) >= LAYERS:
            break
        if index not in chosen:
            chosen.append(index)
    return sorted(chosen)


def _ids(config: Mapping[str, Any]) -> dict[int, int]:
    """Token id -> a small one, the same for equal ids wherever they stand; small ones stay."""
    names = dict.fromkeys(_token_ids(config))
    taken = {value for value in names if value < FIRST_ID}
    free = (value for value in range(FIRST_ID, VOCABULARY) if value not in taken)
    made: dict[int, int] = {}
    for value in names:
        if value >= FIRST_ID:
            made[value] = next(free, VOCABULARY - 1)
    return made


def _token_ids(config: Mapping[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            if "model_type" in value:
                yield from _token_ids(value)
        elif _TOKEN_ID.search(key):
            items: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
            yield from (
                item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0
            )
