"""Workers: each is patched by a vLLM plugin, which must be registered and not filtered out."""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ..errors import WorkerError
from ..patching import GENERATOR, GENERATOR_CLASS, Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, unfit, unknown
from .decoder_layer_call import GREETING

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger("speculators_vllm_compat")

GROUP = "vllm.general_plugins"
NAME = "speculators_vllm_compat"


def refuse_unpatched_workers() -> None:
    """Raise before workers start when vLLM would not load the plugin that patches them.

    Raises:
        WorkerError: The plugin is not registered, or VLLM_PLUGINS leaves it out.
    """
    if not metadata.entry_points(group=GROUP, name=NAME):
        raise WorkerError(
            f"no entry point {NAME} in {GROUP}: the workers would run without the patches. "
            "Expected speculators-vllm-compat to be installed, not only found on the import path.",
            "Install it with pip in this environment.",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        raise WorkerError(
            f"VLLM_PLUGINS is {allowed!r}, which leaves out {NAME}: the workers would run without "
            f"the patches. Expected it unset or naming {NAME}.",
            "Add it, or unset the variable.",
        )


def check_greetings(replies: list[Any]) -> None:
    """Raise when a worker's answer to the set-up of capture is not a patched one's.

    Raises:
        WorkerError: A worker runs without the patches, or with another release's.
    """
    strangers = {rank: reply for rank, reply in enumerate(replies) if reply != GREETING}
    if strangers:
        raise WorkerError(
            f"workers {sorted(strangers)} answered {next(iter(strangers.values()))!r} to the "
            f"set-up of capture; expected {GREETING!r}: they run without the patches. Look for "
            "errors of vLLM's plugin loader in their log."
        )


def share_memory(generator: Any) -> Any:
    """The ring through which states arrive, opened on both ends; None where that cannot be."""
    from ..capture.ring import make_ring

    config = generator.vllm_config
    layers = len(dict.fromkeys(generator.layer_ids))
    width = config.model_config.get_hidden_size() * config.model_config.dtype.itemsize
    ring = make_ring(config.scheduler_config.max_num_batched_tokens, layers * width)
    if ring is None:
        return None
    replies = generator.executor.collective_rpc("_open_capture_ring", args=ring.address())
    if any(replies):
        logger.warning(
            "a worker could not open the memory shared with it (%s): hidden states are sent "
            "through vLLM's RPC, which is slower. Allow processes of one user to open each "
            "other's /proc/PID/fd.",
            next(filter(None, replies)),
        )
        return None
    return ring


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module("plugins")
    load = module.function("load_general_plugins") if module else None
    if module is None or load is None:
        return absent(sources.vllm, "plugins", "load_general_plugins")
    if module.constant("DEFAULT_PLUGINS_GROUP") != GROUP:
        return unknown(f"no group {GROUP}", str(module.path), f"the entry-point group {GROUP}")
    if load.required:
        return unknown(str(load), at(module, load.line), "load_general_plugins()")
    parallel = sources.vllm.module("config.parallel")
    fields = parallel.fields("ParallelConfig") if parallel else None
    if parallel is None or fields is None:
        return absent(sources.vllm, "config.parallel", "ParallelConfig")
    if problem := unfit(fields, ("tensor_parallel_size", "worker_extension_cls")):
        expected = "tensor_parallel_size and worker_extension_cls"
        return unknown(problem, at(parallel, fields.line), expected)
    for name in ("v1.worker.worker_base", "worker.worker_base"):  # the latter in 0.11.0
        base = sources.vllm.module(name)
        calls = base.calls("load_general_plugins") if base else ()
        if base is not None and calls:
            return needed("every worker loads the general plugins", at(base, calls[0].line))
    return absent(sources.vllm, "v1.worker.worker_base", "call of load_general_plugins")


def apply(module: ModuleType, ledger: Ledger) -> None:
    def executor(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        refuse_unpatched_workers()
        return wrapped(*args, **kwargs)

    def set_up_capture(_wrapped: Any, instance: Any, _args: Any, _kwargs: Any) -> None:
        check_greetings(
            instance.executor.collective_rpc(
                "_setup_hidden_states_capture", args=(instance.layer_ids,)
            )
        )
        instance._hidden_states_ring = share_memory(instance)

    ledger.wrap(module, "MultiprocExecutor", executor)
    ledger.wrap(getattr(module, GENERATOR_CLASS), "_setup_capture", set_up_capture)


PATCH = Patch(
    id="worker_plugin",
    summary="Makes sure that every worker process is patched, before and after it starts.",
    why="A spawned worker imports everything anew; it is patched by a general plugin, which "
    "VLLM_PLUGINS can filter out.",
    upstream="vllm/plugins/__init__.py, every release",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="never",
)
