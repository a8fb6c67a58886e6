"""Names: what speculators imports from vLLM has to be where it imports it from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, not_needed, unknown
from . import hashing_location, kv_cache_location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..source import Import, SourceModule

# Boundaries of their own, which tell where these names are now.
_ADAPTED = {
    *((kv_cache_location.HOME, name) for name in kv_cache_location.NAMES),
    ("utils.hashing", hashing_location.NAME),
}


def probe(sources: Sources) -> Finding:
    generator = sources.generator
    if generator is None:
        return absent(sources.speculators, "data_generation.vllm_hidden_states_generator", "it")
    for module, found in _imports(sources):
        home = found.module.partition(".")[2]
        adapted = (home, found.name) in _ADAPTED
        if not adapted and not sources.vllm.provides(home, found.name):
            return unknown(
                f"no {found.name} in {found.module}, which {at(module, found.line)} imports",
                sources.vllm.where(home),
                f"the name {found.name}",
            )
    return not_needed("vLLM has every name that speculators imports", str(generator.path))


def _imports(sources: Sources) -> Iterator[tuple[SourceModule, Import]]:
    for module in (sources.generator, sources.custom_worker):
        if module is None:
            continue
        for found in module.imports():
            if found.level == 0 and found.module.startswith("vllm."):
                yield module, found


PATCH = Patch(
    id="imported_names",
    summary="Adapts nothing; tells, before it is imported, which name speculators would miss.",
    why="A name that vLLM moved is an ImportError in the driver and in every spawned worker.",
    upstream="speculators/data_generation/vllm_hidden_states_generator.py and custom_worker.py",
    process="both",
    probe=probe,
    removable="never",
)
