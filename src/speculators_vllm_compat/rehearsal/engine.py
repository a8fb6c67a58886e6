"""Starts the generator as a training team's script does, but for dtype and random weights."""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, GENERATOR_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Of loader.py, which workers import, and the driver does not.
FORMAT = "speculators_vllm_compat_rehearsal"
EXTENSION = "speculators_vllm_compat.rehearsal.loader.RehearsalWorkerExtension"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@dataclass(frozen=True)
class Settings:
    """What the generator is started with.

    Attributes:
        layers: The miniature's.
        dtype: Of the model.
        max_model_len: As for the constructor.
        gpu_memory_utilization: As for the constructor.
        tensor_parallel_size: As for the constructor.
        start_method: "fork" or "spawn"; None leaves it to vLLM.
        random_weights: vLLM makes the weights; there are none in the folder.
        latent_backend: The attention backend to ask for, or None.
        seed: Of weights that vLLM makes.
    """

    layers: tuple[int, ...]
    dtype: str
    max_model_len: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    start_method: str | None
    random_weights: bool
    latent_backend: str | None
    seed: int


@contextlib.contextmanager
def generator(folder: Path, settings: Settings) -> Iterator[Any]:
    """speculators' generator on a miniature; ended, with its workers, at the end."""
    module: Any = importlib.import_module(GENERATOR)
    base = getattr(module, GENERATOR_CLASS)

    class Generator(base):  # type: ignore[misc,valid-type]  # as people subclass it
        def _create_vllm_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super()._create_vllm_config(*args, **kwargs)
            _configure(config, settings)
            return config

    original = module.ModelConfig
    # dtype="auto" would run a float32 model in bfloat16; replaced as people replace it.
    module.ModelConfig = lambda **kwargs: original(
        **{**kwargs, "dtype": settings.dtype, "seed": settings.seed}
    )
    made = None
    try:
        made = Generator(
            str(folder),
            list(settings.layers),
            max_model_len=settings.max_model_len,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
        )
        yield made
    finally:
        module.ModelConfig = original
        executor = getattr(made, "executor", None)
        if executor is not None:
            for worker in getattr(executor, "workers", None) or ():
                # Some releases wait four seconds for a forked worker before they do this.
                worker.proc.terminate()
            executor.shutdown()


def _configure(config: Any, settings: Settings) -> None:
    if settings.start_method:
        # vLLM forces spawn while it makes a configuration for the CPU; what is set now counts.
        os.environ[START_METHOD] = settings.start_method
    if settings.random_weights:
        config.load_config.load_format = FORMAT
        config.parallel_config.worker_extension_cls = EXTENSION
    if settings.latent_backend:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        backend = registry.AttentionBackendEnum[settings.latent_backend]
        config.attention_config.backend = backend


def has_backend(name: str) -> bool:
    """Whether the installed vLLM has an attention backend of that name."""
    try:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
    except ImportError:
        return False
    return name in registry.AttentionBackendEnum.__members__


@contextlib.contextmanager
def token_budget(generator: Any, tokens: int) -> Iterator[None]:
    """Schedule no more than so many tokens a step, on workers that were made for more."""
    scheduler = generator.scheduler
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = min(before, tokens)
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def how_workers_start(generator: Any) -> str:
    """ "fork" or "spawn", as the workers were in fact started."""
    workers = getattr(generator.executor, "workers", None) or ()
    names = {type(worker.proc).__name__ for worker in workers}
    return "/".join(sorted(name.removesuffix("Process").lower() for name in names)) or "unknown"


def gpu_memory(generator: Any) -> int | None:
    """The most GPU memory a worker's torch has held, in bytes; None without a GPU."""
    peaks = generator.executor.collective_rpc(_gpu_memory)
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None


def _gpu_memory(_worker: Any) -> int | None:
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
