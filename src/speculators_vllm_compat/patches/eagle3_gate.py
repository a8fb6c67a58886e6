"""The supports_eagle3 gate of 0.3.0: it refuses models whose hidden states can be observed."""

from __future__ import annotations

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, needed, not_needed


def probe(sources: Sources) -> Finding:
    worker = sources.custom_worker
    if worker is None:
        name = "HiddenStatesWorkerExtension"
        return absent(sources.speculators, "data_generation.custom_worker", name)
    calls = worker.calls("supports_eagle3")
    if not calls:
        return not_needed("speculators asks for no EAGLE-3 support", str(worker.path))
    if not sources.vllm.provides("model_executor.models.interfaces", "supports_eagle3"):
        return absent(sources.vllm, "model_executor.models.interfaces", "supports_eagle3")
    return needed("speculators refuses models without EAGLE-3 support", at(worker, calls[0].line))


PATCH = Patch(
    id="eagle3_gate",
    summary="Captures from any model with decoder layers, whether or not vLLM drafts for it.",
    why="0.3.0 asks vLLM's supports_eagle3, which DeepSeek-V2 class models lack before 0.18: "
    "does not support hidden state extraction. Observing layers needs no such support.",
    upstream="speculators/data_generation/custom_worker.py, 0.3.0",
    process="worker",
    probe=probe,
    part_of="decoder_layer_call",
    removable="when speculators 0.3.0 is no longer supported",
)
