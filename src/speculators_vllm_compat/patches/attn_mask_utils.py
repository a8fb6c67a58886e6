"""transformers 5: the module of a mask helper that speculators' EAGLE-1 model imports is gone."""

from __future__ import annotations

import sys
import types
from typing import Any

from ..patching import Finding, Ledger, Patch, Sources
from ..probing import at, needed, not_needed, unknown

_MODULE = "transformers.modeling_attn_mask_utils"
_NAME = "_prepare_4d_causal_attention_mask"


def causal_mask(
    attention_mask: Any,
    input_shape: Any,
    inputs_embeds: Any,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Any:
    """An additive causal mask.

    Args:
        attention_mask: [batch, keys] with 0 where a key is padding, or None.
        input_shape: (batch, queries).
        inputs_embeds: A tensor whose dtype and device the mask takes.
        past_key_values_length: How many keys come before the first query.
        sliding_window: How many keys before its own a query sees, or None for all.

    Returns:
        [batch, 1, queries, keys]: 0 where a query sees a key, the dtype's minimum elsewhere.
    """
    import torch

    batch, queries = int(input_shape[0]), int(input_shape[-1])
    dtype, device = inputs_embeds.dtype, inputs_embeds.device
    keys = queries + past_key_values_length
    position = torch.arange(past_key_values_length, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    visible = key <= position
    if sliding_window is not None:
        visible &= key >= position - sliding_window
    visible = visible[None, None].expand(batch, 1, queries, keys)
    if attention_mask is not None:
        visible = visible & attention_mask.to(torch.bool)[:, None, None, :]
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)


def probe(sources: Sources) -> Finding:
    eagle = sources.speculators.module("models.eagle")
    if eagle is None or not eagle.binds(_NAME):
        root = sources.speculators.where("models.eagle")
        return not_needed(f"speculators does not import {_NAME}", root)
    if sources.transformers is None:
        return unknown("no transformers", "transformers", "transformers")
    module = sources.transformers.module("modeling_attn_mask_utils")
    if module is None:
        return needed(f"no {_MODULE}", sources.transformers.where("modeling_attn_mask_utils"))
    if module.function(_NAME) is None:
        return unknown(f"no {_NAME}", str(module.path), f"a function {_NAME}")
    return not_needed(f"{_MODULE} is there", at(module, module.line(_NAME)))


def apply(_transformers: types.ModuleType, ledger: Ledger) -> None:
    if _MODULE in sys.modules:  # somebody has mended it by hand
        return
    module = types.ModuleType(_MODULE, __doc__)
    setattr(module, _NAME, causal_mask)
    ledger.add_item(sys.modules, _MODULE, module)


PATCH = Patch(
    id="attn_mask_utils",
    summary=f"Provides {_MODULE} with the one function speculators imports.",
    why="The module is gone from newer transformers 5: ModuleNotFoundError at import speculators.",
    upstream="transformers/modeling_attn_mask_utils.py, last seen in 5.19",
    process="both",
    probe=probe,
    target="transformers",
    apply=apply,
    depends_on="environment",
    removable="when speculators' EAGLE-1 model makes its own mask",
)
