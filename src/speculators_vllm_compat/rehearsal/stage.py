"""The process a rehearsal happens in: miniature, weights, generator, checks.

Started by ``process.py`` as ``python -m speculators_vllm_compat.rehearsal.stage``; tells what it
does in JSON lines on a pipe. Its output and its workers' are the log.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..detect import detect
from . import engine, miniature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .checks import Judge, Outcome
    from .layers import Config
    from .miniature import Miniature

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
MLA_DISABLE = "VLLM_MLA_DISABLE"


@dataclasses.dataclass(frozen=True)
class Order:
    """What was asked for on the command line, checked there.

    Attributes:
        folder: Holds the miniature-to-be: the model's config and tokenizer files, copied.
        tokenizer: Whether it had tokenizer files.
        layer_ids: The model's, or None for the generator's choice.
        dtype: Or "auto".
        quantization: "keep", "drop" or "auto".
        start_method: "fork", "spawn" or None.
        trust_remote_code: The model's own code was copied too.
    """

    folder: str
    tokenizer: bool
    layer_ids: list[int] | None
    dtype: str
    quantization: str
    start_method: str | None
    trust_remote_code: bool
    tensor_parallel_size: int
    max_model_len: int
    gpu_memory_utilization: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Course:
    """What follows from the order, the model and the machine.

    Attributes:
        small: The miniature.
        dtype: Of the model and of the written weights.
        own_dtype: What the config states.
        reference: transformers has the architecture, and there is no quantization.
        latent_backend: The attention backend to ask vLLM for, or None.
        notes: What is not proved by this course, and why.
    """

    small: Miniature
    dtype: str
    own_dtype: str | None
    reference: bool
    latent_backend: str | None
    notes: list[str]


def plan(order: Order) -> Course:
    """Read the config, make it small, and decide how it can be rehearsed on this machine.

    Raises:
        UnusableConfigError: The model, or what was asked of it, cannot be rehearsed at all.
    """
    path = Path(order.folder) / "config.json"
    published = json.loads(path.read_text(encoding="utf-8"))
    config = _with_defaults(published, order)
    on_cpu = detect("vllm").cpu_build
    keep = order.quantization == "keep" or (order.quantization == "auto" and not on_cpu)
    small = miniature.shrink(
        config, order.layer_ids, ranks=order.tensor_parallel_size, keep_quantization=keep
    )
    notes: list[str] = []
    if small.dropped_quantization:
        why = "a build for the CPU" if order.quantization == "auto" else "as asked"
        notes.append(f"the quantization scheme {small.dropped_quantization}: left out, {why}")
    own = miniature.own_dtype(config)
    dtype = order.dtype
    if dtype == "auto":
        # The kernels of latent attention and of quantized weights take no float32 on a GPU.
        reduced = not on_cpu and (small.latent_attention or small.quantization)
        dtype = "bfloat16" if reduced else "float32"
    if own not in (None, dtype):
        notes.append(f"the kernels for {own}, the model's dtype: it ran in {dtype}")
    backend = _latent_attention(small, dtype, on_cpu, notes)
    if on_cpu:
        notes.append("a GPU's kernels: this is a build of vLLM for the CPU")
        _bind_threads(order.tensor_parallel_size)
    if not on_cpu and dtype == "float32":
        # Triton multiplies float32 in TF32 unless told otherwise, 4e-3 off.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    return Course(small, dtype, own, _has_reference(small, notes), backend, notes)


def rehearse(order: Order, tell: Callable[..., None]) -> None:
    """The whole rehearsal; every outcome is told."""
    import torch

    # A thread pool that exists before a fork leaves the child's OpenMP waiting for ever.
    torch.set_num_threads(1)
    tell(stage="reading the config")
    course = plan(order)
    folder, small = Path(order.folder), course.small
    tell(stage="making the miniature")
    config = miniature.with_dtype(small.config, course.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _make_files(order, course, config)
    tell(plan=_described(order, course))
    tell(stage="starting the engine")
    with engine.generator(folder, _settings(order, course)) as generator:
        tell(started=engine.how_workers_start(generator))
        for outcome in _outcomes(generator, order, course, config, tell):
            tell(check=dataclasses.asdict(outcome))
        tell(gpu_memory=engine.gpu_memory(generator), notes=course.notes)
        tell(stage="ending the workers")
    tell(done=True)


def _with_defaults(published: Config, order: Order) -> Config:
    """The published config and what its class fills in, where transformers knows the class."""
    from transformers import AutoConfig

    try:
        known = AutoConfig.from_pretrained(
            order.folder, trust_remote_code=order.trust_remote_code
        ).to_dict()
    except Exception as error:  # an unknown architecture, or code that was not trusted
        print(f"transformers does not read the config: {error}", flush=True)
        return published
    return miniature.completed(published, known)


def _has_reference(small: Miniature, notes: list[str]) -> bool:
    from .weights import model_class

    if small.quantization:
        notes.append(f"values against transformers: the scheme {small.quantization} is kept")
        return False
    if model_class(small.config) is None:
        names = ", ".join(small.config.get("architectures") or ["no architecture"])
        notes.append(f"values against transformers: it has no {names}")
        return False
    return True


def _latent_attention(small: Miniature, dtype: str, on_cpu: bool, notes: list[str]) -> str | None:
    """Choose kernels of latent attention, or switch them off where there are none."""
    if not small.latent_attention or MLA_DISABLE in os.environ:
        return None
    if dtype != "float32":
        return None
    sizes = small.text.get("kv_lora_rank"), small.text.get("qk_rope_head_dim")
    if on_cpu and sizes == (512, 64) and engine.has_backend("CPU_MLA"):
        return "CPU_MLA"
    os.environ[MLA_DISABLE] = "1"
    where = "this build" if on_cpu else "a GPU"
    notes.append(
        f"the kernels of latent attention: {where} has none for float32 and these sizes, so the "
        f"same layers ran as plain attention ({MLA_DISABLE}=1)"
    )
    return None


def _bind_threads(ranks: int) -> None:
    """Give each worker a core of its own; vLLM takes a NUMA node for each otherwise."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1 and THREADS_BIND not in os.environ:
        if ranks > len(cores):
            raise miniature.UnusableConfigError(
                f"--tensor-parallel-size {ranks} needs {ranks} cores on a build for the CPU; this "
                f"process may use {len(cores)}. Use a smaller size."
            )
        share = len(cores) // ranks
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        os.environ[THREADS_BIND] = "|".join(",".join(map(str, part)) for part in parts)


