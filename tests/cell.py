"""What the tests of one pair, one vLLM build and one speculators, have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import speculators_vllm_compat
import tiny_models
from speculators_vllm_compat import matrix
from speculators_vllm_compat.detect import detect
from speculators_vllm_compat.patching import GENERATOR, GENERATOR_CLASS

# Float32 against float32: both sides sum in another order, over six layers of width 128 with
# states up to a few hundred in size. Measured differences are below 2e-5.
TOLERANCE = 1e-4

LAYERS = [1, 5, 0, 3]  # not sorted, the last layer included


def speculators_version() -> str:
    return detect("speculators").version_text or ""


def vllm_version() -> str:
    return str(detect("vllm").version.base_version)


def environment() -> tuple[str, ...]:
    """What the matrix says this environment is made of; () for a release it does not list."""
    installed = detect("vllm").version
    releases = matrix.load().releases
    return next((r.environment for r in releases if installed and r.covers(installed)), ())


def splits_by_default() -> bool:
    """Whether vLLM computes a prompt in pieces without being asked to (chunked prefill)."""
    from vllm.config import SchedulerConfig

    [field] = [f for f in dataclasses.fields(SchedulerConfig) if f.name == "enable_chunked_prefill"]
    # A plain value up to some release, pydantic's Field since.
    return bool(getattr(field.default, "default", field.default))


def is_0_3() -> bool:
    return speculators_version().startswith("0.3")


@functools.cache
def models_folder() -> Path:
    folder = Path(os.environ.get("TINY_MODELS", "/tmp/speculators-vllm-compat-models"))
    import transformers

    return folder / transformers.__version__


def model(name: str) -> Path:
    return tiny_models.build(name, models_folder())


@functools.lru_cache(maxsize=1)
def reference(name: str) -> tiny_models.Reference:
    return tiny_models.Reference(model(name))


def generator_module() -> Any:
    """speculators' generator module, patched or not, as things stand."""
    return importlib.import_module(GENERATOR)


@contextlib.contextmanager
def patched() -> Iterator[Any]:
    """The generator's module with every needed patch."""
    with speculators_vllm_compat.patched():
        yield generator_module()


@contextlib.contextmanager
def unpatched() -> Iterator[Any]:
    """The generator's module as it is (imported with the patches, which transformers 5 needs)."""
    with patched() as module:
        pass
    yield module


@contextlib.contextmanager
def skipping(*patch_ids: str) -> Iterator[Any]:
    """The generator's module with every needed patch but these."""
    with patched():  # the import itself may need them
        pass
    os.environ["SPECULATORS_VLLM_COMPAT_SKIP"] = ",".join(patch_ids)
    try:
        with patched() as module:
            yield module
    finally:
        del os.environ["SPECULATORS_VLLM_COMPAT_SKIP"]


def _name_preloaded_libraries() -> None:
    """Satisfy the CPU worker of one release, which does not start unless it finds these named.

    They are a faster allocator and thread library; no value depends on them.
    """
    import vllm

    worker = Path(vllm.__file__).parent / "v1" / "worker" / "cpu_worker.py"
    refusal = r'raise RuntimeError\(\s*f"\{name\} is not found in LD_PRELOAD'
    if re.search(refusal, worker.read_text()):
        os.environ.setdefault("LD_PRELOAD", "libtcmalloc_none.so:libiomp_none.so")


@contextlib.contextmanager
def engine(
    module: Any,
    model_name: str = "llama",
    layer_ids: list[int] | None = None,
    *,
    start_method: str = "fork",
    max_num_batched_tokens: int | None = None,
    configure: Any = None,
    dtype: str = "float32",
    **arguments: Any,
) -> Iterator[Any]:
    """A generator on a tiny model, in float32, shut down at the end.

    Args:
        module: The generator's module.
        model_name: One of tiny_models.CONFIGS.
        layer_ids: LAYERS when left out.
        start_method: How workers start.
        max_num_batched_tokens: The token budget of a step. 0.3.0 takes no such argument, so
            there its constant is changed, as its users do.
        configure: Called with the VllmConfig before workers start.
        dtype: The model's.
        arguments: For the constructor.
    """

    class Generator(getattr(module, GENERATOR_CLASS)):  # as people subclass it
        def _create_vllm_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super()._create_vllm_config(*args, **kwargs)
            # vLLM forces spawn when a CPU configuration is made; forking is set after that.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
            if configure is not None:
                configure(config)
            return config

    _name_preloaded_libraries()
    original = module.ModelConfig
    # dtype="auto" would run a float32 checkpoint in bfloat16; replaced as people replace it.
    module.ModelConfig = lambda **kwargs: original(**{**kwargs, "dtype": dtype})
    budget = None
    if max_num_batched_tokens is not None:
        if is_0_3():
            budget, module.MIN_MAX_BATCHED_TOKENS = (
                module.MIN_MAX_BATCHED_TOKENS,
                max_num_batched_tokens,
            )
        else:
            arguments["max_num_batched_tokens"] = max_num_batched_tokens
    arguments.setdefault("max_model_len", 1024)
    generator = None
    try:
        generator = Generator(
            str(model(model_name)),
            LAYERS if layer_ids is None else layer_ids,
            gpu_memory_utilization=0.1,
            **arguments,
        )
        yield generator
    finally:
        module.ModelConfig = original
        if budget is not None:
            module.MIN_MAX_BATCHED_TOKENS = budget
        if generator is not None:
            for worker in generator.executor.workers:
                # A forked worker of 0.16 holds both ends of the pipe that would tell it to end;
                # vLLM waits four seconds before it terminates it.
                worker.proc.terminate()
            generator.executor.shutdown()


def difference(results: list[dict[str, Any]], model_name: str, layers: list[int]) -> float:
    """The largest absolute difference of results from transformers."""
    return tiny_models.largest_difference(results, reference(model_name), layers)


def assert_right(
    results: list[dict[str, Any]],
    prompts: list[list[int]],
    model_name: str = "llama",
    layers: list[int] | None = None,
) -> float:
    """Results are those of the prompts, in their order, with transformers' values."""
    assert [result["input_ids"].tolist() for result in results] == prompts
    worst = difference(results, model_name, LAYERS if layers is None else layers)
    assert worst < TOLERANCE
    return worst
