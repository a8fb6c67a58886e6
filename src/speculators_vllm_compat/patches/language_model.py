"""Multimodal wrappers: where the decoder is inside the model that the runner holds."""

from __future__ import annotations

from typing import Any

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, needed, not_needed, unknown

_CLASS = "HiddenStatesWorkerExtension"
_INTERFACES = "model_executor.models.interfaces"


def find_decoder(model: Any) -> Any:
    """The module that holds ``layers``: of a text model, or of a multimodal wrapper's.

    Raises:
        RuntimeError: There is none to be found.
    """
    candidates = [model]
    if hasattr(model, "get_language_model"):
        candidates.insert(0, model.get_language_model())
    for candidate in candidates:
        # Newer wrappers may hand out the decoder itself, which has no further .model.
        for decoder in (getattr(candidate, "model", None), candidate):
            if hasattr(decoder, "layers"):
                return decoder
    raise RuntimeError(
        f"no decoder layers found in {type(model).__module__}.{type(model).__name__}; expected "
        "model.layers, or a get_language_model() that has them. Hidden states of this model "
        "cannot be captured."
    )


def probe(sources: Sources) -> Finding:
    worker = sources.custom_worker
    line = worker.line(f"{_CLASS}._setup_hidden_states_capture") if worker else None
    if worker is None or line is None:
        return absent(sources.speculators, "data_generation.custom_worker", _CLASS)
    if not worker.mentions(f"{_CLASS}._setup_hidden_states_capture", "get_language_model"):
        return needed("speculators looks for text models only", at(worker, line))
    module = sources.vllm.module(_INTERFACES)
    name = "SupportsMultiModal.get_language_model"
    signature = module.function(name) if module else None
    if module is None or signature is None:
        return absent(sources.vllm, _INTERFACES, name)
    where = at(module, signature.line)
    if signature.required:
        return unknown(f"{name}{signature}", where, f"{name}()")
    if module.is_stub(name):
        return not_needed("every wrapper hands out a model that holds a decoder", where)
    return needed("a wrapper may hand out the decoder itself", where)


PATCH = Patch(
    id="language_model",
    summary="Finds the decoder of text models, of multimodal wrappers, and where "
    "get_language_model() is the decoder.",
    why="0.3.0 knows model.model only; 0.4 expects get_language_model().model, which newer "
    "wrappers do not have.",
    upstream="vllm/model_executor/models/interfaces.py get_language_model, 0.15.0",
    process="worker",
    probe=probe,
    part_of="decoder_layer_call",
    removable="never, as long as 0.3.0 is supported",
)