def _make_files(order: Order, course: Course, config: Config) -> None:
    from . import weights

    folder = Path(order.folder)
    if not order.tokenizer:
        course.notes.append("the tokenizer: the model's folder has none, a made one was used")
        weights.make_tokenizer(int(course.small.text.get("vocab_size") or 1024), folder)
    if course.reference:
        weights.write(config, folder, seed=order.seed, dtype=course.dtype)


def _settings(order: Order, course: Course) -> engine.Settings:
    return engine.Settings(
        layers=course.small.places,
        dtype=course.dtype,
        max_model_len=order.max_model_len,
        gpu_memory_utilization=order.gpu_memory_utilization,
        tensor_parallel_size=order.tensor_parallel_size,
        start_method=order.start_method,
        random_weights=not course.reference,
        latent_backend=course.latent_backend,
        seed=order.seed,
    )


def _described(order: Order, course: Course) -> dict[str, Any]:
    small = course.small
    return {
        "architecture": ", ".join(small.config.get("architectures") or ["unnamed"]),
        "changes": list(small.changes),
        "kinds": {name: list(counts) for name, counts in small.kinds.items()},
        "layers": list(zip(small.layers, small.places, strict=True)),
        "dtype": course.dtype,
        "own_dtype": course.own_dtype,
        "ranks": order.tensor_parallel_size,
        "latent_backend": course.latent_backend,
        "quantization": small.quantization,
        "reference": course.reference,
    }


def _outcomes(
    generator: Any, order: Order, course: Course, config: Config, tell: Callable[..., None]
) -> Iterator[Outcome]:
    """Each check as it ends; the ones after a failed call are left out, and said to be."""
    from . import checks

    small = course.small
    judge = checks.Judge(course.dtype, small.experts)
    longest = int(generator.vllm_config.model_config.max_model_len) - 1
    vocabulary = int(small.text.get("vocab_size") or miniature.VOCABULARY)
    first = min(miniature.FIRST_PLAIN_TOKEN, vocabulary // 2)
    prompts = checks.prompts(longest, vocabulary, first, order.seed)
    tell(stage="computing hidden states")
    whole = generator.generate(prompts)
    outcome = checks.form(whole, prompts, len(small.places))
    yield outcome
    if not outcome.passed:
        return
    outcome = checks.finite(whole)
    yield outcome
    if not outcome.passed:
        return
    yield checks.telling(whole, small.places, judge)
    if course.reference:
        tell(stage="computing the reference")
        yield _against_reference(whole, order, course, config, judge)
    tell(stage="checking the model against itself")
    yield from _against_itself(generator, prompts, whole, judge)


def _against_reference(
    whole: list[dict[str, Any]], order: Order, course: Course, config: Config, judge: Judge
) -> Outcome:
    from .weights import Reference

    places = course.small.places
    reference = Reference(config, Path(order.folder), course.small.text["num_hidden_layers"])
    compared: list[tuple[Any, Any]] = []
    for result in whole:
        expected = reference(result["input_ids"].tolist(), places)
        compared += zip(result["hidden_states"], expected, strict=True)
    return judge.compare("values of transformers", compared)


def _against_itself(
    generator: Any, prompts: list[list[int]], whole: list[dict[str, Any]], judge: Judge
) -> Iterator[Outcome]:
    from . import checks

    again = generator.generate(prompts)
    yield judge.compare("twice the same", checks.pairs(again, whole))
    order = list(range(1, len(prompts), 2)) + list(range(0, len(prompts), 2))
    permuted = generator.generate([prompts[index] for index in order])
    yield judge.compare("permuted batch", checks.pairs(permuted, whole, order))
    alone = [generator.generate([prompts[index]])[0] for index in checks.ALONE]
    yield judge.compare("alone as in a batch", checks.pairs(alone, whole, checks.ALONE))
    if not _splits(generator):
        yield checks.Outcome(
            "split prompts as whole", None, "this generator's scheduler splits no prompts"
        )
        return
    with engine.token_budget(generator, checks.BUDGET):
        split = generator.generate(prompts)
    yield judge.compare("split prompts as whole", checks.pairs(split, whole))


def _splits(generator: Any) -> bool:
    config = generator.vllm_config.scheduler_config
    return bool(
        getattr(config, "chunked_prefill_enabled", False)
        or getattr(config, "enable_chunked_prefill", False)
    )


def main() -> int:
    """``python -m speculators_vllm_compat.rehearsal.stage ORDER PIPE``."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    pipe = os.fdopen(int(sys.argv[2]), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(pipe.fileno(), False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def tell(**what: Any) -> None:
        pipe.write(json.dumps(what) + "\n")

    try:
        rehearse(order, tell)
    except miniature.UnusableConfigError as error:
        tell(unusable=str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        tell(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
