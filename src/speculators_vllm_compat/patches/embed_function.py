"""The embedding function's name: ``get_input_embeddings`` in 0.11.0, ``embed_input_ids`` since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, needed, not_needed

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = ("embed_input_ids", "get_input_embeddings", "embed_tokens")


def embed_function(decoder: Any) -> Callable[..., Any]:
    """The decoder's own way from ids to embeddings, scaling included where it has some.

    Raises:
        RuntimeError: It has none of the known names.
    """
    for name in _NAMES:
        function: Callable[..., Any] | None = getattr(decoder, name, None)
        if function is not None:
            return function
    raise RuntimeError(
        f"{type(decoder).__name__} has none of {', '.join(_NAMES)}; expected one of them. Unset "
        "SPECULATORS_VLLM_COMPAT_FORWARD to observe the layers instead."
    )


def probe(sources: Sources) -> Finding:
    worker = sources.custom_worker
    called = next((n for n in _NAMES if worker and worker.calls(n)), None)
    if worker is None or called is None:
        return absent(sources.speculators, "data_generation.custom_worker", _NAMES[0])
    module = sources.vllm.module("model_executor.models.llama")
    name = next((n for n in _NAMES if module and module.line(f"LlamaModel.{n}")), None)
    if module is None or name is None:
        return absent(sources.vllm, "model_executor.models.llama", f"LlamaModel.{_NAMES[0]}")
    where = at(module, module.line(f"LlamaModel.{name}"))
    if name != called:
        return needed(f"vLLM's models have {name}, speculators calls {called}", where)
    return not_needed(f"vLLM's models have {name}", where)


PATCH = Patch(
    id="embed_function",
    summary="Embeds with the model's own function, whatever its name, in the replaced forward.",
    why="vLLM 0.11.1 renamed it; each line of speculators knows one of the names.",
    upstream="vllm/model_executor/models/interfaces_base.py, 0.11.1",
    process="worker",
    probe=probe,
    part_of="decoder_layer_call",
    removable="when 0.3.0 and vLLM 0.11.0 are no longer supported",
)
