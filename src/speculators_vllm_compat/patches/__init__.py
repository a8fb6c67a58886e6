"""One module per boundary between speculators and vLLM, named after the API it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import (
    attn_mask_utils,
    block_hasher,
    cache_block_size,
    decoder_layer_call,
    eagle3_gate,
    embed_function,
    execute_sample,
    generate_loop,
    hashing_location,
    imported_names,
    kv_cache_arguments,
    kv_cache_layout,
    kv_cache_location,
    language_model,
    memory_query,
    model_runner_v2,
    none_hash,
    prefix_caching,
    pretrained_config_torch,
    request_init,
    rpc_reply,
    scheduler_config,
    scheduler_init,
    tokenizer_remote_code,
    worker_plugin,
)

if TYPE_CHECKING:
    from ..patching import Patch

# The order of application. What an import needs comes first; of patches around one name, the
# first is the innermost: NONE_HASH is set before a hasher is built, and the plugin is checked
# before an executor starts its workers.
PATCHES: tuple[Patch, ...] = (
    pretrained_config_torch.PATCH,
    attn_mask_utils.PATCH,
    imported_names.PATCH,
    hashing_location.PATCH,
    kv_cache_location.PATCH,
    tokenizer_remote_code.PATCH,
    scheduler_config.PATCH,
    prefix_caching.PATCH,
    cache_block_size.PATCH,
    memory_query.PATCH,
    kv_cache_arguments.PATCH,
    kv_cache_layout.PATCH,
    scheduler_init.PATCH,
    request_init.PATCH,
    none_hash.PATCH,
    block_hasher.PATCH,
    worker_plugin.PATCH,
    execute_sample.PATCH,
    rpc_reply.PATCH,
    generate_loop.PATCH,
    embed_function.PATCH,
    language_model.PATCH,
    eagle3_gate.PATCH,
    model_runner_v2.PATCH,
    decoder_layer_call.PATCH,
)
