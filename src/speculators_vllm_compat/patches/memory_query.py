"""Memory query: a CPU build has no accelerator to ask for free memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, Finding, Ledger, Patch, Proxy, Sources
from ..probing import absent, at, needed, not_needed, unknown

if TYPE_CHECKING:
    from types import ModuleType


def host_memory() -> tuple[int, int]:
    """The host's available and total memory, in bytes."""
    import psutil  # a requirement of vLLM

    memory = psutil.virtual_memory()
    return memory.available, memory.total


class _Cuda(Proxy):
    """torch.cuda, as the generator's module sees it on a machine without one."""

    def changed(self) -> dict[str, Any]:
        return {"mem_get_info": lambda *_args, **_kwargs: host_memory()}


class _Torch(Proxy):
    """torch, as the generator's module sees it; everything but cuda.mem_get_info is torch's own."""

    def changed(self) -> dict[str, Any]:
        return {"cuda": _Cuda(self.__wrapped__.cuda, self._self_switch)}


def probe(sources: Sources) -> Finding:
    generator = sources.generator
    if generator is None:
        return absent(sources.speculators, "data_generation.vllm_hidden_states_generator", "it")
    calls = generator.calls("mem_get_info")
    if len(calls) != 1:
        return unknown(f"{len(calls)} calls of mem_get_info", str(generator.path), "one call")
    where = at(generator, calls[0].line)
    if sources.vllm_package.cpu_build:
        return needed(f"{sources.vllm_package} is a build for the CPU", where)
    return not_needed(f"{sources.vllm_package} is no build for the CPU", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    if hasattr(module, "mem_get_info"):
        ledger.wrap(module, "mem_get_info", lambda *_call: host_memory())
    else:
        ledger.proxy(module, "torch", _Torch)


PATCH = Patch(
    id="memory_query",
    summary="Sizes the KV cache from the host's free memory on CPU builds of vLLM.",
    why="torch.cuda.mem_get_info raises without a GPU (0.3.0); the accelerator's answers 0 (0.4).",
    upstream="speculators/data_generation/vllm_hidden_states_generator.py, 0.3.0 and 0.4.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    depends_on="environment",
    removable="when speculators asks vLLM's platform for its memory",
)
