"""A model's config made small: the same architecture, few and narrow layers, few experts.

Pure work on dicts, without torch or transformers. What decides which code runs stays: head sizes,
the ranks and rotated dimensions of latent attention, rope, the order of layer kinds, wrappers. What
only makes it large goes: depth, hidden size, number of heads and experts, vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .layers import EXPERTS, choose, has_experts, kinds, truncated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .layers import Config, Kind

VOCABULARY = 1024
# Special ids (padding, images, ...) are moved below this; prompts are made of the ids above.
FIRST_PLAIN_TOKEN = 64
_HIDDEN = 256
# A feed-forward part of one rank: two blocks of the widest quantization in use, 128.
_PART = 256
_HEADS_PER_RANK = 16  # of latent attention, whose kernels want no fewer
_EXPERTS = 16
# Tokens a layer looks back: fewer than the longest prompt has, so that the window matters.
_WINDOW = 64

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "num_experts_per_token")
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
# Widths that are tied to the hidden size in a way of their own: left as they are.
_STATE_SPACE = ("mamba", "ssm", "state_size", "d_inner")
_DTYPES = ("torch_dtype", "dtype")

# What must be known to make a miniature; a published config leaves out what its class defaults.
READ = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "layer_types",
    "max_position_embeddings",
    "first_k_dense_replace",
    "moe_layer_freq",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "sliding_window",
    "attention_chunk_size",
    *EXPERTS,
)


class UnusableConfigError(ValueError):
    """The config lacks what a miniature is made from, or a layer asked for does not exist."""


@dataclass(frozen=True)
class Miniature:
    """A miniature's config and what it stands for.

    Attributes:
        config: The whole config, wrappers included.
        text: The language model's part of it: the same object where there is no wrapper.
        layers: The model's layers that were asked for.
        places: The miniature's layer for each of ``layers``.
        kinds: How many of the miniature's layers are of each kind, and of the model's.
        changes: What was made smaller, as "name before -> after".
        quantization: The scheme that is kept, or None.
        dropped_quantization: The scheme that is left out, or None.
        wrapper: The model has other parts than the language model.
    """

    config: Config
    text: Config
    layers: tuple[int, ...]
    places: tuple[int, ...]
    kinds: dict[str, tuple[int, int]]
    changes: tuple[str, ...]
    quantization: str | None
    dropped_quantization: str | None
    wrapper: bool

    @property
    def experts(self) -> bool:
        return has_experts(self.text)

    @property
    def latent_attention(self) -> bool:
        return bool(self.text.get("kv_lora_rank"))


def text_path(config: Config) -> tuple[str, ...]:
    """The keys that lead to the language model's config: none, or a wrapper's.

    Raises:
        UnusableConfigError: No part of the config has num_hidden_layers.
    """
    for name in _TEXT:
        inner = config.get(name)
        if isinstance(inner, dict) and ("num_hidden_layers" in inner or text_path_or_none(inner)):
            return (name, *(text_path_or_none(inner) or ()))
    if "num_hidden_layers" not in config:
        raise UnusableConfigError(
            "the config has no num_hidden_layers, at its top or in "
            f"{', '.join(_TEXT)}; expected the config.json of a decoder model. speculators' "
            "generator reads the same field, so it could not run this model either."
        )
    return ()


def text_path_or_none(config: Config) -> tuple[str, ...] | None:
    try:
        return text_path(config)
    except UnusableConfigError:
        return None


def text_of(config: Config) -> Config:
    """The language model's part of a config."""
    for name in text_path(config):
        config = config[name]
    return config


def completed(config: Config, defaults: Config) -> Config:
    """The config with what its class would fill in, of the fields a miniature is made from.

    Args:
        config: As published.
        defaults: The same, as transformers' config class writes it.
    """
    full = copy.deepcopy(config)
    known = text_path_or_none(defaults)
    if known is None:
        return full
    path = text_path_or_none(config)
    target, source = text_of(full) if path is not None else full, text_of(defaults)
    for name in READ:
        if target.get(name) is None and source.get(name) is not None:
            target[name] = copy.deepcopy(source[name])
    return full


