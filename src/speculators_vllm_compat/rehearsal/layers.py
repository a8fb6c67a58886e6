"""Which kinds of layers a model has, and how many of its first layers show all of them.

Rules such as "every sixth layer is full attention" or "the first three are dense" count from the
first layer, so the first layers of a model, as they are, follow the same rules. A miniature is
therefore a prefix of the model, and no rule has to be rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Config = dict[str, Any]
Kind = tuple[str, ...]

# Lists of layer numbers, counted from 0.
_INDEX_LISTS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "cross_attention_layers")
# The same, counted from 1, in a config of their own (Kimi Linear).
_LINEAR, _LINEAR_LISTS = "linear_attn_config", ("kda_layers", "full_attn_layers")

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def has_experts(text: Config) -> bool:
    return any((text.get(name) or 0) > 1 for name in EXPERTS)


def kinds(text: Config) -> list[Kind]:
    """What each decoder layer is, as its attention and its feed-forward part.

    Args:
        text: The config of the language model.
    """
    count = int(text["num_hidden_layers"])
    attention, feed_forward = _attention(text), _feed_forward(text)
    listed = [_per_layer(value) for value in text.values() if _is_per_layer(value, count)]
    return [
        (*attention(index), *(values[index] for values in listed), *feed_forward(index))
        for index in range(count)
    ]


def truncated(text: Config, count: int) -> Config:
    """The config of the model's first layers."""
    before = int(text["num_hidden_layers"])
    cut = {k: v[:count] if _is_per_layer(v, before) else v for k, v in text.items()}
    for name in _INDEX_LISTS:
        if isinstance(cut.get(name), list):
            cut[name] = [index for index in cut[name] if index < count]
    if isinstance(cut.get(_LINEAR), dict):
        cut[_LINEAR] = {
            k: [index for index in v if index <= count] if k in _LINEAR_LISTS else v
            for k, v in cut[_LINEAR].items()
        }
    # Layers that predict further tokens are beyond the ones whose states are asked for.
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        if cut.get(name):
            cut[name] = 0
    return {**cut, "num_hidden_layers": count}


@dataclass(frozen=True)
class Prefix:
    """The first layers of a model that a miniature keeps.

    Attributes:
        count: How many.
        places: For each layer asked for, the layer of the miniature that stands for it: one of
            the same kind, a different one for each, in the same order.
    """

    count: int
    places: dict[int, int]


def choose(kinds: Sequence[Kind], wanted: Sequence[int]) -> Prefix:
    """The shortest prefix with a layer of every kind, and one for each layer wanted.

    The last layer, whose state is taken before the final norm, stays the last.
    """
    last = len(kinds) - 1
    places: dict[int, int] = {}
    at = -1
    for index in sorted(set(wanted)):
        at = kinds.index(kinds[index], at + 1)  # there is one: not beyond the index itself
        places[index] = at
    end = max(at, *(kinds.index(kind) for kind in set(kinds)))
    if last in places:
        end = places[last] = kinds.index(kinds[last], end)
    elif end == at:
        end = min(end + 1, last)  # a layer that is not the last one stays so
    return Prefix(end + 1, places)


def _is_per_layer(value: Any, count: int) -> bool:
    """Whether a value of the config gives something for each layer."""
    if isinstance(value, str):
        return len(value) == count and not value.isalnum()  # "M-M*-M": a pattern, not a name
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, str | int | float | None) for item in value)
    )


def _per_layer(value: Any) -> list[str]:
    return [str(item) for item in value]


def _attention(text: Config) -> Callable[[int], Kind]:
    """What a config says of attention by a rule; lists are read elsewhere."""
    base = ("MLA",) if text.get("kv_lora_rank") else ()
    count = int(text["num_hidden_layers"])
    if _is_per_layer(text.get("layer_types"), count):
        return lambda _index: base
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if text.get("sliding_window") and isinstance(pattern, int):
        return lambda i: (*base, _choice((i + 1) % pattern == 0, "full", "sliding"))
    if text.get("use_sliding_window") and "max_window_layers" in text:
        start = text["max_window_layers"]
        return lambda i: (*base, _choice(i < start, "full", "sliding"))
    if linear_but := text.get("full_attention_interval"):
        return lambda i: (*base, _choice((i + 1) % linear_but == 0, "full", "linear"))
    if isinstance(text.get(_LINEAR), dict):
        linear = set(text[_LINEAR].get("kda_layers") or ())
        return lambda i: ("linear",) if i + 1 in linear else (*base, "full")
    if period := text.get("attn_layer_period"):
        offset = text.get("attn_layer_offset", 0)
        return lambda i: (*base, _choice(i % period == offset, "full", "state space"))
    ruled = "no_rope_layers" in text or "no_rope_layer_interval" in text
    if ruled and not text.get("no_rope_layers"):
        chunked_but = int(text.get("no_rope_layer_interval") or 4)
        return lambda i: (*base, _choice((i + 1) % chunked_but == 0, "full", "chunked"))
    return lambda _index: base


def _feed_forward(text: Config) -> Callable[[int], Kind]:
    def kind(sparse: Callable[[int], bool]) -> Callable[[int], Kind]:
        return lambda index: ("experts",) if sparse(index) else ("dense",)

    if not has_experts(text):
        return kind(lambda _index: False)
    if text.get("mlp_layer_types"):
        return lambda _index: ()  # a list, read elsewhere
    if text.get("moe_layers"):
        chosen = set(text["moe_layers"])
        return kind(lambda i: i in chosen)
    if step := text.get("interleave_moe_layer_step"):
        return kind(lambda i: (i + 1) % step == 0)
    if "first_k_dense_replace" in text:
        first, every = text["first_k_dense_replace"] or 0, text.get("moe_layer_freq") or 1
        if isinstance(every, list):
            return lambda _index: ()
        return kind(lambda i: i >= first and i % every == 0)
    if "moe_layer_start_index" in text:
        first, every = text["moe_layer_start_index"], text.get("moe_layer_interval") or 1
        return kind(lambda i: i >= first and (i + 1) % every == 0)
    if period := text.get("expert_layer_period"):
        offset = text.get("expert_layer_offset", 0)
        return kind(lambda i: i % period == offset)
    sparse_step = int(text.get("decoder_sparse_step") or 1)
    dense = set(text.get("mlp_only_layers") or ())
    return kind(lambda i: i not in dense and (i + 1) % sparse_step == 0)


def _choice(condition: bool, yes: str, no: str) -> str:
    return f"{yes if condition else no} attention"