def default_layers(count: int) -> list[int]:
    """The layers the generator takes when none are given."""
    return [2, count // 2, count - 3, count - 1]


def shrink(
    config: Config,
    layer_ids: Sequence[int] | None,
    *,
    ranks: int = 1,
    keep_quantization: bool = True,
) -> Miniature:
    """A miniature of a model.

    Args:
        config: The model's, complete.
        layer_ids: The layers whose states are wanted; the generator's choice when None.
        ranks: The tensor-parallel size it must be divisible by.
        keep_quantization: Whether the quantization scheme stays.

    Raises:
        UnusableConfigError: A layer does not exist, or the heads cannot be split over the ranks.
    """
    small = copy.deepcopy(config)
    path = text_path(small)
    quantization = _scheme(small)
    if not keep_quantization:
        _drop_quantization(small)
    before = text_of(config)
    wanted = _existing(layer_ids, before)
    every = kinds(before)
    prefix = choose(every, wanted)
    after = truncated(text_of(small), prefix.count)
    if not any(key.startswith(_STATE_SPACE) for key in after):
        _narrow(after, ranks)
    _fewer_experts(after, ranks)
    for name in _WINDOWS:
        if isinstance(after.get(name), int):
            after[name] = min(after[name], _WINDOW)
    if "hidden_size" in after:
        # Layers then change the stream by about its own size, whatever the width.
        after["initializer_range"] = round(1 / math.sqrt(after["hidden_size"]), 4)
    small = _put(small, path, after)
    _fit_other_parts(small, path, before, after)
    _fewer_tokens(small)
    text = text_of(small)
    return Miniature(
        config=small,
        text=text,
        layers=tuple(wanted),
        places=tuple(prefix.places[index] for index in wanted),
        kinds=_count_kinds(every, prefix.count),
        changes=tuple(_changes(before, text)),
        quantization=quantization if keep_quantization else None,
        dropped_quantization=None if keep_quantization else quantization,
        wrapper=bool(path),
    )


def with_dtype(config: Config, dtype: str) -> Config:
    """The config with every statement of a dtype set to one."""
    changed = {
        key: with_dtype(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version")
    }
    changed.update({key: dtype for key in _DTYPES if key in changed})
    return changed


def own_dtype(config: Config) -> str | None:
    """The dtype a config states for the language model."""
    for part in (text_of(config), config):
        for key in _DTYPES:
            if part.get(key):
                return str(part[key])
    return None


def _existing(layer_ids: Sequence[int] | None, text: Config) -> list[int]:
    count = int(text["num_hidden_layers"])
    wanted = default_layers(count) if layer_ids is None else list(layer_ids)
    outside = [index for index in wanted if not 0 <= index < count]
    if outside or not wanted:
        raise UnusableConfigError(
            f"layers {outside or wanted} asked for; the model has layers 0 to {count - 1}. Name "
            "at least one of those with --layer-ids."
        )
    return wanted


def _narrow(text: Config, ranks: int) -> None:
    heads = text.get("num_attention_heads")
    if not heads or "hidden_size" not in text:
        return  # names of its own: only the depth is cut
    hidden = text["hidden_size"]
    key_values = text.get("num_key_value_heads") or heads
    uneven = key_values > ranks and key_values % ranks
    if heads % ranks or (uneven and not text.get("kv_lora_rank")):
        raise UnusableConfigError(
            f"{heads} attention heads with {key_values} key-value heads cannot be split over "
            f"--tensor-parallel-size {ranks}; vLLM would refuse the model too. Use a divisor of "
            "both."
        )
    if text.get("kv_lora_rank"):
        few = ranks * min(heads // ranks, _HEADS_PER_RANK)
        text["num_attention_heads"] = few
        if "num_key_value_heads" in text:
            text["num_key_value_heads"] = few
        free = True
    else:
        # Fewer key-value heads than ranks are copied to several, which is code of its own.
        few = key_values if key_values <= ranks else ranks * min(2, key_values // ranks)
        size = text.get("head_dim") or hidden // heads
        text["num_attention_heads"] = few * (heads // key_values)
        if "num_key_value_heads" in text:
            text["num_key_value_heads"] = few
        free = bool(text.get("head_dim"))
        if not free:
            text["hidden_size"] = text["num_attention_heads"] * size
    if free:
        text["hidden_size"] = min(hidden, _HIDDEN * max(1, ranks // 2))
    part = _PART * ranks
    for key, value in text.items():
        if key.startswith("intermediate_size") or key.endswith("_intermediate_size"):
            text[key] = _narrower(value, part)
    _fewer_linear_heads(text, ranks)


def _narrower(value: Any, most: int) -> Any:
    if isinstance(value, list):
        return [_narrower(item, most) for item in value]
    return min(value, most) if isinstance(value, int) else value


def _fewer_linear_heads(text: Config, ranks: int) -> None:
    """Heads of linear attention, their ratio kept (Qwen3-Next)."""
    keys, values = (text.get(name) for name in _LINEAR_HEADS)
    if keys and values and keys % ranks == 0:
        few = ranks * min(2, keys // ranks)
        text.update(zip(_LINEAR_HEADS, (few, few * (values // keys)), strict=True))


def _fewer_experts(text: Config, ranks: int) -> None:
    if not has_experts(text):
        return
    number = max(text.get(name) or 0 for name in EXPERTS)
    few = min(number, max(_EXPERTS, ranks))
    chosen = max((text.get(name) or 0 for name in _TOP_K), default=0)
    fewer_chosen = max(1, min(chosen, few // 4)) if few < number else chosen
    groups = text.get("n_group") or 0
    if groups > 1 and few < number:
        text["n_group"] = min(groups, few // 4)  # two experts of a group give it its score
        share = (text.get("topk_group") or 1) / groups
        text["topk_group"] = max(1, round(text["n_group"] * share))
        room = text["topk_group"] * (few // text["n_group"])
        fewer_chosen = min(fewer_chosen, room)
    text.update({name: few for name in EXPERTS if text.get(name)})
    text.update({name: fewer_chosen for name in _TOP_K if text.get(name)})


def _put(config: Config, path: tuple[str, ...], text: Config) -> Config:
    if not path:
        return text
    return {**config, path[0]: _put(config[path[0]], path[1:], text)}


def _fit_other_parts(config: Config, path: tuple[str, ...], before: Config, after: Config) -> None:
    """Make encoders of images or sound shallow, and let them end at the new hidden size."""
    if not path:
        return
    old, new = before.get("hidden_size"), after.get("hidden_size")
    for name, part in config.items():
        if name == path[0]:
            continue
        if name in ("hidden_size", "text_hidden_size") and part == old:
            config[name] = new  # a wrapper that repeats its text's
        if not isinstance(part, dict) or not name.endswith("_config"):
            continue
        for key, value in part.items():
            if value == old and any(word in key for word in ("out", "text", "proj", "mm_")):
                part[key] = new
        if any(isinstance(value, list) and "index" in key for key, value in part.items()):
            continue  # names layers of its own by number
        for key in ("num_hidden_layers", "depth", "vt_num_hidden_layers"):
            if isinstance(part.get(key), int):
                part[key] = min(part[key], 2)


def _fewer_tokens(config: Config) -> None:
    """A small vocabulary, and ids of special tokens that lie in it."""
    moved: dict[int, int] = {}

    def fit(value: Any) -> Any:
        if isinstance(value, list):
            return [fit(item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < FIRST_PLAIN_TOKEN:
            return value
        return moved.setdefault(value, min(len(moved) + 1, FIRST_PLAIN_TOKEN - 1))

    def visit(part: Config) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                visit(value)
            elif key == "vocab_size" or key.startswith("vocab_size_"):
                part[key] = min(value, VOCABULARY) if isinstance(value, int) else value
            elif "token_id" in key or "token_index" in key:
                part[key] = fit(value)

    visit(config)


def _scheme(config: Config) -> str | None:
    for part in (text_of(config), config):
        for key in ("quantization_config", "compression_config"):
            scheme = part.get(key)
            if isinstance(scheme, dict):
                name = str(scheme.get("quant_method", "unknown"))
                return f"{name} {scheme['format']}" if scheme.get("format") else name
    return None


def _drop_quantization(config: Config) -> None:
    for part in (text_of(config), config):
        for key in ("quantization_config", "compression_config"):
            part.pop(key, None)


def _count_kinds(every: Sequence[Kind], count: int) -> dict[str, tuple[int, int]]:
    few, all_of_them = Counter(every[:count]), Counter(every)
    # A number in a kind ("no_rope_layers" has 0 and 1) tells nobody anything.
    return {
        ", ".join(word.replace("_", " ") for word in kind if not word.isdigit())
        + "".join(f" ({word})" for word in kind if word.isdigit()): (few[kind], number)
        for kind, number in all_of_them.items()
    }


_TOLD = (
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "key-value heads"),
    ("intermediate_size", "feed-forward"),
    ("moe_intermediate_size", "expert width"),
    *((name, "experts") for name in EXPERTS),
    ("num_experts_per_tok", "experts a token"),
    ("n_group", "expert groups"),
    ("sliding_window", "window"),
    ("vocab_size", "vocabulary"),
)


def _changes(before: Config, after: Config) -> list[str]:
    return [
        f"{name} {before[key]} -> {after[key]}"
        for key, name in _TOLD
        if key in before and before[key] != after.get(key)
    ]
